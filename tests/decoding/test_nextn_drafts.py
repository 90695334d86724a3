"""A nextn layer drafts for the model that carries it, found by itself, and changes no text: models with states, too."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.heads.tiny_nextn import write_nextn
from support.models.code_paths import each_architecture
from support.models.tiny_quantized import ARCHITECTURES

import edgedec
from edgedec.verification.rules import rule_names
from edgedec_apps.prompt_cache import load_prompt_cache, save_prompt_cache

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("drafting_pays")]

NAMES = each_architecture(("qwen35", "qwen35moe", "qwen3next", "qwen3"), short=("qwen35moe", "qwen3"))
PROMPT = "the cat and the dog and the cat and the dog and "
WAYS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.0, "seed": 6}]
N_TOKENS = 48


@pytest.fixture(scope="module", params=NAMES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a nextn layer of random weights."""
    return write_nextn(tmp_path_factory.mktemp("nextn") / "m.gguf", ARCHITECTURES[request.param])


@pytest.fixture(scope="module")
def plain(path: Path) -> list[tuple[int, ...]]:
    """The tokens of each way without drafts."""
    with load(path, draft="off") as engine:
        assert engine.session(64).draft_head is None
        return texts(engine)


def load(path: Path, **options: Any) -> edgedec.Engine:
    """Load the model on the cpu runtime; no head is named."""
    given: dict[str, Any] = {"runtime": "cpu", "offline": True, "n_ctx": 512} | options
    return edgedec.load(path, **given)


def texts(engine: edgedec.Engine) -> list[tuple[int, ...]]:
    """Return the tokens of each way to draw them; later prompts go back to the middle of the first text."""
    return [engine.generate(PROMPT, max_tokens=N_TOKENS, ignore_end=True, **way).token_ids for way in WAYS]


@pytest.mark.parametrize("draft", ["head", "suffix+head", "auto"])
def test_drafts_change_no_text(path: Path, plain: list[tuple[int, ...]], draft: str) -> None:
    """Alone, beside another drafter, and left to the policy; the layer's drafts are verified."""
    with load(path, draft=draft, n_draft_max=6) as engine:
        assert engine.session(64).draft_head is not None
        stats = engine.generate(PROMPT, max_tokens=N_TOKENS, ignore_end=True, temperature=0.0).stats
        assert draft == "auto" or stats.drafters["head"]["tried"] > 0
        assert texts(engine) == plain


def test_texts_that_share_forwards(path: Path, plain: list[tuple[int, ...]]) -> None:
    """Three at once are what each is alone."""

    def one(way: dict[str, Any]) -> tuple[int, ...]:
        return engine.generate(PROMPT, max_tokens=N_TOKENS, ignore_end=True, **way).token_ids

    with load(path, draft="head", n_draft_max=4, n_parallel=3) as engine, ThreadPoolExecutor(3) as pool:
        assert list(pool.map(one, WAYS)) == plain


def test_several_texts_of_one_prompt(path: Path) -> None:
    """Forks of a session that read the prompt write what they write without drafts."""
    found = []
    for draft in ("off", "head"):
        with load(path, draft=draft, n_draft_max=4) as engine:
            made = engine.samples(PROMPT, 3, max_tokens=40, temperature=1.0, seed=6, ignore_end=True)
            found.append([text.token_ids for text in made])
    assert found[0] == found[1]


def test_a_saved_prompt(path: Path, plain: list[tuple[int, ...]], tmp_path: Path) -> None:
    """Another engine goes on from it, and back in it, to the same text; so does one without the layer."""
    with load(path, draft="head", n_draft_max=4) as engine:
        engine.generate(PROMPT, max_tokens=60, ignore_end=True, temperature=0.0)
        save_prompt_cache(engine, tmp_path / "prompt")
    for draft in ("head", "off"):
        with load(path, draft=draft, n_draft_max=4) as engine:
            assert load_prompt_cache(engine, tmp_path / "prompt") > 60
            assert texts(engine) == plain


@pytest.mark.parametrize("rule", sorted(rule_names()[1:]))
def test_other_rules_write_the_same_text_again(path: Path, rule: str) -> None:
    """Drafts drawn from the layer's scores are verified by every rule: a seed's text is the same twice."""
    way: dict[str, Any] = {"temperature": 1.0, "seed": 4, "verify": rule, "reuse": "exact"}
    with load(path, draft="head", n_draft_max=4) as engine:
        made = [engine.generate(PROMPT, max_tokens=30, ignore_end=True, **way) for _ in range(3)][1:]
    assert made[0].token_ids == made[1].token_ids
    assert all(text.stats.drafters["head"]["tried"] > 0 for text in made)


def test_a_cap_that_leaves_less_room(path: Path, plain: list[tuple[int, ...]], tmp_path: Path) -> None:
    """The plan has the layer's terms; under caps that leave less and less out of it, the text stays."""
    options: dict[str, Any] = {"cache_dir": tmp_path, "n_draft_max": 4}
    with load(path, memory=2**33, **options) as engine:
        assert not engine.plan.given_up
        terms = {term.name: term.n_bytes for term in engine.plan.terms}
        total = engine.plan.total_bytes
    assert terms["draft head"] > 0
    assert terms["KV cache of the draft head"] > 0
    is_left_out = []
    for share in (0.95, 0.4):
        with load(path, memory=int(share * total), **options) as engine:
            assert texts(engine) == plain
            is_left_out.append("draft head left out" in engine.plan.given_up)
            assert (engine.session(64).draft_head is None) == is_left_out[-1]
    assert is_left_out == [False, True]
