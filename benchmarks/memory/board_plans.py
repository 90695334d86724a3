"""Writes docs/boards.md: what `edgedec plan` says for machines that need not be here.

Run: python benchmarks/memory/board_plans.py > docs/boards.md
"""

import subprocess
import sys

COMMANDS = {"4 GB": ("qwen2.5-coder-1.5b --machine jetson-orin-nano-4gb",)}
_INTRODUCTION = """# Plans for boards

What `edgedec plan` says for a board, written on x86-64 by
`python benchmarks/memory/board_plans.py > docs/boards.md`; nothing was loaded on that machine. `--machine` assumes what
the system and the driver hold (`apps/edgedec_apps/cli/reports/machines.py`); other boards: `edgedec plan MODEL
--machine NAME`. Tiles may have other sizes on Arm. [memory.md](memory.md#memory-by-device) explains the terms. A
Jetson's GPU shares the board's memory, so there is one column.
"""


def main() -> None:
    """Print the document."""
    print(_INTRODUCTION)
    for size, commands in COMMANDS.items():
        print(f"## {size}\n")
        for command in commands:
            print(f"```text\n$ edgedec plan {command}\n{_plan(command)}\n```\n")


def _plan(command: str) -> str:
    """Return what the command prints, without the list of what else would fit."""
    program = [sys.executable, "-m", "edgedec_apps.cli", "plan", *command.split(), "--quiet"]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    return done.stdout.split("\nWhat is changed to fit")[0].strip()


if __name__ == "__main__":
    main()
