"""Writes the tables of the documents that say what a board holds, as `edgedec plan` predicts it.

Run: python benchmarks/memory/board_plans.py, which prints the tables; --write puts them into their pages.
tests/apps/cli/test_boards.py compares the pages with plans for headers of these sizes.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

Plan = Callable[[str], dict[str, Any]]
"""Returns the document of `edgedec plan` for its arguments, the model's name first."""

_SMALL, _MIDDLE, _LARGE = "smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"
_DRAFTS = f"--draft-option model={_MIDDLE}"
_PI = [f"raspberry-pi-{name}" for name in ("zero-2", "3", "4-2gb")]
_JETSON = ["jetson-orin-nano-4gb", "jetson-orin-nano-8gb"]


def tables(plan: Plan, *, only_llamacpp: bool | None = None) -> Iterator[tuple[str, str]]:
    """Yield the table of each page; those of the llamacpp runtime, which need its library, or the others, or all."""
    if only_llamacpp is not False:
        yield "apps/jetson/README.md", _table(_JETSON, [(_LARGE, ""), (_LARGE, _DRAFTS)], plan)
    if only_llamacpp:
        return
    yield "docs/which-model.md", _table(_PI, [(name, "") for name in (_SMALL, _MIDDLE, _LARGE)], plan)
    yield "docs/which-model.md", _by_context(plan)


def _table(boards: list[str], models: list[tuple[str, str]], plan: Plan) -> str:
    """Return a row for each board and model: what is free, planned and given up."""
    rows = [
        "| board | free | model | planned | context | a token reads | given up | speed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for board in boards:
        for model, more in models:
            found = plan(f"{model} --machine {board} {more}".strip())
            weights = next(term for term in found["terms"] if term["name"].startswith("weights"))
            read = re.match(r"([\d.]+) MB more are read", weights["detail"])
            phrases = [phrase for phrase in found["given_up"] if "context" not in phrase and "needed" not in phrase]
            speed = found["speed"].removesuffix(" on that machine")
            name = " ".join([f"`{model}`", *(f"`{more}`" for more in [more] if more)])
            n_mb = round(found["total_bytes"] / 1e6, -1 if read else None)  # parts of weights are of many sizes
            cells = (f"{board}", _mb(found["free_bytes"]), name, f"{n_mb:,.0f} MB")
            fits = (
                f"{found['setting']['context']:,}",
                f"{round(float(read[1]), -1):.0f} MB" if read else "",
                ", ".join(phrases) or "nothing",
            )
            rows.append(f"| {' | '.join((*cells, *(fits if found['fits'] else ('does not fit', '', '')), speed))} |")
    return "\n".join(rows)


def _by_context(plan: Plan) -> str:
    """Return a row for each model: what the cpu runtime holds with a short text, and with full contexts."""
    rows = ["| model | short text | full context of 512 | 4,096 | 8,192 |", "|---|---|---|---|---|"]
    for model in (_SMALL, _MIDDLE, _LARGE):
        plans = [plan(f"{model} --machine raspberry-pi-5-16gb --context {n}") for n in (512, 4096, 8192)]
        sizes = [plans[0]["start_bytes"], *(each["total_bytes"] for each in plans)]
        rows.append(f"| {' | '.join([model, *map(_mb, sizes)])} |")
    return "\n".join(rows)


def _mb(n_bytes: int) -> str:
    return f"{round(n_bytes / 1e6):,} MB"


def _with_table(text: str, table: str) -> str:
    """Return the text of a page with this table in place of the one of the same heading."""
    heading = re.escape(table.partition("\n")[0])
    return re.sub(rf"{heading}\n(?:\|.*\n)*", lambda _: f"{table}\n", text, count=1)


@cache
def plan_here(arguments: str) -> dict[str, Any]:
    """Return what the command says of a model that is here, or of the header of one that is not."""
    program = [sys.executable, "-m", "edgedec_apps.cli", "plan", *arguments.split(), "--quiet", "--json"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    for page, table in tables(plan_here):
        print(f"{page}\n\n{table}\n", flush=True)
        if arguments.write:
            path = Path(__file__).parents[2] / page
            path.write_text(_with_table(path.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    main()
