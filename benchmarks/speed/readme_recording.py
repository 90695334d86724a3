"""Record the README's first command in a terminal, and draw it as docs/terminal.svg.

    python benchmarks/speed/readme_recording.py record    run the command, keep what the terminal showed, and draw it
    python benchmarks/speed/readme_recording.py           draw it again

The command is the one that the README begins with, behind its `pip install . &&`. It runs once unseen, as the first
start measures, and then in a terminal of 110 columns; what its screen shows at the end is
benchmarks/results/terminal.json, with the seconds that it took and the machine. The same JSON gives the same bytes,
which tests/test_documents.py compares with the committed picture. Recording needs a system with pseudo-terminals.
"""

import argparse
import io
import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
RECORDING = ROOT / "benchmarks" / "results" / "terminal.json"
PICTURE = ROOT / "docs" / "terminal.svg"
COLUMNS = 110
CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07]*\x07|([\r\n\x08\x07])")


def first_command() -> str:
    """Return the README's first command without the installation before it."""
    block = re.search(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    return block[1].strip().split(" && ")[-1]


def screen(output: str) -> list[str]:
    """Return the lines that a terminal shows after this output, colours kept: lines that were drawn over are left out.

    Only what edgedec's bars use is understood: carriage returns, erased lines, and the cursor going up.
    """
    lines, row, begins, position = [""], 0, False, 0
    for match in [*CONTROL.finditer(output), None]:
        text = output[position : match.start() if match else len(output)]
        if text:
            lines[row], begins = text if begins else lines[row] + text, False
        if match is None:
            break
        position, code = match.end(), match[3] or match[2]
        if code == "\n":
            row, begins = row + 1, False
            lines += [""] * (row == len(lines))
        elif code == "\r":
            begins = True
        elif code == "A":
            row = max(0, row - int(match[1] or 1))
        elif code == "K":
            lines[row] = ""
        elif code == "m":
            lines[row] += match[0]
    return [line.rstrip() for line in lines]


def record() -> dict[str, Any]:
    """Run the command twice, the second time in a terminal, and return what that showed.

    Raises:
        RuntimeError: the command failed.
    """
    import pty

    command = first_command()
    subprocess.run(command, shell=True, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    environment = os.environ | {"COLUMNS": str(COLUMNS), "LINES": "40", "TERM": "xterm-256color"}
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe("sh", ["sh", "-c", command], environment)
    begun, output = time.monotonic(), b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not part:
            break
        output += part
    if os.waitpid(child, 0)[1] != 0:
        raise RuntimeError(f"the command failed: {output.decode(errors='replace')}")
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return {
        "benchmark": "readme_recording",
        "command": command,
        "cpu": model[1] if model else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "seconds": round(time.monotonic() - begun, 2),
        "lines": screen(output.decode(errors="replace").replace("\r\n", "\n")),
    }


def draw(recording: dict[str, Any]) -> str:
    """Return the picture of a recording, an SVG without fonts from elsewhere."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text(f"$ {recording['command']}\n", style="bold"))
    console.print(Text.from_ansi("\n".join(recording["lines"]).rstrip()))
    form = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    title = f"{recording['cores']} cores of an {recording['cpu']}"
    svg = console.export_svg(title=title, code_format=form, unique_id="terminal")
    return "\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n"


def main() -> None:
    """Record if asked to, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("record",), help="run the command first")
    if parser.parse_args().what is not None:
        RECORDING.write_text(json.dumps(record(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PICTURE.write_text(draw(json.loads(RECORDING.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
