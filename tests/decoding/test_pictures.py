"""Prompts with pictures: the text is plain decoding's own with drafters, forks, kept prompts and parallel requests."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.decoding.decoding_loop import plugin, two_paths
from support.heads.loaded_blocks import FLOATS
from support.heads.tiny_heads import OF_FLOATS, write_head
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

import edgedec
from edgedec.api.engine import Engine
from edgedec.drafters.suffix.suffix import SuffixDrafter
from edgedec.errors import CapabilityError, RequestError
from edgedec.grammar import Grammar
from edgedec.pictures import Block, PictureRows, Pictures
from edgedec.progress import CancelToken, Progress
from edgedec.scheduler.drafter_set import Drafting
from edgedec.sequence import Generation
from edgedec.sessions import batching
from edgedec_apps.prompt_cache import load_prompt_cache, save_prompt_cache

pytestmark = pytest.mark.slow

FAMILIES = {"llama": Block(80, 10, 8), "gemma3": Block(80, 10, 8, mutual=True), "qwen35": Block(80, 10, 8)}
BEFORE, BETWEEN, AFTER = (2, 60, 61, 62, 60, 61, 62, 63), (70, 71), (60, 61, 62, 60, 61, 62, 60, 61)


def encoded(number: int, block: Block, n_embd: int) -> PictureRows:
    """Return made-up rows of a picture, with ids as large as those of hashes are."""
    rows = 4 * np.random.default_rng(number).standard_normal((block.n_rows, n_embd)).astype(np.float32)
    return PictureRows(block, rows, tuple(-(2**61) - 1000 * number - i for i in range(block.n_rows)))


def prompt_of(*pictures: PictureRows) -> tuple[tuple[int, ...], Pictures]:
    """Return a prompt with pictures one after another, and their rows."""
    ids = [*BEFORE]
    for picture in pictures:
        ids += [*picture.ids, *BETWEEN]
    return (*ids, *AFTER), {picture.ids[0]: picture for picture in pictures}


class Case:
    """A family's model, and two pictures of one size."""

    def __init__(self, path: Path, engine: Engine, block: Block) -> None:
        self.path, self.engine = path, engine
        self.first, self.second = (encoded(key, block, engine.card.n_embd) for key in (1, 2))

    def text(self, *pictures: PictureRows, **options: Any) -> Generation:
        ids, rows = prompt_of(*pictures)
        return self.engine.generate(ids, pictures=rows, **options)

    def cold(self, *pictures: PictureRows, **options: Any) -> Generation:
        """Return what is written plainly where the KV cache holds nothing of the prompt."""
        for slot in self.engine.pool.slots:
            slot.cached_ids, slot.n_exact = [], 0
        return self.text(*pictures, draft=False, **options)


GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_end": True}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 24, "ignore_end": True}
PENALIZED = SAMPLED | {"repetition_penalty": 1.2, "penalty_last_n": -1, "momentum": 0.1}
SPELLED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 24, "grammar": Grammar.regex("[8-\\]]+")}
DRAFTERS = {
    "suffix": Drafting({"suffix": SuffixDrafter}, 4, always=True),
    "tree": Drafting({"tree": plugin(range(60, 100), two_paths)}, 6, always=True),
}


def load(path: Path, n_parallel: int = 2) -> Engine:
    """Load a model on the cpu runtime."""
    return edgedec.load(path, runtime="cpu", n_ctx=320, n_threads=1, n_parallel=n_parallel, draft="off")


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    path = write_tiny(
        tmp_path_factory.mktemp("tiny") / "m.gguf", replace(ARCHITECTURES[request.param], types=("Q8_0",))
    )
    with load(path) as engine:
        yield Case(path, engine, FAMILIES[request.param])


@pytest.mark.parametrize("options", [GREEDY, PENALIZED, SPELLED], ids=["greedy", "penalized", "grammar"])
def test_drafts_change_nothing(case: Case, options: dict[str, Any]) -> None:
    """Of any drafter, chain or tree; rows of pictures count as tokens of the prompt."""
    plain = case.cold(case.first, case.second, **options)
    assert plain.stats.n_prompt_tokens == len(prompt_of(case.first, case.second)[0])
    (slot, *_) = case.engine.pool.slots
    for drafting in DRAFTERS.values():
        slot.drafting = drafting
        drafted = case.text(case.first, case.second, **options)
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.n_draft_tokens > 0
    slot.drafting = None


def test_pictures_of_one_size_are_told_apart(case: Case) -> None:
    """A prompt with another picture shares what stands before; one with the same shares all but its last token."""
    cold = [case.cold(picture, logprobs=0, **SAMPLED) for picture in (case.first, case.second)]
    texts = [text.token_ids for text in cold]
    assert cold[0].logprob_sum != cold[1].logprob_sum
    n_prompt = len(prompt_of(case.first)[0])
    for picture, expected, n_shared in (
        (case.second, texts[1], n_prompt - 1),
        (case.first, texts[0], len(BEFORE)),
        (case.first, texts[0], n_prompt - 1),
    ):
        found = case.text(picture, **SAMPLED)
        assert (found.token_ids, found.stats.n_reused_tokens >= n_shared) == (expected, True)
    both = case.cold(case.first, case.second, **SAMPLED).token_ids
    case.text(case.first, **SAMPLED)
    found = case.text(case.first, case.second, **SAMPLED)
    assert (found.token_ids, found.stats.n_reused_tokens) == (both, len(BEFORE) + 80 + len(BETWEEN))


def test_parallel_requests(case: Case) -> None:
    """With the same picture, with another, and without, at a time."""
    wanted = [(case.first,), (case.second, case.first), (), (case.first, case.second), (case.first,)]
    expected = [case.cold(*pictures, **SAMPLED).token_ids for pictures in wanted]

    def write(pictures: tuple[PictureRows, ...]) -> tuple[int, ...]:
        return case.text(*pictures, **SAMPLED).token_ids

    with ThreadPoolExecutor(len(wanted)) as pool:
        assert list(pool.map(write, wanted)) == expected


def test_several_texts_of_one_prompt(case: Case) -> None:
    """Forks of a session that has read pictures."""
    ids, rows = prompt_of(case.first)
    expected = [case.cold(case.first, **SAMPLED | {"seed": 3 + k}).token_ids for k in range(3)]
    texts = case.engine.samples(ids, 3, pictures=rows, **SAMPLED)
    assert [text.token_ids for text in texts] == expected


def test_a_saved_prompt_goes_on(case: Case, tmp_path: Path) -> None:
    """In another process's place, with the same picture and with another one, without the rows of what is held."""
    expected = [case.cold(picture, **GREEDY).token_ids for picture in (case.first, case.second)]
    case.text(case.first, **GREEDY)
    with load(case.path, 1) as engine:
        writer = Case(case.path, engine, case.first.block)
        assert writer.text(case.first, **GREEDY).token_ids == expected[0]
        save_prompt_cache(engine, tmp_path / "cache")
    with load(case.path, 1) as engine:
        reader = Case(case.path, engine, case.first.block)
        for picture, text in ((case.first, expected[0]), (case.second, expected[1])):
            load_prompt_cache(engine, tmp_path / "cache")
            found = reader.text(picture, **GREEDY)
            n_shared = len(prompt_of(case.first)[0]) - 1 if picture is case.first else len(BEFORE)
            assert (found.token_ids, found.stats.n_reused_tokens) == (text, n_shared)


def test_cancelled_within_a_picture(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is empty; the next one is as it would have been."""
    expected = case.cold(case.first, case.second, **GREEDY).token_ids
    for slot in case.engine.pool.slots:
        slot.cached_ids, slot.n_exact = [], 0
    cancel, seen, after = CancelToken(), list[int](), 80 if case.first.block.mutual else 100

    def stop(progress: Progress) -> None:
        seen.append(progress.done)
        if progress.done > after:
            cancel.cancel()

    ids, rows = prompt_of(case.first, case.second)
    monkeypatch.setattr(batching, "LONE_PIECE_ROWS", 32)
    cut = case.engine.generate(ids, pictures=rows, cancel=cancel, on_progress=stop, **GREEDY)
    assert (seen[-1] > after, cut.finish_reason) == (True, "cancelled")
    assert cut.token_ids == () or case.first.block.mutual  # between two pictures; the prompt may be read to its end
    assert case.text(case.first, case.second, **GREEDY).token_ids == expected


def test_resumed_and_stopped(case: Case) -> None:
    """A text goes on behind its first tokens, and ends at a stop string, as without drafts."""
    whole = case.cold(case.first, **SAMPLED)
    resumed = case.cold(case.first, resume=whole.token_ids[:9], **SAMPLED)
    assert resumed.token_ids == whole.token_ids
    stop = whole.text[5:7]
    plain = case.cold(case.first, stop=(stop,), **SAMPLED)
    (slot, *_) = case.engine.pool.slots
    slot.drafting = DRAFTERS["suffix"]
    drafted = case.text(case.first, stop=(stop,), **SAMPLED)
    slot.drafting = None
    assert (drafted.text, drafted.token_ids) == (plain.text, plain.token_ids)


def test_what_is_refused(case: Case) -> None:
    """Ids without their rows, half of a picture, nothing behind one, an id beyond the vocabulary, a long prompt."""
    ids, rows = prompt_of(case.first)
    for wrong, pictures, message in (
        (ids, {}, "outside the vocabulary"),
        (ids[:20] + AFTER, rows, "each one whole"),
        (ids[: 8 + 80], rows, "at least one token must follow"),
        ((*ids, 10**6), rows, "outside the vocabulary"),
        (ids * 4, rows, "the context of 320"),
    ):
        with pytest.raises(RequestError, match=message):
            case.engine.generate(wrong, pictures=pictures, **GREEDY)
    assert case.text(case.first, **GREEDY).token_ids == case.cold(case.first, **GREEDY).token_ids


def test_a_context_that_slides_takes_no_picture(case: Case) -> None:
    """The error names the option."""
    with edgedec.load(
        case.path, runtime="cpu", n_ctx=320, n_threads=1, draft="off", lossy=edgedec.Lossy(slide=True)
    ) as engine:
        sliding = Case(case.path, engine, case.first.block)
        with pytest.raises(CapabilityError, match="no pictures; leave slide out"):
            sliding.text(case.first, **GREEDY)


def test_models_that_take_no_vectors_say_so(tmp_path: Path) -> None:
    """Here one whose layers read the tokens themselves."""
    tiny = replace(ARCHITECTURES["gemma4"], types=("Q8_0",))
    with load(write_tiny(tmp_path / "m.gguf", tiny), 1) as engine:
        case = Case(tmp_path, engine, Block(4, 2, 2))
        with pytest.raises(CapabilityError, match="vector_rows"):
            case.text(case.first, **GREEDY)


@pytest.mark.parametrize("draft", ["head", "model"])
def test_models_that_draft(tmp_path: Path, draft: str) -> None:
    """A trained head follows the text behind the pictures; a draft model sees other tokens in their place."""
    path = write_tiny(tmp_path / "m.gguf", FLOATS)
    write_head(tmp_path / "head", OF_FLOATS)
    given: Any = {"draft_head": tmp_path / "head"} if draft == "head" else {"draft_model": path}
    with edgedec.load(path, runtime="cpu", n_ctx=320, n_threads=1, draft=draft, **given) as engine:
        (slot,) = engine.pool.slots
        assert slot.drafting is not None
        slot.drafting.always = True
        case = Case(path, engine, FAMILIES["llama"])
        for options in (GREEDY, SAMPLED):
            plain = case.cold(case.first, case.second, **options)
            drafted = case.text(case.first, case.second, **options)
            assert drafted.token_ids == plain.token_ids
            assert drafted.stats.n_draft_tokens > 0
