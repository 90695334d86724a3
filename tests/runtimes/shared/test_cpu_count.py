"""Cores are counted from what the system says of them: on made-up Linux trees, and on this machine."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgedec_runtimes.shared import cpu_count
from edgedec_runtimes.shared.cpu_count import cgroup_cores, cores_to_pin, linux_cores, usable_cores

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has it")


def write(path: Path, text: str) -> None:
    """Write a file of a tree, with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="ascii")


def processor(root: Path, siblings: list[str], **values: list[int]) -> Path:
    """Write the tree of a processor: for each logical one its siblings, and values by the name of their file."""
    for cpu, text in enumerate(siblings):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}"
        write(folder / "topology/thread_siblings_list", text)
        for name, numbers in values.items():
            write(folder / name.replace("__", "/"), str(numbers[cpu]))
    return root


def test_cores_with_two_threads_each(tmp_path: Path) -> None:
    """Two logical processors that are each other's siblings are one core, also where one of them is not allowed."""
    root = processor(tmp_path, ["0,2", "1,3", "0,2", "1,3"])
    assert linux_cores({0, 1, 2, 3}, root) == [(0, 2), (1, 3)]
    assert linux_cores({0, 1, 3}, root) == [(0,), (1, 3)]
    assert linux_cores({2}, root) == [(2,)]


def test_fast_cores_come_first(tmp_path: Path) -> None:
    """By capacity on Arm; by frequency on x86-64, whose fast cores have two threads and whose slow ones have one."""
    arm = processor(tmp_path / "arm", ["0", "1", "2", "3"], cpu_capacity=[400, 400, 1024, 1024])
    assert linux_cores({0, 1, 2, 3}, arm) == [(2,), (3,), (0,), (1,)]
    hybrid = processor(
        tmp_path / "x86",
        ["0", "1", "2-3", "2-3", "4-5", "4-5"],
        cpufreq__cpuinfo_max_freq=[3_800_000, 3_800_000, 5_200_000, 5_200_000, 5_100_000, 5_100_000],
    )
    assert linux_cores(set(range(6)), hybrid) == [(2, 3), (4, 5), (0,), (1,)]


def test_without_a_topology_each_logical_processor_is_a_core(tmp_path: Path) -> None:
    """As in containers that show no tree, or one of garbage."""
    assert linux_cores({0, 5}, tmp_path) == [(0,), (5,)]
    write(tmp_path / "sys/devices/system/cpu/cpu0/cpu_capacity", "a lot")
    assert linux_cores({0, 5}, tmp_path) == [(0,), (5,)]


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/", {"cpu.max": "200000 100000"}, 2),
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "max 100000"}, 1 << 16),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
        ("0::/not/mounted/here", {"cpu.max": "50000 100000"}, 1),
        ("2:cpu,cpuacct:/d\n0::/", {"cpu/d/cpu.cfs_quota_us": "400000", "cpu/d/cpu.cfs_period_us": "100000"}, 4),
        ("2:cpu,cpuacct:/", {"cpu,cpuacct/cpu.cfs_quota_us": "100000", "cpu,cpuacct/cpu.cfs_period_us": "50000"}, 2),
        ("2:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 1 << 16),
        ("0::/", {"cpu.max": "100000 0"}, 1 << 16),
        ("garbage", {"cpu.max": "100000 100000"}, 1 << 16),
    ],
)
def test_limits_of_cgroups(tmp_path: Path, cgroup: str, files: dict[str, str], expected: int) -> None:
    """The lowest limit counts, of both versions, of the process's own cgroup and of those above it."""
    write(tmp_path / "proc/self/cgroup", cgroup)
    for name, text in files.items():
        write(tmp_path / "sys/fs/cgroup" / name, text)
    assert cgroup_cores(tmp_path) == expected


def test_elsewhere_psutil_counts_physical_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where psutil does not know them, logical processors count."""
    fake = SimpleNamespace(cpu_count=lambda logical: 3)
    monkeypatch.setattr(sys, "platform", "another")
    monkeypatch.setitem(sys.modules, "psutil", fake)
    assert usable_cores() == 3
    fake.cpu_count = lambda logical: None
    assert usable_cores() == os.cpu_count()
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert usable_cores() == os.cpu_count()


@LINUX
def test_this_machine() -> None:
    """No more cores than the affinity has logical processors."""
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


@LINUX
def test_threads_keep_to_cores_only_where_each_core_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with fewer or more threads than cores, not under a limit, not where the user forbids it."""
    cores = [(0, 2), (1, 3)]
    monkeypatch.delenv("EDGEDEC_CPU_PIN", raising=False)
    monkeypatch.setattr(cpu_count, "linux_cores", lambda: cores)
    monkeypatch.setattr(cpu_count, "cgroup_cores", lambda: 2)
    assert [cores_to_pin(n) for n in (1, 2, 3)] == [[], cores, []]
    monkeypatch.setattr(cpu_count, "cgroup_cores", lambda: 1)
    assert cores_to_pin(2) == []
    monkeypatch.setattr(cpu_count, "cgroup_cores", lambda: 2)
    monkeypatch.setenv("EDGEDEC_CPU_PIN", "0")
    assert cores_to_pin(2) == []
