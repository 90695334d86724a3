"""What the system says of memory is read from its files as they are written there, and nonsense is None."""

import gc
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgedec.memory import system as system_memory

HAS_PREAD = pytest.mark.skipif(not hasattr(os, "pread"), reason="only Linux has what it reads")
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads this machine's own /proc")
UNLIMITED = "9223372036854771712\n"  # what version 1 writes
MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    700 kB\nHugePages_Total:       0\n"
STATUS = (
    "Name:\tpython\nVmHWM:\t   90 kB\nVmRSS:\t   80 kB\nRssAnon:\t   50 kB\nRssFile:\t   28 kB\nRssShmem:\t    2 kB\n"
)
PRESSURE = "some avg10={} avg60=0.00 avg300=0.00 total=12\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=0\n"


class Tree:
    """Made-up folders /proc and /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        self.folders = (self.proc, self.cgroup)

    def write(self, files: Mapping[str, str | bytes]) -> "Tree":
        """Write files, given by their paths below "proc" and "cgroup"."""
        for name, text in files.items():
            path = self.proc.parent / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return self


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A machine of 1000 kB with 700 kB available, and no control group that limits anything."""
    return Tree(tmp_path).write({"proc/meminfo": MEMINFO, "proc/self/status": STATUS})


def v2(group: str, **values: int | str) -> dict[str, str]:
    """Return the files of a control group of version 2: the arguments are their names after "memory."."""
    return {f"cgroup{group}/memory.{name}": f"{value}\n" for name, value in values.items()}


def test_without_a_limit_the_machine_decides(tree: Tree) -> None:
    """No control group: what meminfo says is available; no limit, no peak, no pressure known."""
    assert system_memory.total_bytes(tree.proc) == 1000 * 1024
    assert system_memory.available_bytes(*tree.folders) == 700 * 1024
    assert system_memory.cgroup_limit_bytes(*tree.folders) is None
    assert system_memory.pressure_reader(*tree.folders)() is None


def test_the_tightest_of_nested_groups_decides(tree: Tree) -> None:
    """Every level counts, memory.high as memory.max; page cache that the group can drop is not held."""
    tree.write({"proc/self/cgroup": "0::/outer/inner\n"})
    tree.write(v2("/outer/inner", max="max", high=500_000, current=450_000, peak=480_000))
    tree.write(v2("/outer", max=400_000, high="max", current=390_000, peak=399_000))
    assert system_memory.cgroup_limit_bytes(*tree.folders) == 400_000
    assert system_memory.available_bytes(*tree.folders) == 10_000

    cache = "anon 1\nactive_file 30000\ninactive_file 40000\nslab_reclaimable 5000\nfile 900000\n"
    tree.write({"cgroup/outer/memory.stat": cache})
    assert system_memory.available_bytes(*tree.folders) == min(500_000 - 450_000, 10_000 + 75_000)


ROOT_GROUP, OVER = v2("", max=300_000, current=100_000, peak=250_000), v2("", high=100_000, current=150_000)
GROUPS: dict[str, tuple[str, dict[str, str], int | None, int]] = {
    "a group that is not there": ("/system.slice/docker-1.scope", ROOT_GROUP, 300_000, 200_000),
    "another container's": ("/../other", ROOT_GROUP, 300_000, 200_000),
    "the root of a container": ("/", ROOT_GROUP, 300_000, 200_000),
    "no path": ("", ROOT_GROUP, 300_000, 200_000),
    "a path out of the tree": ("/../secret", {"secret/memory.max": "1\n"}, None, 700 * 1024),
    "over its limit": ("/", OVER, 100_000, 0),
    "over its limit, with much cache": ("/", OVER | {"cgroup/memory.stat": "inactive_file 900000\n"}, 100_000, 100_000),
    "only the limit is known": ("/", v2("", max=300_000, current="?"), 300_000, 300_000),
}


@pytest.mark.parametrize("name", GROUPS)
def test_one_group(tree: Tree, name: str) -> None:
    """In a container the root alone is looked at; a group may be over its high; cache frees no more than the limit."""
    path, files, limit, available = GROUPS[name]
    tree.write({"proc/self/cgroup": f"0::{path}\n"} | files)
    assert system_memory.cgroup_limit_bytes(*tree.folders) == limit
    assert system_memory.available_bytes(*tree.folders) == available


def test_version_1(tree: Tree) -> None:
    """Version 1 has its own folder and names; its number for "no limit" is none."""
    tree.write({"proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/\n"})
    tree.write(v2("", max=5))  # not where the controller is
    group = "cgroup/memory/a/b/memory."
    tree.write({"cgroup/memory/memory.limit_in_bytes": UNLIMITED, "cgroup/memory/a/memory.limit_in_bytes": UNLIMITED})
    tree.write({group + "limit_in_bytes": UNLIMITED, group + "usage_in_bytes": "7\n"})
    assert system_memory.cgroup_limit_bytes(*tree.folders) is None
    assert system_memory.available_bytes(*tree.folders) == 700 * 1024

    tree.write({group + "limit_in_bytes": "600000\n", group + "usage_in_bytes": "500000\n"})
    tree.write({group + "stat": "cache 9\ntotal_inactive_file 50000\ntotal_active_file 1000\ninactive_file 7\n"})
    assert system_memory.cgroup_limit_bytes(*tree.folders) == 600_000
    assert system_memory.available_bytes(*tree.folders) == 151_000


NONSENSE: list[bytes] = [
    *(b"", b"\0\xff\xfe\n", b"memory", b"-5\n", b"1e9\n", b"0x10\n", b"9" * 5000, b"max", b":::", b"0::/\0/a\n"),
    *(b"MemTotal: kB\nVmRSS: -1 kB\nsome avg10=nan", b"some avg10=-1.00 avg60=0"),
    "\N{ARABIC-INDIC DIGIT FOUR}".encode(),
]


@HAS_PREAD
@pytest.mark.parametrize("text", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_is_none(tmp_path: Path, text: bytes) -> None:
    """Files that hold no such number are as good as none, whatever else they hold."""
    names = ("meminfo", "self/status", "self/statm", "self/cgroup", "pressure/memory")
    tree = Tree(tmp_path).write({f"proc/{name}": text for name in names})
    tree.write({f"cgroup/memory.{name}": text for name in ("max", "high", "current", "peak", "stat", "pressure")})
    assert system_memory.resident_bytes(tree.proc) is system_memory.peak_resident_bytes(tree.proc) is None
    assert system_memory.resident_reader(tree.proc)() is system_memory.total_bytes(tree.proc) is None
    assert system_memory.available_bytes(*tree.folders) is system_memory.cgroup_limit_bytes(*tree.folders) is None
    assert system_memory.pressure_reader(*tree.folders)() is None


def test_nothing_there_is_none(tmp_path: Path) -> None:
    """Folders in the place of files, and no files at all, are no error."""
    for tree in (Tree(tmp_path / "none"), Tree(tmp_path / "folders")):
        assert system_memory.available_bytes(*tree.folders) is None
        assert system_memory.resident_bytes(tree.proc) is None
        assert system_memory.resident_reader(tree.proc)() is None
        assert system_memory.pressure_reader(*tree.folders)() is None
        (tmp_path / "folders/proc/self/statm").mkdir(parents=True, exist_ok=True)
        (tmp_path / "folders/proc/meminfo").mkdir(parents=True, exist_ok=True)
        (tmp_path / "folders/proc/pressure/memory").mkdir(parents=True, exist_ok=True)


def test_resident_pages(tree: Tree) -> None:
    """What the process holds now, and the most that it has held."""
    assert system_memory.resident_bytes(tree.proc) == 80 * 1024
    assert system_memory.peak_resident_bytes(tree.proc) == 90 * 1024


@HAS_PREAD
def test_a_reader_sees_what_the_file_says_now(tree: Tree) -> None:
    """The files stay open: what is written into them later is read, and they close with the reader."""
    tree.write({"proc/self/statm": "900 20 3 1 0 5 0\n", "proc/pressure/memory": PRESSURE.format("0.00")})
    read, waited = system_memory.resident_reader(tree.proc), system_memory.pressure_reader(*tree.folders)
    page = mmap.PAGESIZE if sys.platform == "linux" else 4096
    assert (read(), waited()) == (20 * page, 0.0)
    tree.write({"proc/self/statm": "900 21 3 1 0 5 0\n", "proc/pressure/memory": PRESSURE.format("12.34")})
    assert (read(), waited()) == (21 * page, 12.34)


@pytest.mark.slow
@ON_LINUX
def test_readers_close_their_files(tree: Tree) -> None:
    """No file stays open when its reader is gone."""
    tree.write({"proc/self/statm": "1 2 3\n", "proc/pressure/memory": PRESSURE.format("0.00")})
    gc.collect()  # what others left goes before, not meanwhile
    before = sorted(os.listdir("/proc/self/fd"))
    readers = [system_memory.resident_reader(tree.proc), system_memory.pressure_reader(*tree.folders)]
    assert len(os.listdir("/proc/self/fd")) == len(before) + 2
    del readers
    gc.collect()
    assert sorted(os.listdir("/proc/self/fd")) == before


@HAS_PREAD
def test_pressure_is_the_worst_of_machine_and_groups(tree: Tree) -> None:
    """Of the "some" lines, the largest; groups of version 1 have none."""
    tree.write({"proc/pressure/memory": PRESSURE.format("3.50")})
    assert system_memory.pressure_reader(*tree.folders)() == 3.5
    tree.write({"proc/self/cgroup": "0::/a\n", "cgroup/a/memory.pressure": PRESSURE.format("41.25")})
    tree.write({"cgroup/memory.pressure": PRESSURE.format("40.00")})
    assert system_memory.pressure_reader(*tree.folders)() == 41.25
    tree.write({"proc/self/cgroup": "1:memory:/a\n", "cgroup/memory/a/memory.pressure": PRESSURE.format("60.00")})
    assert system_memory.pressure_reader(*tree.folders)() == 3.5


TAKES_AND_GIVES_BACK = """
import json
import numpy as np
from edgedec.memory import system as system_memory
read = system_memory.resident_reader()
system_memory.return_free_memory()
before = system_memory.resident_bytes()
taken = np.ones(40_000_000, np.uint8)  # more than glibc ever takes from its heap, so that freeing it unmaps it
after, peak, quick = system_memory.resident_bytes(), system_memory.peak_resident_bytes(), read()
del taken
system_memory.return_free_memory()
print(json.dumps([before, after, peak, quick, read()]))
"""


@pytest.mark.slow
@ON_LINUX
def test_of_this_machine() -> None:
    """A process that does nothing else sees memory that it takes, and that it gives back when the memory is freed."""
    child = subprocess.run([sys.executable, "-c", TAKES_AND_GIVES_BACK], capture_output=True, text=True, check=True)
    before, after, peak, quick, freed = json.loads(child.stdout)
    assert 39_000_000 < after - before < 50_000_000
    assert abs(quick - after) < 2_000_000
    assert peak >= after - 2_000_000
    assert freed < after - 35_000_000


@ON_LINUX
def test_the_machine_has_memory_available() -> None:
    """What is available is at most what the machine has."""
    total, available = system_memory.total_bytes(), system_memory.available_bytes()
    assert total is not None
    assert available is not None
    assert 0 < available <= total


def test_elsewhere_psutil_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only on Windows it knows the peak; without psutil nothing is known."""
    fake = SimpleNamespace(
        virtual_memory=lambda: SimpleNamespace(total=8 << 30, available=3 << 30),
        Process=lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=5000, peak_wset=6000)),
    )
    monkeypatch.setitem(sys.modules, "psutil", fake)
    monkeypatch.setattr(system_memory, "_is_linux", lambda proc: False)
    monkeypatch.setattr(system_memory, "_most_used", lambda: None)
    of_machine, of_process = ("total_bytes", "available_bytes"), ("resident_bytes", "peak_resident_bytes")
    figures = [getattr(system_memory, name) for name in of_machine + of_process]
    assert [read() for read in figures] == [8 << 30, 3 << 30, 5000, 6000]
    monkeypatch.setattr(fake, "Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=5000)))
    assert [read() for read in figures] == [8 << 30, 3 << 30, 5000, None]
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert [read() for read in figures] == [None] * 4


def test_psutil_and_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What psutil tells is of the size of what the files tell; on other systems it is what the functions return."""
    pytest.importorskip("psutil")
    total, resident = system_memory.total_bytes(), system_memory.resident_bytes()
    monkeypatch.setattr(system_memory, "_is_linux", lambda proc: False)
    assert system_memory.total_bytes() == total
    assert resident is not None
    assert system_memory.resident_bytes() == pytest.approx(resident, rel=0.2)


HELD_BY_MAPPING = """
import ctypes, numpy
from edgedec_apps.base_memory import keep_heap_small

class Heap(ctypes.Structure):
    _fields_ = [(f"field_{{i}}", ctypes.c_size_t) for i in range(10)]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Heap
{begin}
block = numpy.ones(16 << 20, numpy.uint8)
del block
before = libc.mallinfo2().field_4  # bytes of blocks that are mapped for themselves
block = numpy.ones(8 << 20, numpy.uint8)
print(libc.mallinfo2().field_4 - before >= 8 << 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(system_memory.glibc("mallinfo2") is None, reason="the heap of glibc 2.33 and later")
@pytest.mark.parametrize(("begin", "mapped"), [("", False), ("keep_heap_small()", True)])
def test_a_large_block_goes_back_to_the_system_when_it_is_freed(begin: str, mapped: bool) -> None:
    """It is mapped for itself; without keep_heap_small glibc takes it from a heap once a larger one was freed."""
    command = [sys.executable, "-c", HELD_BY_MAPPING.format(begin=begin)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{mapped}\n"
