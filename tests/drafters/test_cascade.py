"""A draft model that checks a cheap drafter's tokens: its own drafts, for fewer forwards."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoding.draft_models import SETTINGS, TEXT, Recorded, counted, generate, loaded, tiny
from support.decoding.drawings import drawn
from support.decoding.stub_drafter import StubDrafter
from support.models.real_models import real_model
from support.models.tiny_models import BOS, byte_ids

import edgedec
from edgedec.draft import Draft, Verification
from edgedec.drafter import DraftContext, Drafter, DrafterFactory, Store
from edgedec.drafters.draft_builder import path_of
from edgedec.drafters.draft_model.cascade import CascadeModel, likely_chain
from edgedec.drafters.draft_model.model import DraftModel
from edgedec.load_options import LoadOptions
from edgedec.model import Model
from edgedec.model_card import Capabilities
from edgedec.sampling import Noise, SamplingParams
from edgedec.testing import check_drafter
from edgedec_runtimes.cpu.runtime import Cpu

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prompts_are_read_whole")]


class Knowing(StubDrafter):
    """A cheap drafter that proposes a text known beforehand, with every token moved by `shift`."""

    def __init__(self, text: Sequence[int], shift: int) -> None:
        self.text = text
        self.shift = shift
        self.n = 0
        self.paths: list[tuple[int, ...]] = []
        self.is_closed = False

    def begin(self, token_ids: Sequence[int]) -> None:
        """Note where the text is."""
        self.n = len(token_ids)

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Propose what follows."""
        return Draft.chain([(token + self.shift) % 260 for token in self.text[self.n : self.n + n_max]], 0.99)

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Go on."""
        self.n += len(verification.token_ids)
        self.paths.append(verification.path)

    def close(self) -> None:
        """Note it."""
        self.is_closed = True


@pytest.mark.parametrize("name", SETTINGS)
def test_the_text_is_plain_decodings(target: Path, draft_model: Model, name: str) -> None:
    """With a draft model that is always right and one that is nearly always wrong, greedy and sampled."""
    plain = generate(target, None, **SETTINGS[name])
    found = generate(target, CascadeModel(DraftModel(draft_model)), **SETTINGS[name])
    assert found.token_ids == plain.token_ids
    assert found.stats.n_drafts > 0


@pytest.mark.parametrize("name", ["greedy", "penalized"])
def test_the_drafts_are_the_draft_models_own(target: Path, draft_model: Model, name: str) -> None:
    """Node for node, with a suffix drafter below, and with cheap tokens that are all right or all wrong."""
    expected = Recorded(DraftModel(draft_model))
    text = [BOS, *byte_ids(TEXT), *generate(target, expected, **SETTINGS[name]).token_ids]
    cheap: list[DrafterFactory] = [lambda context, shift=shift: Knowing(text, shift) for shift in (0, 1)]
    cascades = [CascadeModel(DraftModel(draft_model)), *(CascadeModel(DraftModel(draft_model), c) for c in cheap)]
    for cascade in cascades:
        found = Recorded(cascade)
        generate(target, found, **SETTINGS[name])
        assert found.drafts == expected.drafts


def test_a_drawn_chain_is_the_same_whatever_the_cheap_tokens_are(target: Path) -> None:
    """Under another rule than the coupled one: the same tokens and q in every step, for fewer forwards."""
    prompt = [BOS, *byte_ids(TEXT)]
    drafts: list[list[Draft]] = []
    n_forwards: list[int] = []
    for known in ([], [0] * 60, None):
        with loaded(target) as model:
            source = DraftModel(model)
            session = counted(source)
            text = [*prompt, *(list(drafts[0][0].tokens) if known is None else known)]
            cascade = CascadeModel(source, lambda context, text=text: Knowing(text, 0))
            params = SamplingParams(temperature=1.0, top_p=1.0)
            drafter = cascade(DraftContext(model.session(64), params, Noise(4), **drawn(params, coupled=False)))
            drafter.begin(prompt)
            drafts.append([drafter.propose(6, 1e18) for _ in range(3)])
            n_forwards.append(session.n_forwards)
    for other in drafts[1:]:
        for first, second in zip(drafts[0], other, strict=True):
            assert list(first.tokens) == list(second.tokens)
            assert first.q is not None
            assert second.q is not None
            assert [law.probs.tolist() for law in first.q if law] == [law.probs.tolist() for law in second.q if law]
    assert n_forwards[2] < n_forwards[0]


@pytest.mark.parametrize(("shift", "saves"), [(0, True), (1, False)])
def test_cheap_tokens_that_are_right_save_forwards(target: Path, shift: int, saves: bool) -> None:
    """Where they all are, a draft takes one forward of the draft model; where none is, hardly fewer than without."""
    text = [BOS, *byte_ids(TEXT), *generate(target, None, temperature=0).token_ids]
    counts = []
    for cheaply in (False, True):
        with loaded(target) as model:
            source = DraftModel(model)
            session = counted(source)
            recorded = Recorded(CascadeModel(source, lambda context: Knowing(text, shift)) if cheaply else source)
            generate(target, recorded, temperature=0)
            counts.append((session.n_forwards, len(recorded.steps)))
    (n_alone, n_drafts), (n_cascade, same) = counts
    assert n_drafts == same
    assert n_cascade == n_drafts if saves else n_drafts < n_cascade <= n_alone
    assert n_alone > 2 * n_drafts


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_a_draft_model_equal_to_the_target_is_always_right(folder: Path, name: str) -> None:
    """Every draft is accepted to its end, and no accepted token is evaluated twice."""
    target = tiny(folder, 3)
    with loaded(target) as model:
        source = DraftModel(model)
        session = counted(source)
        recorded = Recorded(CascadeModel(source))
        found = generate(target, recorded, **SETTINGS[name])
    recorded.assert_all_accepted()
    session.assert_evaluated_once([BOS, *byte_ids(TEXT), *found.token_ids])


def test_a_draft_model_that_gives_one_row_is_asked_for_one(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is evaluated ahead then."""
    plain = generate(target, None, temperature=0)
    with loaded(target) as model:
        source = DraftModel(model)
        session = counted(source)
        monkeypatch.setattr(model, "capabilities", Capabilities(trees=True, max_rows=1))
        found = generate(target, CascadeModel(source), temperature=0)
        assert found.token_ids == plain.token_ids
        assert session.rows == ["last"] * session.n_forwards


def test_the_cheap_drafter_is_told_of_its_own_nodes(target: Path) -> None:
    """learn() names the nodes that the cheap drafter proposed, not the cascade's; close() ends it, too."""
    made: list[Knowing] = []

    def cheap(context: DraftContext) -> Drafter:
        made.append(Knowing(text, 0))
        return made[-1]

    text = [BOS, *byte_ids(TEXT), *generate(target, None, temperature=0).token_ids]
    with loaded(target) as model:
        recorded = Recorded(CascadeModel(DraftModel(model), cheap))
        generate(target, recorded, temperature=0)
        generate(target, CascadeModel(DraftModel(model), cheap), temperature=0)
    assert made[-1].is_closed
    told = made[0].paths[-len(recorded.steps) :]
    assert all(path[:n] == tuple(range(n)) for path, n in ((p, len(p)) for p in told))
    assert sum(map(len, told)) >= 30


def test_a_part_of_a_store_has_its_lock() -> None:
    """What sheds the store waits for whoever is in the part."""
    assert (store := Store()).half("cascade").lock is store.lock


def test_a_chain_of_cheap_tokens_ends_where_it_is_improbable() -> None:
    """The most probable child is followed while the path's probability is at least 0.15."""
    tree = Draft.tree([5, 6, 7, 8, 9], [-1, -1, 1, 1, 3], [0.3, 0.6, 0.4, 0.5, 0.4])
    assert likely_chain(tree, -1, 8) == [6, 8]  # 0.6, 0.3, then 0.12
    assert likely_chain(tree, -1, 1) == [6]
    assert likely_chain(tree, 3, 8) == [9]
    assert path_of(list(tree.tokens), list(tree.parents), [6, 8, 1]) == [1, 3]
    assert path_of(list(tree.tokens), list(tree.parents), [7]) == []


def test_the_conformance_suite_passes(target: Path, draft_model: Model) -> None:
    """Every check of a drafter."""
    results = check_drafter(CascadeModel(DraftModel(draft_model)), lambda: loaded(target), n_tokens=16)
    assert [(result.name, result.detail) for result in results if result.status != "passed"] == []


@pytest.mark.model
def test_a_real_draft_model() -> None:
    """The 135M model as its own draft model, on the cpu runtime: the same text, and fewer forwards than tokens."""
    path = real_model("smollm2-135m.gguf")
    prompt = "one two three four, one two three four, one two three"
    with Cpu().load(path, LoadOptions(n_ctx=256)) as model:
        source = DraftModel(model)
        session = counted(source)
        texts = []
        for factory in (None, CascadeModel(source)):
            with edgedec.load(path, runtime="cpu", n_ctx=256, draft=factory) as engine:
                for temperature in (0, 0.5):
                    found = engine.generate(prompt, max_tokens=24, temperature=temperature, seed=1, ignore_end=True)
                    texts.append(found.token_ids)
        assert texts[:2] == texts[2:]
        assert 0 < session.n_forwards < 40
