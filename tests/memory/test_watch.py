"""The watch sheds one thing at a reading, in order, and only while memory is short."""

import json
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from edgedec.memory.shedding import Shedder, Watch, shortage

pytestmark = pytest.mark.slow

# In a process of its own: here freed memory of other tests would be used first.
_SHEDS = """
import json
from edgedec.drafters.suffix.suffix import SuffixStore
from edgedec.memory.shedding import Shedder, Watch
from edgedec.memory.system import resident_bytes

store, held = SuffixStore(), [resident_bytes()]
for i in range(60_000):
    store.young.add(i * i % 3001)
held.append(resident_bytes())
assert len(Watch(1, [Shedder("the suffix store", store.memory_bytes, store.shed)]).check()) == 1
held.append(resident_bytes())
print(json.dumps(held))
"""
CAP = 100_000_000  # its margin is 2 MB
MB = 1_000_000


@dataclass
class World:
    """A clock, what the process holds, why the system is short, and what there is to shed, in MB by name."""

    held_mb: dict[str, float]
    resident_mb: float | None = 50.0
    short: str | None = None
    now: float = 1000.0
    n_read: int = 0
    n_asked: int = 0
    gone: list[str] = field(default_factory=list)

    def watch(self, cap_bytes: int | None = CAP) -> Watch:
        return Watch(
            cap_bytes, [self._shedder(name) for name in self.held_mb], self._read, self._short, clock=lambda: self.now
        )

    def _shedder(self, name: str) -> Shedder:
        def shed() -> None:
            self.gone.append(name)
            if self.resident_mb is not None:
                self.resident_mb -= self.held_mb[name]
            self.held_mb[name] = 0

        return Shedder(name, lambda: int(self.held_mb[name] * MB), shed)

    def _read(self) -> int | None:
        self.n_read += 1
        return None if self.resident_mb is None else int(self.resident_mb * MB)

    def _short(self) -> str | None:
        self.n_asked += 1
        return self.short

    def pass_time(self, seconds: float) -> None:
        self.now += seconds


def test_one_thing_at_a_reading_in_order_until_it_fits() -> None:
    """At each reading at or above the margin the first thing that is left goes; then it is quiet."""
    world = World({"store": 3, "table": 20, "model": 70}, resident_mb=110)
    watch = world.watch()
    assert watch.check() == ["shed store (3.0 MB): the process holds 110.0 MB of 100.0 MB"]
    assert watch.check() == []  # no reading before 0.25 s
    world.pass_time(0.25)
    assert watch.check() == ["shed table (20.0 MB): the process holds 107.0 MB of 100.0 MB"]
    for _ in range(10):
        world.pass_time(0.25)
        assert watch.check() == []
    assert (world.gone, world.held_mb) == (["store", "table"], {"store": 0, "table": 0, "model": 70})


@pytest.mark.parametrize(
    ("cap_mb", "resident_mb", "is_over"), [(100, 97.9, False), (100, 98, True), (1000, 991.9, False), (1000, 992, True)]
)
def test_the_margin_is_where_shedding_begins(cap_mb: int, resident_mb: float, is_over: bool) -> None:
    """It is 2 % of the cap and at most 8 MB; below it nothing happens."""
    world = World({"store": 3}, resident_mb=resident_mb)
    told = world.watch(cap_mb * MB).check()
    assert told == [f"shed store (3.0 MB): the process holds {resident_mb:.1f} MB of {cap_mb:.1f} MB"] * is_over
    assert world.gone == ["store"] * is_over


def test_a_spike_costs_one_thing() -> None:
    """What was high at one reading and is not at the next has cost the first thing only."""
    world = World({"store": 1, "table": 1, "model": 1}, resident_mb=150)
    watch = world.watch()
    watch.check()
    world.resident_mb = 60
    for _ in range(8):
        world.pass_time(0.3)
        watch.check()
    assert world.gone == ["store"]


def test_readings_are_at_most_four_a_second() -> None:
    """However often it is asked, the process is read once in 0.25 s and the system once in 2 s."""
    world = World({})
    watch = world.watch()
    for _ in range(4096):
        watch.check()
        world.pass_time(1 / 1024)
    assert (world.n_read, world.n_asked) == (16, 2)


def test_what_holds_next_to_nothing_stays() -> None:
    """Less than 256 kB are not worth a drafter; what is told then is that nothing is left, once while it lasts."""
    world = World({"small": 0.25, "gone": 0}, resident_mb=120)
    watch = world.watch()
    assert watch.check() == ["the process holds 120.0 MB of 100.0 MB, and nothing is left to shed"]
    world.pass_time(1)
    assert watch.check() == []
    world.resident_mb = 50
    world.pass_time(1)
    assert watch.check() == []
    world.resident_mb = 130
    world.pass_time(1)
    assert watch.check() == ["the process holds 130.0 MB of 100.0 MB, and nothing is left to shed"]
    assert world.gone == []


def test_under_pressure_one_thing_in_ten_seconds() -> None:
    """The system's figure is an average of ten seconds: as long it may speak of what was before the shedding."""
    world = World({"store": 1, "table": 1, "model": 1}, short="the system is short")
    watch = world.watch()
    shed_at = []
    for _ in range(4 * 25):
        shed_at += [world.now for sentence in watch.check() if sentence.endswith(": the system is short")]
        world.pass_time(0.25)
    assert shed_at == [1000, 1010, 1020]
    assert world.gone == ["store", "table", "model"]


def test_pressure_that_is_over_sheds_no_more() -> None:
    """After a shedding for the system's sake the system is looked at again, and left alone where it recovered."""
    world = World({"store": 1, "table": 1}, short="short")
    watch = world.watch()
    assert watch.check() == ["shed store (1.0 MB): short"]
    world.short = None
    for _ in range(100):
        world.pass_time(0.25)
        assert watch.check() == []
    assert world.gone == ["store"]
    world.short = "short again"
    world.pass_time(2)
    assert watch.check() == ["shed table (1.0 MB): short again"]


def test_without_a_cap_only_the_system_counts() -> None:
    """No cap: the process is not read at all."""
    world = World({"store": 1}, resident_mb=1e6)
    watch = world.watch(None)
    assert watch.check() == []
    world.short = "short"
    world.pass_time(2)
    assert watch.check() == ["shed store (1.0 MB): short"]
    assert world.n_read == 0


def test_a_system_that_tells_nothing() -> None:
    """Where the process can't be read, nothing is shed for the cap's sake."""
    world = World({"store": 1}, resident_mb=None)
    assert world.watch().check() == []
    assert world.gone == []


def test_freed_memory_is_given_back_at_once_and_at_the_next_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a drafter lets go of in the step after the shedding goes back, too."""
    given: list[float] = []
    world = World({"store": 1}, resident_mb=99)
    monkeypatch.setattr("edgedec.memory.system.return_free_memory", lambda: given.append(world.now))
    watch = world.watch()
    for _ in range(8):
        watch.check()
        world.pass_time(0.125)
    assert given == [1000, 1000, 1000.25]  # before and after shedding, and at the next reading


@pytest.mark.parametrize(
    ("percent", "available", "total", "is_short"),
    [
        (20.1, 49, 1000, True),
        (20.0, 49, 1000, False),
        (99.0, 50, 1000, False),
        (99.0, None, 1000, False),
        (99.0, 1, None, False),
    ],
)
def test_the_system_is_short_where_it_waits_and_has_nothing_left(
    percent: float, available: int | None, total: int | None, is_short: bool
) -> None:
    """Above 20 % of the time and below 5 % of the memory; what isn't known is no shortage."""
    assert (shortage(percent, available, total) is not None) is is_short


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' allocators keep what they like")
def test_what_was_shed_leaves_the_process() -> None:
    """Of the 20 MB or more that a store of 60,000 tokens takes, most is gone after the shedding."""
    child = subprocess.run([sys.executable, "-c", _SHEDS], capture_output=True, text=True, check=True)
    before, full, after = json.loads(child.stdout)
    assert full - before > 15 * MB
    assert after - before < (full - before) // 2


# Of many pieces all but the last are freed, so that the allocator keeps what the system could have.
_FREES = """
import json, ctypes
from edgedec.memory.shedding import Shedder, Watch
from edgedec.memory.system import resident_bytes

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
before = resident_bytes()
pieces = [libc.malloc(60_000) for _ in range(1000)]
for piece in pieces:
    ctypes.memset(piece, 1, 60_000)
for piece in pieces[:-1]:
    libc.free(piece)
shed = []
cap = before + 30_000_000
told = Watch(cap, [Shedder("the suffix store", lambda: 10_000_000, lambda: shed.append(1))]).check()
print(json.dumps([told, shed, resident_bytes() - before]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' allocators keep what they like")
def test_what_was_freed_is_no_reason_to_shed() -> None:
    """Memory that a request's text took, freed by now and kept by the allocator, goes back instead of a drafter."""
    child = subprocess.run([sys.executable, "-c", _FREES], capture_output=True, text=True, check=True)
    told, shed, grown = json.loads(child.stdout)
    assert (told, shed) == ([], [])
    assert grown < 20 * MB
