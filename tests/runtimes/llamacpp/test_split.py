"""Layers split among devices, as llama.cpp gets them: with a build for CPUs there are none, and the host has all."""

from pathlib import Path

import numpy as np
import pytest
from support.models.tiny_models import tiny_llama

from edgedec.errors import RuntimeUnavailableError
from edgedec.load_options import LoadOptions
from edgedec.memory_plan import HasDevices
from edgedec_runtimes.llamacpp.devices import device_array, device_names, devices
from edgedec_runtimes.llamacpp.runtime import LlamaCpp

pytest.importorskip("llama_cpp")

pytestmark = pytest.mark.slow
TOKENS = np.arange(8, dtype=np.int32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama."""
    return tiny_llama(tmp_path_factory.mktemp("split") / "tiny.gguf")


def test_the_cpu_is_no_device_for_layers() -> None:
    """It is among ggml's devices by name, and never among those of a split; an unknown name is refused."""
    assert "CPU" in device_names()
    assert "CPU" not in [device.name for device in devices(LoadOptions())]
    assert devices(LoadOptions(device="CPU")) == ()
    assert isinstance(LlamaCpp(), HasDevices)
    with pytest.raises(RuntimeUnavailableError, match=r"no device 'CUDA7'; it knows .*CPU"):
        device_array(["CUDA7"])


def test_nothing_is_asked_where_there_is_no_room_for_the_library() -> None:
    """As in a plan under a tight cap, whose terms are known from the header only."""
    assert LlamaCpp().devices(LoadOptions(planning_bytes=1_000_000)) == ()


def test_a_split_with_no_layers_on_devices_is_the_host(tiny: Path) -> None:
    """The logits are those of a load without a split, bit for bit, and the plan is the same."""
    plain, split = LoadOptions(n_ctx=64, n_gpu_layers=0), LoadOptions(n_ctx=64, layer_split=())
    found = []
    for options in (plain, split):
        with LlamaCpp().load(tiny, options) as model:
            found.append(model.session(64).forward(TOKENS, n_past=0, rows="all").logits.copy())
    assert np.array_equal(found[0], found[1])
    terms = [[term for term in LlamaCpp().plan(tiny, options) if not term.base] for options in (plain, split)]
    assert terms[0] == terms[1]
    assert {term.device for term in terms[1]} == {"host"}


def test_a_split_onto_a_device_that_is_gone_is_refused(tiny: Path) -> None:
    """Such as a GPU of another machine's plan; nothing is loaded."""
    with pytest.raises(RuntimeUnavailableError, match="no device 'CUDA7'"):
        LlamaCpp().load(tiny, LoadOptions(n_ctx=64, layer_split=(("CUDA7", 1),)))
