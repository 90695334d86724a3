"""Draw the picture of docs/faster.md, docs/tokens_per_second.svg, from a committed result.

    python benchmarks/speed/tokens_per_second_picture.py

The result has the form that tokens_per_second.py writes: tokens per second by task and way. A way that was
measured apart from the others has no bars: its speed stands under "apart", and is drawn as a dashed line. The same JSON
gives the same bytes, which tests/test_documents.py compares with the committed picture. The picture has no background,
and its colours can be read on white and on black.
"""

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "tokens_per_second-qwen2.5-coder-1.5b.json"
PICTURE = ROOT / "docs" / "tokens_per_second.svg"

WIDTH, LEFT, RIGHT = 760, 130, 60
TOP, BAR, GAP = 78, 13, 14
TEXT = "#737c86"  # contrast 4.2 with white, 4.5 with #0d1117
COLOURS = {"llama.cpp": "#d9822b", "edgedec without drafts": "#4c8fd6", "edgedec with drafts": "#2ea043"}


def text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", bold: bool = False) -> str:
    """Return a line of text, its baseline at y."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{weight} fill="{TEXT}">'
        f"{escape(words)}</text>"
    )


def bar(x: float, y: float, width: float, colour: str) -> str:
    """Return a bar."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{BAR - 2}" rx="2" fill="{colour}"/>'


def caption(document: dict[str, Any]) -> list[str]:
    """Return the lines below the bars: what was measured, on which machine, at which commit."""
    model = f"{document['model']} ({document['quantization']})"
    machine = f"{document['versions']['cores']} cores of an {document['cpu']}"
    texts = "some texts differ" if document["different"] else "texts with and without drafts equal"
    binding = f"llama-cpp-python {document['versions']['llama-cpp-python']}"
    n_prompts = document["all"]["n_prompts"]
    return [
        f"{model}, {machine}, {binding}, commit {document['commit']}.",
        f"{n_prompts} prompts, greedy, {document['max_tokens']} tokens, drafters start empty each time; {texts}.",
        *([document["apart"]["what"] + "."] if "apart" in document else []),
    ]


def legend(ways: list[str], apart: str | None) -> list[str]:
    """Return a square and a name for each way, a dashed line and a name for the one that was measured apart."""
    lines, x = [], 0.0
    for way in ways:
        lines += [bar(x, 38, 12, COLOURS[way]), text(x + 18, 48, way)]
        x += 40 + 7 * len(way)
    if apart is not None:
        lines += [dashed(x, 43.5, x + 18, 43.5, COLOURS[apart]), text(x + 24, 48, apart)]
    return lines


def dashed(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    """Return a dashed line."""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:g}" x2="{x2:.1f}" y2="{y2:g}" stroke="{colour}" stroke-width="2" '
        'stroke-dasharray="5 3"/>'
    )


def draw(document: dict[str, Any]) -> str:
    """Return the picture of a result as SVG."""
    groups = {name.replace("_", " "): task["tokens_per_s"] for name, task in document["tasks"].items()}
    groups["all"] = document["all"]["tokens_per_s"]
    ways = [way for way in COLOURS if way in groups["all"]]
    apart = document.get("apart")
    scale = (WIDTH - LEFT - RIGHT) / max(speed for speeds in groups.values() for speed in speeds.values())
    group_height = len(ways) * BAR + GAP
    bottom = TOP + len(groups) * group_height
    lines = [text(0, 20, "Tokens per second by task (longer is better)", size=16, bold=True)]
    lines += legend(ways, apart and apart["way"])
    for place, (name, speeds) in enumerate(groups.items()):
        y = TOP + place * group_height
        lines.append(text(LEFT - 12, y + len(ways) * BAR / 2 + 3, name, anchor="end", bold=name == "all"))
        for row, way in enumerate(ways):
            width = speeds[way] * scale
            lines.append(bar(LEFT, y + row * BAR, width, COLOURS[way]))
            lines.append(text(LEFT + width + 6, y + row * BAR + 10, f"{speeds[way]:.1f}", size=11))
    if apart is not None:
        x = LEFT + apart["tokens_per_s"] * scale
        lines.append(dashed(x, TOP - 6, x, bottom - GAP + 6, COLOURS[apart["way"]]))
        lines.append(text(x, TOP - 10, f"{apart['tokens_per_s']:.1f}", size=11, anchor="middle"))
    words = caption(document)
    lines += [text(0, bottom + 16 + 16 * row, line, size=11) for row, line in enumerate(words)]
    height = bottom + 10 + 16 * len(words)
    label = f"Tokens per second by task: {', '.join([*ways, *([apart['way']] if apart else [])])}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{label}" font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">\n  '
        + "\n  ".join(lines)
        + "\n</svg>\n"
    )


def main() -> None:
    """Draw the committed result."""
    PICTURE.write_text(draw(json.loads(RESULT.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
