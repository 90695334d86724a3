"""A draft head that is shed in the middle of a generation: texts stay, its memory goes, and the statistics say so."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.heads.loaded_blocks import FLOATS, of_floats
from support.heads.tiny_blocks import tiny_block, write_block
from support.heads.tiny_heads import OF_FLOATS, write_head
from support.heads.tiny_nextn import write_nextn
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import write_tiny

from edgedec.decoding.generate import TokenStream
from edgedec.decoding.session_pool import SessionPool, SessionSlot
from edgedec.drafter import DrafterFactory
from edgedec.drafters.head import SHED, HeadFactory
from edgedec.drafters.suffix.suffix import SuffixDrafter
from edgedec.load_options import LoadOptions
from edgedec.memory.shedding import Watch, shedders
from edgedec.model import Model
from edgedec.sampling import SamplingParams
from edgedec.scheduler.drafter_set import Drafting
from edgedec.sequence import Request
from edgedec.sessions.batching import Batcher
from edgedec_runtimes.cpu.runtime import Cpu

pytestmark = pytest.mark.slow

PROMPT = tuple(np.random.default_rng(3).integers(1, N_VOCAB, 40).tolist())
N_TOKENS = 40
BLOCK = of_floats({"n_layer": 2, "size": 6, "markov": "rnn", "rank": 6, "causal": True})


@pytest.fixture(params=["pairs", "block", "nextn"])
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Model]:
    """A tiny model that a tiny head follows, which drafts a token after the other or a block at once."""
    path = head = tmp_path / "m.gguf"
    if request.param == "nextn":
        write_nextn(path, FLOATS)
    else:
        head = tmp_path / "head"
        write_tiny(path, FLOATS)
    if request.param == "pairs":
        write_head(head, OF_FLOATS)
    if request.param == "block":
        write_block(head, tiny_block(BLOCK))
    with Cpu().load(path, LoadOptions(n_ctx=128, n_parallel=3, draft_head=head)) as made:
        yield made


def slot(model: Batcher | Model, *, drafts: bool = True) -> SessionSlot:
    """Return a slot that always drafts with the head and the suffix drafter, or never."""
    found = SessionSlot(model.session(128))
    if drafts:
        assert found.session.draft_head is not None
        head = HeadFactory(found.session.draft_head)
        factories: dict[str, DrafterFactory] = {"suffix": SuffixDrafter, "head": head}
        found.drafting = Drafting(factories, 5, always=True)
    return found


def stream(target: SessionSlot, temperature: float = 0.8) -> TokenStream:
    sampling = SamplingParams(temperature=temperature, seed=3, max_tokens=N_TOKENS, ignore_end=True)
    return TokenStream(SessionPool([target]), Request(PROMPT, sampling, 3, "exact"))


def watched(target: SessionSlot, first: int) -> None:
    """Have a slot shed something at every step from that one on."""
    assert target.drafting is not None
    steps = iter(range(1000))
    now = [0]

    def clock() -> float:
        now[0] = next(steps)
        return float(now[0])

    def read() -> int:
        return 1000 if now[0] >= first else 0

    target.watch = Watch(1000, shedders(target.drafting), read, lambda: None, clock=clock, worth_bytes=1)


def test_the_head_goes_before_the_suffix_drafter_and_the_text_is_the_same(
    model: Model, request: pytest.FixtureRequest
) -> None:
    """Its drafts are verified before, its weights and states are free afterwards, and later texts say why it is off."""
    temperature = 0.0 if request.node.callspec.params["model"] == "block" else 0.8
    plain = stream(slot(model, drafts=False), temperature)
    expected = [token.token_id for token in plain]
    target, bystander = slot(model), slot(model)
    assert target.drafting is not None
    head = target.session.draft_head
    assert head is not None
    weights = head.held_bytes - head.n_bytes
    bystander.session.forward(np.array(PROMPT[:9], np.int32), n_past=0)
    assert head.held_bytes > weights > 0
    watched(target, 6)
    found = stream(target, temperature)
    assert [token.token_id for token in found] == expected
    stats = found.generation.stats
    shed = [reason.partition(" (")[0] for reason in stats.notes if reason.startswith("shed ")]
    assert shed == ["shed the suffix store", "shed the draft head", "shed the suffix drafter"]
    assert 0 < stats.drafters["head"]["tried"] <= 5 * 7
    assert head.gone
    assert head.held_bytes == 0
    target.watch = None
    again = stream(target, temperature)
    assert [token.token_id for token in again] == expected
    assert f"head off: {SHED}" in again.generation.stats.reasons
    target.drafting.forget()
    once_more = stream(target, temperature)
    assert [token.token_id for token in once_more] == expected
    assert f"head off: {SHED}" in once_more.generation.stats.reasons
    assert once_more.generation.stats.n_drafts > 0  # of the suffix drafter, which is back


def test_other_requests_go_on_without_the_head(model: Model) -> None:
    """A second text on the same model, with a session of its own, is the same; it says why the head is off."""
    expected = [token.token_id for token in stream(slot(model, drafts=False))]
    batcher = Batcher(model)
    first, second = slot(batcher), slot(batcher)
    watched(first, 3)
    texts: list[list[int]] = [[], []]
    streams = [stream(first), stream(second)]
    for _ in range(N_TOKENS):
        for text, one in zip(texts, streams, strict=True):
            text.extend(token.token_id for token in [next(one)])
    assert texts == [expected, expected]
    stats = streams[1].generation.stats
    assert f"head off: {SHED}" in stats.reasons
    assert stats.drafters["head"]["tried"] > 0
    assert stats.drafters["head"]["failed"] == 0


def test_states_are_saved_and_restored_without_the_head_that_went(model: Model) -> None:
    """Saved with the head, restored without it, forked: the session goes on, and nothing is drafted."""
    session, other = model.session(128), model.session(128)
    session.forward(np.array(PROMPT, np.int32), n_past=0)
    data, head = session.save(), session.draft_head
    assert head is not None
    head.let_go()
    head.let_go()
    other.load(data, len(PROMPT))
    other.load(session.save(), len(PROMPT))
    rows = [one.forward(np.array([7], np.int32), n_past=len(PROMPT)).logits[0].copy() for one in (session, other)]
    assert np.array_equal(rows[0], rows[1])
    for one in (session, other, session.fork(), model.session(64)):
        assert one.draft_head is None or one.draft_head.begin(len(PROMPT), 7) is None
