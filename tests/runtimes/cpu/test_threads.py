"""The bits of a forward do not depend on how many threads there are, nor on how much of the processor they get."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.models.tiny_quantized import ARCHITECTURES, TILE_TYPES, write_tiny
from support.models.tiny_runs import extend, one_by_one
from support.processes.one_processor import busy, logits_on_one_processor

from edgedec.errors import SessionError
from edgedec.load_options import LoadOptions
from edgedec_runtimes.cpu.library import keep_to_cores
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.shared.cpu_count import linux_cores

TEXT = np.random.default_rng(0).integers(0, 260, 40).astype(np.int32)
pytestmark = pytest.mark.usefixtures("all_cores")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps threads to cores")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_any_number_of_threads(tmp_path: Path, name: str) -> None:
    """More threads than heads, than pieces of a matrix and than cores, in single steps and in one forward."""
    path = write_tiny(tmp_path / "m.gguf", replace(ARCHITECTURES[name], types=TILE_TYPES, seed=6))
    found = {}
    for n_threads in (1, 2, 3, 5, 16):
        with Cpu().load(path, LoadOptions(n_ctx=64, n_threads=n_threads)) as model:
            found[n_threads] = one_by_one(model.session(64), TEXT)
            np.testing.assert_array_equal(extend(model.session(64), TEXT), found[1])
            np.testing.assert_array_equal(found[n_threads], found[1])


@pytest.mark.slow
@LINUX
@pytest.mark.model
def test_threads_that_lose_their_processor(smollm_path: Path) -> None:
    """Four threads and a busy process share one processor, so that threads stop in the middle of pieces."""
    cpu = min(os.sched_getaffinity(0))
    with Cpu().load(smollm_path, LoadOptions(n_ctx=64, n_threads=1)) as model:
        expected = one_by_one(model.session(64), TEXT)
    with busy(cpu):
        found = logits_on_one_processor(smollm_path, TEXT, 4, cpu)
    np.testing.assert_array_equal(found, expected)


@LINUX
def test_a_forward_leaves_its_callers_affinity(tmp_path: Path) -> None:
    """The caller may run where it could before; a thread that keeps to a core is the library's own."""
    path = write_tiny(tmp_path / "m.gguf", ARCHITECTURES["llama"])
    before = os.sched_getaffinity(0)
    cores = linux_cores()
    n_threads = max(2, len(cores))
    with Cpu().load(path, LoadOptions(n_ctx=64, n_threads=n_threads)) as model:
        keep_to_cores([cores[i % len(cores)] for i in range(n_threads)])
        model.session(64).forward(TEXT, n_past=0)
    assert os.sched_getaffinity(0) == before


@LINUX
def test_cores_that_do_not_exist(tmp_path: Path) -> None:
    """Threads that should keep to processors that the machine does not have run where they may."""
    path = write_tiny(tmp_path / "m.gguf", ARCHITECTURES["llama"])
    before = os.sched_getaffinity(0)
    with Cpu().load(path, LoadOptions(n_ctx=64, n_threads=3)) as model:
        expected = one_by_one(model.session(64), TEXT)
        keep_to_cores([(1023,), (-1, 1 << 20), ()])
        np.testing.assert_array_equal(one_by_one(model.session(64), TEXT), expected)
    assert os.sched_getaffinity(0) == before
    with pytest.raises(SessionError, match="n_threads"):
        keep_to_cores([])
