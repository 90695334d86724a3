"""Texts of one prompt with a model that drafts: each is that of its seed alone, and drafts are made together."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.heads.loaded_blocks import FLOATS, of_floats
from support.heads.tiny_blocks import tiny_block, write_block
from support.heads.tiny_heads import OF_FLOATS, write_head
from support.models.tiny_models import tiny_llama
from support.models.tiny_quantized import write_tiny

import edgedec
from edgedec.api.options import DraftOptions
from edgedec.drafters.draft_model.draft_text import DraftForward
from edgedec.grammar import Grammar
from edgedec.head_state import DraftCall
from edgedec.sequence import Generation
from edgedec_runtimes.cpu.draft_head.state import CpuHeadCall

pytestmark = pytest.mark.slow

Texts = dict[str, list[Generation]]
PROMPT = "abcabcabcabcabcabc, and so on: abc"
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "seed": 7},
    "sampled": {"temperature": 1.0, "seed": 7},
    "grammar": {"temperature": 1.0, "seed": 7, "grammar": Grammar.regex("[a-f]{30,60}")},
}
WAYS: dict[str, dict[str, Any]] = {
    "a draft model": {"draft": "model"},
    "a cascade": {"draft": "cascade+suffix"},
    "a draft model and two requests": {"draft": "model", "n_parallel": 2},
    "an overlapped draft model": {"draft": "model", "drafting": DraftOptions(overlap=True)},
    "a head": {"draft": "head"},
    "a head and two requests": {"draft": "head+suffix", "n_parallel": 2},
    "a block head": {"draft": "head+suffix"},
    "a block head that selects": {"draft": "head+suffix"},
}
BLOCK = of_floats({"n_layer": 2, "size": 5, "markov": "gated", "rank": 6, "causal": True, "windows": (40, 0)})
SELECTING = of_floats(
    {"size": 5, "shifted": False, "markov": "selector", "rank": 6, "top_k": 9, "conv_length": 2, "conv_group": 8}
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model, its draft model, and random heads for it."""
    folder = tmp_path_factory.mktemp("samples")
    write_head(folder / "head", OF_FLOATS)
    write_block(folder / "block", tiny_block(BLOCK))
    write_block(folder / "selects", tiny_block(SELECTING))
    small = tiny_llama(folder / "small.gguf", seed=2, n_ctx_train=1024)
    heads = {name: folder / name for name in ("head", "block", "selects")}
    return {"target": write_tiny(folder / "m.gguf", FLOATS), "model": small, **heads}


@pytest.fixture(scope="module")
def plain(files: dict[str, Path]) -> Iterator[edgedec.Engine]:
    with edgedec.load(files["target"], runtime="cpu", n_ctx=256, draft=None) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(plain: edgedec.Engine) -> Texts:
    """By OPTIONS, the texts of four seeds, each generated alone."""
    more: dict[str, Any] = {"max_tokens": 24, "logprobs": 0}
    return {
        name: [
            plain.generate(PROMPT, **options | more | {"seed": options["seed"] + k}, ignore_end=name != "grammar")
            for k in range(4)
        ]
        for name, options in OPTIONS.items()
    }


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many calls of a draft model or a head were answered at once, how often."""
    found: Counter[int] = Counter()
    for kind in (DraftForward, CpuHeadCall):

        def counting(call: Any, others: Sequence[DraftCall], answer: Any = kind.answer) -> None:
            found[1 + len(others)] += 1
            answer(call, others)

        monkeypatch.setattr(kind, "answer", counting)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_each_text_is_that_of_its_seed_alone(
    files: dict[str, Path], expected: Texts, together: Counter[int], way: str
) -> None:
    """Text k == the text of seed + k without drafts, log-probabilities too; drafts are made for all four at once."""
    head = files["selects" if "selects" in way else "block" if "block" in way else "head"]
    second: dict[str, Any] = {"draft_head": head} if "head" in way else {"draft_model": files["model"]}
    with edgedec.load(files["target"], runtime="cpu", n_ctx=256, **WAYS[way], **second) as engine:
        for name, options in OPTIONS.items():
            found = engine.samples(PROMPT, 4, max_tokens=24, ignore_end=name != "grammar", logprobs=0, **options)
            for text, alone in zip(found, expected[name], strict=True):
                assert (text.token_ids, text.text, text.logprob_sum) == (alone.token_ids, alone.text, alone.logprob_sum)
                assert text.stats.n_drafts > 0 or name == "grammar"
                assert not any(counts["failed"] for counts in text.stats.drafters.values())
    assert (together[4] > 10) == ("overlapped" not in way)


def test_texts_that_are_forked_and_dropped_draft_on(
    files: dict[str, Path], plain: edgedec.Engine, together: Counter[int]
) -> None:
    """A fork in mid-text drafts along with the others, and their texts stay what they are alone."""
    options: dict[str, Any] = {"max_tokens": 30, "ignore_end": True}
    with edgedec.load(files["target"], runtime="cpu", n_ctx=256, draft="model", draft_model=files["model"]) as engine:
        stream = engine.samples_stream(PROMPT, 3, temperature=1.0, seed=7, **options)
        for _ in range(9):
            next(stream)
        assert stream.fork(1) == [3]
        stream.drop(0)
        list(stream)
        texts = stream.generations
        for k in (1, 2):
            alone = plain.generate(PROMPT, temperature=1.0, seed=7 + k, **options)
            assert texts[k].token_ids == alone.token_ids
        stopped = engine.samples_stream(PROMPT, 3, temperature=1.0, seed=7, **options)
        for _ in range(12):
            next(stopped)
        stopped.close()
        again = engine.generate(PROMPT, temperature=1.0, seed=8, **options)
    assert again.token_ids == texts[1].token_ids
    assert together[3] > 3
