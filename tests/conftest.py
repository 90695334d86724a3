"""Fixtures: tiny models that every runtime loads, and the real 135M model where it is on this machine.

`pytest -m "not slow"` imports no file whose `pytestmark` says slow: that would take time, and packages.
"""

import gc
import os
import re
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
from support.models.real_models import real_model
from support.models.tiny_models import tiny_llama

import edgedec

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

# A shell lets what it starts in the background ignore Ctrl-C, and so do the processes that it starts; tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SLOW_FILE = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file that is slow as a whole, where slow tests are not asked for."""
    is_asked = config.option.markexpr != "not slow" or collection_path.suffix != ".py"
    return True if not is_asked and _SLOW_FILE.search(collection_path.read_text(encoding="utf-8")) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests on llama.cpp as slow: those with the runtime's name among their parameters."""
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(isinstance(value, str) and value == "llamacpp" for value in parameters):
            item.add_marker(pytest.mark.slow)


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


CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what models are loaded for the tests from filling the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEDEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


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
