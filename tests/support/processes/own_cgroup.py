"""Give a command a memory cgroup of its own with a hard limit: the system ends a process that needs more.

Both versions of Linux's control groups work (the kernel's Documentation: admin-guide/cgroup-v2.rst,
cgroup-v1/memory.rst). Making a group needs the right to write below /sys/fs/cgroup: root's, or a delegated folder.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

_ROOT = Path("/sys/fs/cgroup")
_V1 = ("memory.limit_in_bytes", "memory.oom_control")
_V2 = ("memory.max", "memory.events")


@dataclass(frozen=True)
class Group:
    """One group's folder and the names its files have."""

    folder: Path
    limit: str
    events: str

    def command(self, command: list[str]) -> list[str]:
        """Return the command that joins the group and then becomes `command`."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *command]

    def n_killed(self) -> int:
        """Return how many processes the system ended for want of memory."""
        lines = (self.folder / self.events).read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


@contextmanager
def own_cgroup(limit_bytes: int) -> Iterator[Group]:
    """Make a group below this process's own, limited to so many bytes; remove it afterwards.

    Raises OSError where no such group can be made.
    """
    parent, names = _parent()
    group = Group(Path(mkdtemp(prefix="edgedec-", dir=parent)), *names)
    try:
        (group.folder / group.limit).write_text(str(limit_bytes), encoding="utf-8")
        yield group
    finally:
        group.folder.rmdir()


def _parent() -> tuple[Path, tuple[str, str]]:
    """Return the folder of this process's memory group and the names of its version's files."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path.lstrip("/")
    if "memory" in own:
        return _ROOT / "memory" / own["memory"], _V1
    return _ROOT / own[""], _V2
