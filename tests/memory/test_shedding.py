"""Whatever is shed in the middle of a generation, the text is the same, and the statistics say what went."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.decoding.stub_drafter import StubDrafter
from support.models.tiny_models import byte_ids, tiny_llama

from edgedec.decoding.generate import TokenStream
from edgedec.decoding.session_pool import SessionPool, SessionSlot
from edgedec.drafter import DrafterFactory
from edgedec.drafter_traits import Shedding
from edgedec.drafters.draft_model.cascade import CascadeModel
from edgedec.drafters.draft_model.model import DraftModel
from edgedec.drafters.suffix.common import CommonText
from edgedec.drafters.suffix.suffix import SuffixDrafter
from edgedec.errors import MemoryCapError
from edgedec.load_options import LoadOptions
from edgedec.memory.shedding import Watch, shedders
from edgedec.model import Model
from edgedec.sampling import SamplingParams
from edgedec.scheduler.drafter_set import Drafting
from edgedec.scheduler.plugin_guard import GuardedFactory
from edgedec.sequence import Generation, Request
from edgedec_methods.recycling import RecyclingDrafter
from edgedec_methods.stand import StandDrafter
from edgedec_methods.trigram import TrigramDrafter
from edgedec_runtimes.cpu.model import CpuModel
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.reference.runtime import Reference

pytestmark = pytest.mark.slow
both_runtimes = pytest.mark.parametrize("bench", ["reference", "cpu"], indirect=True)

N_TOKENS = 100
PROMPT = (1, *byte_ids("the cat sat on the mat, the dog sat on the log, the cat sat on "))
ORDER = ["the suffix store", "the table of recycling", "the table of trigram", "the table of stand"]
ORDER += ["the common text", "the drafter other", "most of the draft model's KV cache", "the draft model"]
ORDER += ["the suffix drafter"]


@dataclass
class Other(StubDrafter):
    """Somebody else's drafter, which holds 5 kB and proposes nothing."""

    context: Any

    def memory_bytes(self) -> int:
        return 5000


@dataclass
class Bench:
    """A target and a draft model, loaded."""

    target: Model
    draft_model: Model

    def opened(self, **factories: DrafterFactory) -> SessionSlot:
        """Return a target that always drafts with these drafters; without any, one that decodes plainly."""
        target = SessionSlot(self.target.session(256))
        if factories:
            target.drafting = Drafting(factories, 8, always=True)
        return target

    def everything(self) -> SessionSlot:
        """Return a target with every kind of drafter, and a draft model that two of them share."""
        source = DraftModel(self.draft_model)
        return self.opened(
            suffix=SuffixDrafter,
            common=CommonText(PROMPT),
            stand=StandDrafter,
            trigram=TrigramDrafter,
            recycling=RecyclingDrafter,
            other=GuardedFactory(Other),
            model=source,
            cascade=CascadeModel(source),
        )


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """A tiny model, loaded twice: as the target and as the draft model; by the cpu runtime unless a test has both."""
    runtime = Reference() if getattr(request, "param", "cpu") == "reference" else Cpu()
    path = tiny_llama(tmp_path / "tiny.gguf", n_embd=32, n_head=2, n_head_kv=1, n_ff=64, n_ctx_train=2048)
    options = LoadOptions(n_ctx=256, max_rows=16, cache_dir=tmp_path)
    with runtime.load(path, options) as target, runtime.load(path, options) as draft_model:
        yield Bench(target, draft_model)


def generate(target: SessionSlot, temperature: float = 0.8, **request: Any) -> Generation:
    sampling = SamplingParams(temperature=temperature, seed=3, max_tokens=N_TOKENS, ignore_end=True)
    stream = TokenStream(SessionPool([target]), Request(PROMPT, sampling, 3, "exact", **request))
    list(stream)
    return stream.generation


class Readings:
    """Says that too much is held from a step on; a second passes between two steps."""

    def __init__(self, first: int) -> None:
        self.step = -1
        self.first = first

    def clock(self) -> float:
        self.step += 1
        return float(self.step)

    def read(self) -> int:
        return 1000 if self.step >= self.first else 0


def watched(target: SessionSlot, first: int) -> Watch:
    """Return a watch that sheds something at every step from that one on, however little it holds."""
    assert target.drafting is not None
    readings = Readings(first)
    return Watch(1000, shedders(target.drafting), readings.read, lambda: None, clock=readings.clock, worth_bytes=1)


def names_shed(generation: Generation) -> list[str]:
    """Return what the statistics say was shed, in order."""
    reasons = [reason for reason in generation.stats.notes if reason.startswith("shed ")]
    assert all(reason.endswith("): the process holds 1.0 kB of 1.0 kB") for reason in reasons)
    return [reason.removeprefix("shed ").partition(" (")[0] for reason in reasons]


@both_runtimes
@pytest.mark.parametrize(("first", "temperature"), [(0, 0.8), (1, 0.0), (4, 0.8)])
def test_everything_is_shed_in_order_and_the_text_is_the_same(bench: Bench, first: int, temperature: float) -> None:
    """One thing before each step, from the first on or later: every token is plain decoding's."""
    expected = generate(bench.opened(), temperature)
    target = bench.everything()
    generate(target, temperature)  # for the stores
    target.watch = watched(target, first)
    found = generate(target, temperature)
    assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
    assert names_shed(found) == ORDER
    assert "the process holds 1.0 kB of 1.0 kB, and nothing is left to shed" in found.stats.notes
    assert not [reason for reason in found.stats.reasons if "failed" in reason]
    assert sum(counts["failed"] for counts in found.stats.drafters.values()) == 0
    assert target.drafting is not None
    assert not target.drafting.policies
    common = target.drafting.factories["common"]
    assert isinstance(common, CommonText)
    assert common.memory_bytes() == 0


@pytest.mark.parametrize("first", [2, 5])
def test_suffix_recycling_and_model_by_themselves(bench: Bench, first: int) -> None:
    """What is not there is not shed; drafts are verified before and none afterwards."""
    expected = generate(bench.opened())
    target = bench.opened(suffix=SuffixDrafter, recycling=RecyclingDrafter, model=DraftModel(bench.draft_model))
    target.watch = watched(target, first)
    found = generate(target)
    assert found.token_ids == expected.token_ids
    assert names_shed(found) == [ORDER[0], ORDER[1], *ORDER[6:]]
    assert 0 < found.stats.n_drafts <= first + 4


def test_what_was_shed_stays_away_and_the_statistics_say_so(bench: Bench) -> None:
    """The next request has the same text, no drafts, and a reason for every drafter."""
    expected = generate(bench.opened())
    target = bench.everything()
    target.watch = watched(target, 0)
    generate(target)
    again = generate(target)
    assert (again.token_ids, again.stats.n_drafts) == (expected.token_ids, 0)
    for name in ("recycling", "trigram", "stand"):
        reason = f"{name} off: the table of {name} was shed when memory ran short; forget() brings it back"
        assert reason in again.stats.reasons
    for name in ("model", "cascade"):
        reason = f"{name} off: the draft model was shed when memory ran short; load again to have it"
        assert reason in again.stats.reasons


def test_forget_brings_back_all_but_the_draft_model(bench: Bench) -> None:
    """Cheap drafters draft again, the common text is made anew, and the suffix store fills up."""
    target = bench.everything()
    drafting = target.drafting
    assert drafting is not None
    target.watch = watched(target, 0)
    generate(target)
    target.watch = None
    drafting.forget()
    expected = generate(bench.opened())
    found = generate(target)
    assert found.token_ids == expected.token_ids
    assert found.stats.n_drafts > 0
    assert [reason.partition(" ")[0] for reason in found.stats.reasons] == ["model", "cascade"]
    common = drafting.factories["common"]
    assert isinstance(common, CommonText)
    assert common.memory_bytes() > 0
    assert drafting.store["suffix"].young.memory_bytes() > 420 * N_TOKENS


def test_the_suffix_drafter_goes_on_with_the_text_at_hand(bench: Bench) -> None:
    """Without its store it still drafts from the prompt, takes no more texts, and keeps what a file has yet to take."""
    target = bench.opened(suffix=SuffixDrafter)
    drafting = target.drafting
    assert drafting is not None
    first = generate(target)
    shedders(drafting)[0].shed()
    store = drafting.store["suffix"]
    found = generate(target)
    assert found.token_ids == first.token_ids
    assert found.stats.n_drafts > 0
    assert store.memory_bytes() == 0
    assert [output.tolist() for output in store.take_outputs()] == [list(first.token_ids)]


@both_runtimes
def test_the_draft_model_goes_on_with_a_small_window(bench: Bench) -> None:
    """Its drafts go on behind a text that is longer than the window, and are right as before."""
    source = DraftModel(bench.draft_model)
    target = bench.opened(model=source)
    drafting = target.drafting
    assert drafting is not None
    target.session = bench.target.session(512)
    prompt = PROMPT * 5
    sampling = SamplingParams(temperature=0.0, seed=3, max_tokens=24, ignore_end=True)
    texts: list[tuple[int, ...]] = []
    held: list[int] = []
    for _ in range(2):
        stream = TokenStream(SessionPool([target]), Request(prompt, sampling, 3, "exact"))
        for i, _token in enumerate(stream):
            if i == 8 and texts:
                window = shedders(drafting)[0]
                held.append(window.held())
                window.shed()
                held.append(window.held())
        texts.append(stream.generation.token_ids)
        assert stream.generation.stats.n_drafts > 0
        assert stream.generation.stats.reasons == []
    assert texts[0] == texts[1]
    assert source.n_ctx == 256
    # Two layers of keys and values of 16 elements of two bytes; the reference runtime adds a byte a layer.
    assert held == [(1024 - 256) * (128 if isinstance(bench.target, CpuModel) else 130), 0]


def test_a_window_for_which_there_is_no_memory_costs_the_draft_model(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the small session can be opened: the draft model goes, the text does not."""
    expected = generate(bench.opened())
    target = bench.opened(model=DraftModel(bench.draft_model))

    def refuse(n_ctx: int) -> Any:
        raise MemoryCapError("no memory")

    target.watch = watched(target, 2)
    monkeypatch.setattr(bench.draft_model, "session", refuse)
    found = generate(target)
    assert found.token_ids == expected.token_ids
    assert names_shed(found) == ["most of the draft model's KV cache"]
    assert target.drafting is not None
    assert list(target.drafting.off) == ["model"]


def test_without_drafting_there_is_nothing_to_shed(bench: Bench) -> None:
    """A watch over an engine that does not draft only tells; one that finds nothing short says nothing."""
    target = bench.opened()
    target.watch = Watch(1, ())
    found = generate(target)
    assert len(found.stats.notes) == 1
    assert found.stats.notes[0].endswith(", and nothing is left to shed")
    target.watch = Watch(1 << 60, ())
    assert generate(target).stats.notes == []


def test_stores_are_shed_in_a_request_without_drafts(bench: Bench) -> None:
    """Nobody is at work then, and what is kept between requests goes all the same."""
    target = bench.opened(suffix=SuffixDrafter, recycling=RecyclingDrafter)
    generate(target)
    target.watch = watched(target, 0)
    assert names_shed(generate(target, draft=False))[:2] == ["the suffix store", "the table of recycling"]
    assert target.drafting is not None
    assert "recycling" not in target.drafting.store


def test_a_drafter_of_another_package_says_when_it_is_shed(bench: Bench) -> None:
    """By the place that its factory declares, under the name that it declares; else before the models."""

    class Early(Other):
        shedding = Shedding(10, "the notes of {name}")

    target = bench.opened(suffix=SuffixDrafter, other=GuardedFactory(Other), early=GuardedFactory(Early))
    assert target.drafting is not None
    names = [shedder.name for shedder in shedders(target.drafting)]
    assert names == ["the suffix store", "the notes of early", "the drafter other", "the suffix drafter"]
