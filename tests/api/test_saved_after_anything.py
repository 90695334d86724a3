"""save_prompt_cache: whatever a session did last, the file can be read, and the next text is that of a cold start."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.api.best_text import BestOf, best
from edgedec.choosing.search_by import SearchBy
from edgedec.errors import CancelledError
from edgedec.progress import CancelToken, Progress
from edgedec_apps.embedding import embed
from edgedec_apps.extraction import extract
from edgedec_apps.prompt_cache import load_prompt_cache, save_prompt_cache

pytestmark = pytest.mark.slow

PROMPT = "a long prompt that is read in several pieces " * 6
NEXT = PROMPT + "and more"


def cancelled(engine: edgedec.Engine) -> None:
    """Cancel a text while its prompt is read."""
    cancel = CancelToken()

    def stop(progress: Progress) -> None:
        cancel.cancel()

    stream = engine.stream(PROMPT * 2, on_progress=stop)
    with cancel.calling(stream.cancel):
        list(stream)


def cancelled_extraction(engine: edgedec.Engine) -> None:
    """Cancel an extraction while its prompt is read."""
    cancel = CancelToken()
    with pytest.raises(CancelledError):
        extract(engine, "a?", PROMPT, on_progress=lambda _: cancel.cancel(), cancel=cancel)


def failed(engine: edgedec.Engine) -> None:
    """Let a caller's function fail within a text."""

    def fail(progress: Progress) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPT * 2, on_progress=fail)


def closed(engine: edgedec.Engine) -> None:
    """Leave a stream after two tokens."""
    with closing(engine.stream(PROMPT, temperature=0, ignore_end=True)) as stream:
        next(stream)
        next(stream)


ACTS: dict[str, Callable[[edgedec.Engine], object]] = {
    "nothing": lambda engine: None,
    "embed": lambda engine: embed(engine, ["x" * 10, PROMPT], pooling="mean"),
    "embed_and_generate": lambda engine: (
        embed(engine, [PROMPT], pooling="last"),
        engine.generate(PROMPT, max_tokens=3, reuse="longest"),
    ),
    "generate": lambda engine: engine.generate(PROMPT, max_tokens=5, seed=1, ignore_end=True),
    "samples": lambda engine: engine.samples(PROMPT, 3, max_tokens=5, seed=1, ignore_end=True),
    "best": lambda engine: best(engine, PROMPT, BestOf(2, "likely"), max_tokens=5, seed=1),
    "search": lambda engine: best(engine, PROMPT, SearchBy("beam"), max_tokens=5),
    "extract": lambda engine: extract(engine, "a?", PROMPT, max_tokens=4),
    "cancelled": cancelled,
    "cancelled_extraction": cancelled_extraction,
    "failed": failed,
    "closed": closed,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("saved") / "tiny.gguf", n_ctx_train=2048)


@pytest.mark.parametrize("act", ACTS)
def test_the_file_can_be_read(path: Path, tmp_path: Path, act: str) -> None:
    """It holds what the session held; a text that goes on from it is the one that a cold start gives."""
    file = tmp_path / "cache"
    options: dict[str, Any] = {"runtime": "cpu", "n_ctx": 1024, "draft": "off", "offline": True}
    with edgedec.load(path, **options) as engine:
        expected = engine.generate(NEXT, temperature=0, max_tokens=6, ignore_end=True).token_ids
    with edgedec.load(path, **options) as engine:
        ACTS[act](engine)
        save_prompt_cache(engine, file)
    with edgedec.load(path, **options) as engine:
        n = load_prompt_cache(engine, file)
        assert act in ("nothing", "failed", "cancelled", "cancelled_extraction") or n > 0
        again = engine.generate(NEXT, temperature=0, max_tokens=6, ignore_end=True)
        assert again.token_ids == expected
        assert again.stats.n_reused_tokens <= n
        save_prompt_cache(engine, file)
        assert load_prompt_cache(engine, file) > 0
