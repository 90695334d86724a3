"""Texts of encoder-decoder models: the same with every drafter, for several requests at once, and after each other."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_t5 import TinyT5
from support.models.tiny_t5_onnx import write_folder

import edgedec
from edgedec.errors import PromptTooLongError

pytestmark = pytest.mark.slow

N_CTX = 256
SLOW = pytest.mark.slow
PROMPT = "translate the small house is a house, is the small house"


@pytest.fixture(params=["GGUF", "graphs"])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Write a small model, for our kernels or for onnxruntime."""
    if request.param == "GGUF":
        return TinyT5(n_ctx=200).write(tmp_path / "t5.gguf")
    pytest.importorskip("onnx", reason="onnx, of the extra `export`, is not installed")
    return write_folder(tmp_path / "t5", TinyT5(n_ctx=200), merged=True)


def texts(path: Path, draft: str, **options: Any) -> list[tuple[int, ...]]:
    """Return the tokens of a greedy and of two drawn texts, and see that there were drafts."""
    draws: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.5, "seed": 1}, {"temperature": 1, "seed": 2}]
    with edgedec.load(path, draft=draft, offline=True, n_ctx=N_CTX, **options) as engine:
        results = [engine.generate(PROMPT, max_tokens=40, ignore_end=True, **draw) for draw in draws]
    assert draft == "off" or any(result.stats.n_drafts for result in results)
    return [result.token_ids for result in results]


@pytest.mark.usefixtures("drafting_pays")
@pytest.mark.parametrize(
    "draft",
    ["suffix", *(pytest.param(d, marks=SLOW) for d in ("common", "trigram", "suffix+recycling+stand", "auto"))],
)
def test_drafts_change_nothing(path: Path, draft: str) -> None:
    """Suffixes of source and text, and all others that need no second model, write plain decoding's text."""
    assert texts(path, draft, n_draft_max=6) == texts(path, "off")


def test_parallel_requests(path: Path) -> None:
    """Three prompts at once, two of which begin alike, and then again: each has the text that it has alone."""
    prompts = (PROMPT * 5, PROMPT * 5 + " street", "a house", PROMPT * 5)
    options: dict[str, Any] = {"offline": True, "n_ctx": N_CTX}

    def text(engine: edgedec.Engine, prompt: str) -> tuple[int, ...]:
        return engine.generate(prompt, max_tokens=30, temperature=0.7, seed=3, ignore_end=True).token_ids

    with edgedec.load(path, draft="off", **options) as engine:
        expected = [text(engine, prompt) for prompt in prompts]
    with edgedec.load(path, n_parallel=3, **options) as engine, ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(lambda prompt: text(engine, prompt), prompts)) == expected


def test_what_is_reused(path: Path) -> None:
    """A prompt that is read again is not, and goes on behind its text; of one that begins like it nothing is reused."""
    with edgedec.load(path, offline=True, n_ctx=N_CTX) as engine:
        first, again, other, back = (
            engine.generate(prompt, max_tokens=5, temperature=0) for prompt in (PROMPT, PROMPT, PROMPT + "s", PROMPT)
        )
    counts = [result.stats.n_reused_tokens for result in (first, again, other, back)]
    assert counts == [0, first.stats.n_prompt_tokens - 1, 0, 0]
    assert first.token_ids == again.token_ids == back.token_ids


def test_a_long_prompt(path: Path) -> None:
    """It is refused by the encoder's length, and the session goes on with other prompts."""
    with edgedec.load(path, offline=True, n_ctx=N_CTX) as engine:
        before = engine.generate(PROMPT, max_tokens=5, temperature=0).token_ids
        with pytest.raises(PromptTooLongError, match="the encoder of this model reads 200 at most"):
            engine.generate(PROMPT * 12, max_tokens=5)
        assert engine.generate(PROMPT, max_tokens=5, temperature=0).token_ids == before
