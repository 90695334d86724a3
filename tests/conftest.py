"""Fixtures: tiny models that every runtime loads, and the real 135M model where it is on this machine."""

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
from support.models.real_models import real_model
from support.models.tiny_models import CHATML, tiny_llama

import edgedec
from edgedec.memory.setting import HELD

pytest_plugins = ["support.lanes"]

# The threads of llama.cpp wait in a loop that counts as work, and takes the processor from what they wait for where
# tests run side by side: 400 steps of a tiny model took 5 to 12 s of two busy cores, and 0.2 s with threads that sleep.
# libgomp reads this when it is loaded, in further processes too.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A forward's threads wait for each other, and pytest-xdist's workers leave each other no core: each keeps to its share.
CORES = os.sched_getaffinity(0) if sys.platform == "linux" else set()
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
if sys.platform == "linux" and _WORKER:
    _n_workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.sched_setaffinity(0, sorted(CORES)[int(_WORKER) :: _n_workers] or {sorted(CORES)[int(_WORKER) % len(CORES)]})

# What an example may take depends on the machine, and on what else it does; the number of examples is bounded.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")


def _hear_ctrl_c() -> None:
    """Let Ctrl-C interrupt: a shell lets what it starts in the background ignore it, and so do its processes."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_hear_ctrl_c()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep modules and tests out of collections of garbage: with them each took 0.4 s, and shedding makes many."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Do the same with what a file of tests leaves behind, such as torch and the reports of thousands of tests."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what models are loaded for the tests from filling the user's cache, and no machine busy but by a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgedec.storage.probe_cache._waited_s", lambda: 0)
        patch.setenv("EDGEDEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard() -> None:
    """Begin each test with the handler that tests send Ctrl-C to, whatever the test before left."""
    _hear_ctrl_c()


@pytest.fixture(scope="module", autouse=True)
def _account_of_this_file() -> Iterator[None]:
    """Let what models of other files hold, such as those of a server, count under no cap of this file's models."""
    held = [*HELD]
    HELD.clear()
    yield
    HELD.update(held)


@pytest.fixture(scope="module")
def all_cores() -> Iterator[None]:
    """Let threads of this file run beside each other on all cores, not only on this worker's share."""
    if sys.platform == "linux":
        share = os.sched_getaffinity(0)
        os.sched_setaffinity(0, CORES)
        yield
        os.sched_setaffinity(0, share)
    else:
        yield


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama model with a chat template."""
    return tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", chat_template=CHATML, n_ctx_train=2048)


@pytest.fixture(scope="module", params=["reference", "llamacpp", "cpu"])
def tiny(request: pytest.FixtureRequest, tiny_path: Path) -> Iterator[edgedec.Engine]:
    """The tiny model loaded by each runtime, with 256 tokens of context."""
    with edgedec.load(tiny_path, runtime=request.param, n_ctx=256) as engine:
        yield engine


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    """The real 135M model's file; skips where it is absent."""
    return real_model("smollm2-135m.gguf")


@pytest.fixture(scope="module")
def smollm(smollm_path: Path) -> Iterator[edgedec.Engine]:
    """The real 135M model on llama.cpp with 2,048 tokens of context."""
    with edgedec.load(smollm_path, runtime="llamacpp", n_ctx=2048) as engine:
        yield engine
