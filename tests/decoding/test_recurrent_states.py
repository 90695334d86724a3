"""On models whose layers differ, drafts, shared forwards, a window and a saved prompt change no text.

They have recurrent states or short convolutions; in one the last layers read the keys and values of layers before.
Some carry a nextn layer, which is found by itself and drafts for them.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.heads.tiny_nextn import write_nextn
from support.models.code_paths import each_architecture
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

import edgedec
from edgedec.api.options import Lossy
from edgedec.verification.rules import rule_names
from edgedec_apps.prompt_cache import load_prompt_cache, save_prompt_cache

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("drafting_pays")]

NAMES = each_architecture(
    ("qwen35", "qwen35moe", "qwen3next", "granitehybrid", "falcon-h1", "nemotron_h_moe", "mamba2", "lfm2", "gemma4"),
    short=("qwen35moe", "nemotron_h_moe", "lfm2", "gemma4"),  # one of each rule
)
NEXTN = each_architecture(
    [f"nextn {name}" for name in ("qwen35", "qwen35moe", "qwen3next", "qwen3")],
    short=("nextn qwen35moe", "nextn qwen3"),
)
PROMPT = "the cat and the dog and the cat and the dog and "
N_TOKENS = 120
DRAFTS = [
    *("suffix", "suffix+recycling+stand", "skip", "auto"),  # chains, trees, fewer layers, and what the policy takes
    *(pytest.param(draft, marks=pytest.mark.long) for draft in ("recycling", "trigram", "stand")),
]
WAYS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5}]


@pytest.fixture(scope="module", params=[*NAMES, *NEXTN])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, whose texts soon repeat themselves; "nextn" with a layer of random weights that drafts."""
    *nextn, name = request.param.split()
    folder = tmp_path_factory.mktemp("tiny")
    return (write_nextn if nextn else write_tiny)(folder / f"{request.param}.gguf", ARCHITECTURES[name])


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


def texts(engine: edgedec.Engine, n_tokens: int = N_TOKENS) -> list[tuple[int, ...]]:
    """Return the tokens of each way to draw them; the second prompt goes back to the middle of the first text."""
    found = [engine.generate(PROMPT, max_tokens=n_tokens, ignore_end=True, **way) for way in WAYS]
    assert found[1].stats.n_reused_tokens > 0
    return [result.token_ids for result in found]


def drafter_of(path: Path) -> str:
    """Return the drafter that a model is tried with where one is enough: its own layer, where it has one."""
    return "head" if path.stem.startswith("nextn") else "suffix"


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("path", NAMES, indirect=True)
def test_drafts_change_no_text(path: Path, plain: list[tuple[int, ...]], draft: str) -> None:
    """Chains and trees of every length, accepted and rejected ones."""
    with load(path, draft=draft, n_draft_max=9) as engine:
        assert texts(engine) == plain
        report = engine.generate(PROMPT, max_tokens=60, ignore_end=True, temperature=0.0).stats
    assert report.n_drafts > 0 or draft == "auto"  # which rests where asking takes longer than a tiny model's step


@pytest.mark.parametrize("draft", ["head", "suffix+head", "auto"])
@pytest.mark.parametrize("path", NEXTN, indirect=True)
def test_drafts_of_a_nextn_layer_change_no_text(path: Path, plain: list[tuple[int, ...]], draft: str) -> None:
    """Alone, beside another drafter, and left to the policy; the layer's drafts are verified."""
    with load(path, draft=draft, n_draft_max=6) as engine:
        assert engine.session(64).draft_head is not None
        stats = engine.generate(PROMPT, max_tokens=48, ignore_end=True, temperature=0.0).stats
        assert draft == "auto" or stats.drafters["head"]["tried"] > 0
        assert texts(engine) == plain


def test_texts_that_share_forwards(path: Path, plain: list[tuple[int, ...]]) -> None:
    """Four at once are what each is alone."""
    draft = drafter_of(path)
    with load(path, draft=draft, n_draft_max=5, n_parallel=4) as engine, ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda way: engine.generate(PROMPT, max_tokens=N_TOKENS, ignore_end=True, **way), WAYS * 2)
        assert [text.token_ids for text in found] == plain * 2


@pytest.mark.parametrize("path", NEXTN, indirect=True)
def test_several_texts_of_one_prompt(path: Path) -> None:
    """Forks of a session that read the prompt write what they write without drafts."""
    found = []
    for draft in ("off", "head"):
        with load(path, draft=draft, n_draft_max=4) as engine:
            made = engine.samples(PROMPT, 3, max_tokens=40, temperature=1.0, seed=6, ignore_end=True)
            found.append([text.token_ids for text in made])
    assert found[0] == found[1]


@pytest.mark.parametrize("path", NAMES, indirect=True)
def test_a_window_that_slides(path: Path) -> None:
    """Drafts change no text in it either."""
    found = []
    for draft in ("off", "suffix"):
        with load(path, draft=draft, n_ctx=64, lossy=Lossy(slide=True)) as engine:
            found.append(engine.generate(PROMPT, max_tokens=200, ignore_end=True, temperature=0.0).token_ids)
    assert (found[0], len(found[0])) == (found[1], 200)


def test_a_saved_prompt(path: Path, plain: list[tuple[int, ...]], tmp_path: Path) -> None:
    """Another engine goes on from it, and back in it, to the same text; so does one without drafts."""
    draft = drafter_of(path)
    with load(path, draft=draft, n_draft_max=5) as engine:
        engine.generate(PROMPT, max_tokens=80, ignore_end=True, temperature=0.0)
        save_prompt_cache(engine, tmp_path / "prompt")
    for later in (draft, "off"):
        with load(path, draft=later, n_draft_max=5) as engine:
            assert load_prompt_cache(engine, tmp_path / "prompt") > 80
            assert texts(engine) == plain


@pytest.mark.parametrize("rule", sorted(rule_names()[1:]))
@pytest.mark.parametrize("path", NEXTN, indirect=True)
def test_other_rules_write_the_same_text_again(path: Path, rule: str) -> None:
    """Drafts drawn from the layer's scores are verified by every rule: a seed's text is the same twice."""
    way: dict[str, Any] = {"temperature": 1.0, "seed": 4, "verify": rule, "reuse": "exact"}
    with load(path, draft="head", n_draft_max=4) as engine:
        made = [engine.generate(PROMPT, max_tokens=30, ignore_end=True, **way) for _ in range(3)][1:]
    assert made[0].token_ids == made[1].token_ids
    assert all(text.stats.drafters["head"]["tried"] > 0 for text in made)


@pytest.mark.parametrize("path", NEXTN, indirect=True)
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
            assert texts(engine, 48) == [text[:48] for text in plain]
            is_left_out.append("draft head left out" in engine.plan.given_up)
            assert (engine.session(64).draft_head is None) == is_left_out[-1]
    assert is_left_out == [False, True]
