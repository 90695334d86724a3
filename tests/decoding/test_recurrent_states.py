"""On models whose layers differ, drafts, shared forwards, a window and a saved prompt change no text.

They have recurrent states or short convolutions; in one the last layers read the keys and values of layers before.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.models.code_paths import each_architecture
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

import edgedec
from edgedec.api.options import Lossy
from edgedec_apps.prompt_cache import load_prompt_cache, save_prompt_cache

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("drafting_pays")]

NAMES = each_architecture(
    ("qwen35", "qwen35moe", "qwen3next", "granitehybrid", "falcon-h1", "nemotron_h_moe", "mamba2", "lfm2", "gemma4"),
    short=("qwen35moe", "nemotron_h_moe", "lfm2", "gemma4"),  # one of each rule
)
PROMPT = "the cat and the dog and the cat and the dog and "
N_TOKENS = 120
DRAFTS = [
    *("suffix", "suffix+recycling+stand", "skip", "auto"),  # chains, trees, fewer layers, and what the policy takes
    *(pytest.param(draft, marks=pytest.mark.long) for draft in ("recycling", "trigram", "stand")),
]
WAYS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5}]


@pytest.fixture(scope="module", params=NAMES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, whose texts soon repeat themselves."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "m.gguf", ARCHITECTURES[request.param])


@pytest.fixture(scope="module")
def plain(path: Path) -> list[tuple[int, ...]]:
    """The tokens of each way without drafts."""
    with load(path, draft="off") as engine:
        return texts(engine)


def load(path: Path, **options: Any) -> edgedec.Engine:
    """Load the model on the cpu runtime."""
    given: dict[str, Any] = {"runtime": "cpu", "offline": True, "n_ctx": 512} | options
    return edgedec.load(path, **given)


def texts(engine: edgedec.Engine) -> list[tuple[int, ...]]:
    """Return the tokens of each way to draw them; the second prompt goes back to the middle of the first text."""
    found = [engine.generate(PROMPT, max_tokens=N_TOKENS, ignore_end=True, **way) for way in WAYS]
    assert found[1].stats.n_reused_tokens > 0
    return [result.token_ids for result in found]


@pytest.mark.parametrize("draft", DRAFTS)
def test_drafts_change_no_text(path: Path, plain: list[tuple[int, ...]], draft: str) -> None:
    """Chains and trees of every length, accepted and rejected ones."""
    with load(path, draft=draft, n_draft_max=9) as engine:
        assert texts(engine) == plain
        report = engine.generate(PROMPT, max_tokens=60, ignore_end=True, temperature=0.0).stats
    assert report.n_drafts > 0 or draft == "auto"  # which rests where asking takes longer than a tiny model's step


def test_texts_that_share_forwards(path: Path, plain: list[tuple[int, ...]]) -> None:
    """Four at once are what each is alone."""
    with load(path, draft="suffix", n_draft_max=5, n_parallel=4) as engine, ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda way: engine.generate(PROMPT, max_tokens=N_TOKENS, ignore_end=True, **way), WAYS * 2)
        assert [text.token_ids for text in found] == plain * 2


def test_a_window_that_slides(path: Path) -> None:
    """Drafts change no text in it either."""
    found = []
    for draft in ("off", "suffix"):
        with load(path, draft=draft, n_ctx=64, lossy=Lossy(slide=True)) as engine:
            found.append(engine.generate(PROMPT, max_tokens=200, ignore_end=True, temperature=0.0).token_ids)
    assert (found[0], len(found[0])) == (found[1], 200)


def test_a_saved_prompt(path: Path, plain: list[tuple[int, ...]], tmp_path: Path) -> None:
    """Another engine goes on from it, and back in it, to the same text."""
    with load(path, draft="off") as engine:
        engine.generate(PROMPT, max_tokens=80, ignore_end=True, temperature=0.0)
        save_prompt_cache(engine, tmp_path / "prompt")
    with load(path, draft="suffix", n_draft_max=5) as engine:
        assert load_prompt_cache(engine, tmp_path / "prompt") > 80
        assert texts(engine) == plain
