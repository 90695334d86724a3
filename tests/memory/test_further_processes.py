"""What a model's further processes hold counts as this one's: in readings, in the watch, and in what is reported."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models.tiny_models import tiny_llama
from support.processes.hosted import hosted

from edgedec.load_options import LoadOptions
from edgedec.memory.shedding import Watch
from edgedec.memory.system import held_bytes, held_reader, peak_held_bytes, peak_resident_bytes, resident_bytes
from edgedec.runtime import HasProcesses, processes_of
from edgedec.sessions.outer_session import OuterModel
from edgedec_apps.server.core.metrics import Metrics, memory_gauges

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of other processes")
MB = 1_000_000
# It holds 100 MB for a while, and 60 MB then.
_HOLDS = """
import mmap
kept, freed = mmap.mmap(-1, 60_000_000), mmap.mmap(-1, 40_000_000)
for held in (kept, freed):
    held.write(b"x" * len(held))
freed.close()
print(flush=True)
input()
"""


class Owner:
    """Something with processes."""

    def __init__(self, *processes: int) -> None:
        self.processes = processes


def write_status(proc: Path, process: str, resident_kb: int, peak_kb: int) -> None:
    """Write what Linux says of a process, below a made-up /proc."""
    folder = proc / process
    folder.mkdir(parents=True)
    (folder / "status").write_text(f"Name:\tx\nVmHWM:\t {peak_kb} kB\nVmRSS:\t {resident_kb} kB\n", encoding="ascii")
    (folder / "statm").write_text(f"9 {resident_kb // 4} 0 0 0 0 0\n", encoding="ascii")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc with this process and two others."""
    write_status(tmp_path, "self", 80, 400)
    write_status(tmp_path, "11", 40, 300)
    write_status(tmp_path, "12", 20, 60)
    return tmp_path


@ON_LINUX
def test_readings_are_sums(proc: Path) -> None:
    """What is held now is summed up; the peak is the others' peaks with what is held here, or the own one if higher."""
    assert held_bytes((), proc) == 80 * 1024
    assert held_bytes((11, 12), proc) == held_reader(lambda: (11, 12), proc)() == 140 * 1024
    assert peak_held_bytes((), proc) == 400 * 1024
    assert peak_held_bytes((11, 12), proc) == 440 * 1024
    assert peak_held_bytes((12,), proc) == 400 * 1024


@ON_LINUX
def test_a_process_that_has_ended_holds_nothing(proc: Path) -> None:
    """Nothing can be read of it; the others count as before."""
    assert held_bytes((11, 99), proc) == 120 * 1024
    assert peak_held_bytes((11, 99), proc) == 400 * 1024


@ON_LINUX
def test_a_reader_asks_each_time(proc: Path) -> None:
    """A process that is started later counts from then on."""
    others: list[int] = []
    read = held_reader(lambda: others, proc)
    assert read() == 80 * 1024
    others.append(11)
    assert read() == 120 * 1024


def test_owners_are_asked() -> None:
    """What has no processes has none; the owners' are put together, in their order."""
    assert processes_of() == processes_of(None, object()) == ()
    assert processes_of(Owner(3, 1), None, Owner(), Owner(2)) == (3, 1, 2)


@pytest.fixture
def holder() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that holds 60 MB, and has held 100 MB."""
    with subprocess.Popen([sys.executable, "-c", _HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@ON_LINUX
def test_the_watch_counts_them(holder: "subprocess.Popen[bytes]") -> None:
    """Under a cap that this process alone keeps, and the two together do not, there is something to shed."""
    cap = (resident_bytes() or 0) + 40 * MB
    assert Watch(cap, ()).check() == []
    (told,) = Watch(cap, (), held_reader(lambda: (holder.pid,))).check()
    assert told.startswith("the process holds ")
    assert told.endswith(", and nothing is left to shed")


@ON_LINUX
def test_the_servers_gauges_count_them(holder: "subprocess.Popen[bytes]") -> None:
    """The resident memory and the peak are those of the server with its models' processes."""
    text = Metrics().text(memory_gauges((holder.pid,)))
    found = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if not line.startswith("#")}
    resident, peak = resident_bytes() or 0, peak_resident_bytes() or 0
    assert 60 * MB < found["edgedec_resident_bytes"] - resident < 100 * MB
    assert max(peak, resident + 100 * MB) <= found["edgedec_peak_resident_bytes"]


@pytest.mark.slow
@ON_LINUX
def test_a_model_in_a_child_names_its_process(tmp_path: Path) -> None:
    """A model around it passes the number on; a closed model has no process."""
    with hosted(tiny_llama(tmp_path / "tiny.gguf"), LoadOptions(n_ctx=32)) as model:
        assert model.child is not None
        assert isinstance(model, HasProcesses)
        outer = OuterModel(model, model.card, model.capabilities)
        assert processes_of(outer, None) == (model.child.pid,)
        resident = held_bytes(())
        assert resident is not None
        assert (held_bytes(processes_of(model)) or 0) > resident + 20 * MB  # an interpreter with numpy
    assert processes_of(outer) == ()
