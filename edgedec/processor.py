"""What the processor is: its name and its instructions, as the system tells them."""

import platform
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


@cache
def cpu_name() -> str:
    """Return the CPU's name, by which machines that share a home folder differ; "" where the system does not say it."""
    return named_cpu(_lines(_CPUINFO)) or platform.processor()


def machine_name() -> str:
    """Return the kind of this machine's processor and its name: measured times and exact bits depend on both."""
    return f"{platform.machine()} {cpu_name()}"


def named_cpu(lines: Iterable[str]) -> str:
    """Return the name of a CPU from the lines of /proc/cpuinfo: that of its model or, on Arm, of its cores' designs.

    >>> named_cpu(["processor : 0", "model name : Some CPU @ 2 GHz", "model name : never read"])
    'Some CPU @ 2 GHz'
    >>> named_cpu(["CPU implementer : 0x41", "CPU part : 0xd0b", "CPU implementer : 0x41", "CPU part : 0xd05"])
    '0x41 0xd05 0xd0b'
    """
    parts: set[str] = set()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
        if key.strip() in ("CPU implementer", "CPU part"):
            parts.add(value.strip())
    return " ".join(sorted(parts))


def cpu_facts() -> tuple[str, list[str]]:
    """Return the CPU's name for a person, and its instruction sets as the system lists them; [] where it does not."""
    model, flags = platform.processor() or platform.machine(), ""
    for line in _lines(_CPUINFO):
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            model = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = value
    return model, flags.split()


def _lines(path: Path) -> Iterator[str]:
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as lines:
        yield from lines
