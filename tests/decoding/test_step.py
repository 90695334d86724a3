"""One step of decoding: with any drafter the tokens are plain decoding's, and the statistics count what happened."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoding.rule_checks import tree
from support.models.tiny_models import N_VOCAB, byte_ids, tiny_llama

from edgedec.cost_curve import CostCurve
from edgedec.decoding.step import ChosenLogprobs, Decoder, step
from edgedec.draft import Draft, Verification
from edgedec.drafter import Drafter, DrafterNeeds, Floor
from edgedec.errors import CancelledError, ContextFullError
from edgedec.load_options import LoadOptions
from edgedec.model import Model, Session
from edgedec.model_card import Capabilities
from edgedec.progress import Progress
from edgedec.sampling import Noise, SamplingParams, log_probs
from edgedec.scheduler.active_drafters import ActiveDrafter
from edgedec.scheduler.draft_tree import PolicyOptions
from edgedec.scheduler.drafter_record import DrafterRecord
from edgedec.scheduler.policy import Policy
from edgedec.sequence import Request, TextState
from edgedec_runtimes.reference.runtime import Reference
from edgedec_runtimes.shared.session_state import SessionState

N_TOKENS = 24
PROMPT = tuple(byte_ids("Once upon a time"))
GREEDY = SamplingParams(temperature=0, seed=3, max_tokens=N_TOKENS)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=N_TOKENS)
PENALIZED = replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1, logit_bias={99: 2.0})
PARAMS = {"greedy": GREEDY, "sampled": SAMPLED, "penalized": PENALIZED, "top-k 1": replace(SAMPLED, top_k=1)}


QWEN2: dict[str, Any] = {"architecture": "qwen2", "tied": True, "n_head_kv": 1, "seed": 5}


@pytest.fixture(scope="module", params=[{}, QWEN2], ids=["llama", "qwen2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A tiny model on the reference runtime."""
    path = tiny_llama(tmp_path_factory.mktemp("decode") / "tiny.gguf", n_embd=32, n_ff=48, **request.param)
    with Reference().load(path, LoadOptions(n_ctx=64)) as loaded:
        yield loaded


Propose = Callable[[list[int], int], Draft]
Script = Callable[[list[int]], Propose]


@dataclass(slots=True)
class Scripted:
    """A drafter that proposes what a function of the history says, and notes all it is told."""

    script: Propose
    taps: tuple[int, ...] = ()
    history: list[int] = field(default_factory=list)
    told: list[tuple[Verification, dict[int, NDArray[np.float32]]]] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    @property
    def needs(self) -> DrafterNeeds:
        return DrafterNeeds(taps=self.taps)

    def begin(self, token_ids: Sequence[int]) -> None:
        self.history = list(token_ids)

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        assert monotonic() < deadline_s
        self.asked.append(n_max)
        return self.script(self.history, n_max)

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        self.history.extend(verification.token_ids)
        self.told.append((verification, dict(hidden)))

    def memory_bytes(self) -> int:
        return 0


@dataclass(slots=True)
class Run:
    """What a generation left behind."""

    token_ids: list[int]
    logprobs: list[ChosenLogprobs]
    sequence: TextState
    decoder: Decoder


def pinned(drafter: Drafter | None, n_max: int, session: Session) -> Policy | None:
    """Return a policy that always asks that drafter."""
    if drafter is None:
        return None
    options = PolicyOptions(n_max, always=True, trees=session.model.capabilities.trees)
    return Policy([ActiveDrafter("one", drafter, DrafterRecord())], N_VOCAB, CostCurve(), options, Floor())


def left(decoder: Decoder) -> Drafter | None:
    """Return the drafter, unless it was dropped."""
    assert decoder.policy is not None
    return decoder.policy.drafters.get("one")


def run(
    model: Model,
    params: SamplingParams,
    drafter: Scripted | None = None,
    *,
    n_draft_max: int = 6,
    prompt: tuple[int, ...] = PROMPT,
    curve: CostCurve | None = None,
) -> Run:
    """Decode until max_tokens, checking after every step that session and sequence agree."""
    session = model.session(64)
    sequence = TextState(Request(prompt, params, params.seed or 0), list(prompt))
    decoder = Decoder(session, Noise(params.seed or 0), curve or CostCurve(), pinned(drafter, n_draft_max, session))
    if drafter is not None:
        drafter.begin(prompt)
    logprobs: list[ChosenLogprobs] = []
    while sequence.n_generated < N_TOKENS:
        n_before = sequence.n_generated
        verification = step(sequence, decoder)
        assert sequence.n_generated == n_before + len(verification.token_ids)
        assert session.n_cached >= sequence.n_cached == len(sequence.token_ids) - 1
        logprobs += decoder.logprobs
    return Run(sequence.token_ids[len(prompt) :], logprobs, sequence, decoder)


@pytest.fixture(scope="module")
def plain(model: Model) -> dict[str, list[int]]:
    """Plain decoding's tokens by the name of the parameters."""
    texts = {name: run(model, params).token_ids for name, params in PARAMS.items()}
    assert texts["greedy"] == texts["top-k 1"]
    assert len({tuple(text) for text in texts.values()}) == 3
    return texts


def oracle(text: list[int], n_prompt: int = len(PROMPT)) -> Propose:
    return lambda history, n_max: Draft.chain(text[len(history) - n_prompt :][:n_max])


def wrong(text: list[int]) -> Propose:
    """Propose the next token id at each place, which is never right."""
    return lambda history, n_max: Draft.chain([(t + 1) % N_VOCAB for t in text[len(history) - len(PROMPT) :][:n_max]])


def half_right(text: list[int]) -> Propose:
    """Propose the text with random mistakes, at random lengths, and often nothing."""
    rng = np.random.default_rng(0)

    def propose(history: list[int], n_max: int) -> Draft:
        right = text[len(history) - len(PROMPT) :][: rng.integers(0, n_max + 1)]
        return Draft.chain([t if rng.random() < 0.7 else int(rng.integers(N_VOCAB)) for t in right])

    return propose


def random_trees(text: list[int]) -> Propose:
    """Propose random trees with the text somewhere among the branches."""
    rng = np.random.default_rng(1)

    def propose(history: list[int], n_max: int) -> Draft:
        right = text[len(history) - len(PROMPT) :]
        tokens: list[int] = []
        parents: list[int] = []
        depth: list[int] = []
        for i in range(int(rng.integers(1, n_max + 1))):
            parent = int(rng.integers(-1, i)) if rng.random() < 0.5 else i - 1
            depth.append(0 if parent < 0 else depth[parent] + 1)
            parents.append(parent)
            good = depth[i] < len(right) and rng.random() < 0.8
            tokens.append(right[depth[i]] if good else int(rng.integers(N_VOCAB)))
        return tree(tokens, parents)

    return propose


def late_siblings(text: list[int]) -> Propose:
    """Propose trees in which the right path always comes after wrong siblings."""

    def propose(history: list[int], n_max: int) -> Draft:
        right = text[len(history) - len(PROMPT) :][: n_max // 2]
        tokens, parents = [], []
        for i, token in enumerate(right):
            tokens += [(token + 1) % N_VOCAB, token]
            parents += [2 * i - 1 if i else -1] * 2
        return tree(tokens, parents)

    return propose


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("script", [oracle, wrong, half_right, random_trees, late_siblings])
def test_the_tokens_are_plain_decodings(model: Model, plain: dict[str, list[int]], name: str, script: Script) -> None:
    """Right, wrong and mixed chains and trees of any length, greedy and sampled, with penalties and bias."""
    drafter = Scripted(script(plain[name]))
    found = run(model, PARAMS[name], drafter)
    assert found.token_ids == plain[name]
    assert left(found.decoder) is drafter
    assert found.decoder.policy is not None
    found.decoder.policy.close()  # a step without room asks nobody, and is learned at the end
    assert drafter.history == [*PROMPT, *plain[name]]
    accepted = found.sequence.stats.n_accepted_tokens
    assert accepted == 0 if script is wrong else accepted > 4


@pytest.mark.slow
@pytest.mark.parametrize("script", [half_right, random_trees])
def test_logprobs_are_plain_decodings_to_the_bit(model: Model, script: Script) -> None:
    """The entries of every step, one a token, are the model's own before any transform."""
    params = replace(PENALIZED, logprobs=3)
    expected = run(model, params)
    found = run(model, params, Scripted(script(expected.token_ids)))
    assert (found.logprobs, len(found.logprobs)) == (expected.logprobs, N_TOKENS)
    assert all(len(entry.top) == 3 for entry in found.logprobs)
    logits = model.session(64).forward(np.array(PROMPT, np.int32), n_past=0).logits[0]
    row = log_probs(logits, np.arange(len(logits)))
    assert found.logprobs[0].logprob == row[found.token_ids[0]]
    assert list(found.logprobs[0].top) == np.argsort(-row)[:3].tolist()


@pytest.mark.parametrize("n_too_many", [0, 99])
def test_counts_of_right_drafts_are_exact(model: Model, plain: dict[str, list[int]], n_too_many: int) -> None:
    """With 4 right tokens a step: 1 of the prefill, then 5, 5, 5, 5 and the last 3; longer drafts are cut."""
    drafter = Scripted(lambda history, n_max: oracle(plain["greedy"])(history, n_max + n_too_many))
    found = run(model, GREEDY, drafter, n_draft_max=4)
    stats = found.sequence.stats
    assert drafter.asked == [4, 4, 4, 4, 2]
    assert (stats.n_steps, stats.n_drafts, stats.n_draft_tokens, stats.n_accepted_tokens) == (5, 5, 18, 18)
    assert stats.accepted_by_position == [5, 5, 4, 4]
    assert found.decoder.curve is not None
    assert set(found.decoder.curve.table()) == {3, 5}
    assert [len(verification.token_ids) for verification, _ in drafter.told] == [1, 5, 5, 5, 5, 3]
    assert stats.reasons == []


def test_counts_of_wrong_drafts_are_exact(model: Model, plain: dict[str, list[int]]) -> None:
    """Each step after the prefill gives one token; the last has no room for a draft."""
    stats = run(model, GREEDY, Scripted(wrong(plain["greedy"])), n_draft_max=4).sequence.stats
    assert (stats.n_steps, stats.n_drafts, stats.n_accepted_tokens) == (N_TOKENS - 1, N_TOKENS - 2, 0)
    assert (stats.n_draft_tokens, stats.accepted_by_position) == (4 * (N_TOKENS - 5) + 3 + 2 + 1, [])


def test_counts_of_plain_steps_are_exact(model: Model) -> None:
    """A step a token, and no draft; a drafter that proposes nothing costs no more."""
    for drafter in (None, Scripted(lambda history, n_max: Draft.chain([]))):
        stats = run(model, GREEDY, drafter).sequence.stats
        assert (stats.n_steps, stats.n_drafts, stats.n_draft_tokens) == (N_TOKENS - 1, 0, 0)


class Fixed(CostCurve):
    """A cost curve that does not learn: a row takes 1000 s, and each further one 100 s."""

    def __init__(self) -> None:
        super().__init__({n: 900.0 + 100.0 * n for n in range(1, 9)})

    def observe(self, *_: Any) -> None:
        """Learn nothing."""

    def observe_beside(self, *_: Any) -> None:
        """Learn nothing."""


@pytest.mark.parametrize(
    ("script", "plain_tokens"),
    [(oracle, range(0)), (oracle, range(8, 12)), (half_right, range(0)), (wrong, range(0)), (oracle, range(N_TOKENS))],
)
def test_what_drafts_saved(model: Model, plain: dict[str, list[int]], script: Script, plain_tokens: range) -> None:
    """By the curve, for any number of plain steps: a step for each accepted token, less a row for each drafted one."""
    proposed = script(plain["greedy"])

    def propose(history: list[int], n_max: int) -> Draft:
        return Draft.chain([]) if len(history) - len(PROMPT) in plain_tokens else proposed(history, n_max)

    stats = run(model, GREEDY, Scripted(propose), n_draft_max=4, curve=Fixed()).sequence.stats
    saved_s = 1000 * stats.n_accepted_tokens - 100 * stats.n_draft_tokens
    assert stats.saved_s == pytest.approx(saved_s, abs=10)  # proposing takes some time of its own
    assert stats.plain_s == 1000 * (N_TOKENS - 1)
    stats.n_generated_tokens = N_TOKENS
    assert stats.speedup is not None
    assert stats.speedup <= N_TOKENS / stats.n_steps


def test_a_prompt_of_one_token_is_drafted_for_at_once(model: Model) -> None:
    """With nothing to prefill, the first step takes a draft, too, and counts as the prefill."""
    expected = run(model, SAMPLED, prompt=PROMPT[:1]).token_ids
    found = run(model, SAMPLED, Scripted(oracle(expected, n_prompt=1)), n_draft_max=23, prompt=PROMPT[:1])
    assert found.token_ids == expected
    assert (found.sequence.stats.n_steps, found.sequence.stats.n_drafts) == (0, 1)
    assert found.sequence.stats.prefill_s > 0


def test_drafts_stay_within_the_context(model: Model, plain: dict[str, list[int]]) -> None:
    """Near the end of the context drafts shrink, and the last token fills it."""
    n_ctx = len(PROMPT) + 8
    session = model.session(n_ctx)
    sequence = TextState(Request(PROMPT, replace(GREEDY, max_tokens=None), 3), list(PROMPT))
    drafter = Scripted(oracle(plain["greedy"]))
    drafter.begin(PROMPT)
    decoder = Decoder(session, Noise(3), CostCurve(), pinned(drafter, 5, session))
    while len(sequence.token_ids) <= n_ctx:
        step(sequence, decoder)
    assert drafter.asked == [5, 1]
    assert sequence.token_ids[len(PROMPT) :] == plain["greedy"][:9]
    with pytest.raises(ContextFullError):
        step(sequence, decoder)
    assert len(sequence.token_ids) == n_ctx + 1


def _raising(history: list[int], n_max: int) -> Draft:
    raise RuntimeError("out of ideas")


def _draft(tokens: Any, parents: Any, p_accept: Any) -> Propose:
    return lambda history, n_max: Draft(tokens, parents, p_accept)


ONE, ROOT, SURE = (1,), (-1,), (1.0,)
NONSENSE: dict[str, Propose] = {
    "raises": _raising,
    "None": lambda history, n_max: None,  # type: ignore[return-value, dict-item] # nonsense on purpose
    "a list": lambda history, n_max: [1, 2],  # type: ignore[return-value, dict-item] # nonsense on purpose
    "a token over the vocabulary": _draft((N_VOCAB,), ROOT, SURE),
    "a negative token": _draft((-1,), ROOT, SURE),
    "a node that is its own parent": _draft(ONE, (0,), SURE),
    "a cycle": _draft((1, 1), (1, 0), (1.0, 1.0)),
    "a parent below -1": _draft(ONE, (-2,), SURE),
    "two lengths": _draft((1, 1), ROOT, SURE),
    "an estimate of NaN": _draft(ONE, ROOT, (float("nan"),)),
    "lists for tuples": _draft([1], [-1], [1.0]),
    "an array": _draft(np.ones(1, np.int32), ROOT, SURE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NONSENSE)
def test_a_failing_drafter_is_dropped_and_changes_nothing(model: Model, plain: dict[str, list[int]], name: str) -> None:
    """Whatever propose() raises or returns, the tokens are plain decoding's and the reason is noted once."""
    drafter = Scripted(NONSENSE[name])
    found = run(model, SAMPLED, drafter)
    assert found.token_ids == plain["sampled"]
    assert left(found.decoder) is None
    assert len(drafter.asked) == 1
    (reason,) = found.sequence.stats.reasons
    assert reason.startswith("one off: the drafter failed (")
    assert found.sequence.stats.n_drafts == 0


def test_a_drafter_that_fails_in_accept_is_dropped_after_its_step(model: Model, plain: dict[str, list[int]]) -> None:
    """The step that it failed in stands, with what was accepted."""

    @dataclass(slots=True)
    class Failing(Scripted):
        def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
            super(Failing, self).learn(verification, hidden)
            if len(self.told) == 3:
                raise RuntimeError("no more")

    found = run(model, SAMPLED, Failing(oracle(plain["sampled"])), n_draft_max=4)
    assert (found.token_ids, found.sequence.stats.n_drafts) == (plain["sampled"], 2)
    assert found.sequence.stats.reasons == ["one off: the drafter failed (RuntimeError: no more)"]


def test_a_chain_of_a_tree_is_verified_where_the_runtime_cannot_do_trees(
    model: Model, plain: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter is not at fault: it stays, and the tokens stay."""
    monkeypatch.setattr(model, "capabilities", Capabilities(trees=False))
    for script in (oracle, late_siblings):
        drafter = Scripted(script(plain["greedy"]))
        found = run(model, GREEDY, drafter)
        assert (found.token_ids, found.sequence.stats.reasons) == (plain["greedy"], [])
        assert left(found.decoder) is drafter


@pytest.mark.slow
@pytest.mark.parametrize("script", [half_right, random_trees])
def test_accept_gets_the_hidden_states_of_the_rows_kept(
    model: Model, plain: dict[str, list[int]], script: Script
) -> None:
    """Put together, they are those of evaluating the whole text as one chain."""
    drafter = Scripted(script(plain["greedy"]), taps=(0, 1))
    found = run(model, GREEDY, drafter)
    text = np.array(found.sequence.token_ids[:-1], np.int32)
    expected = model.session(64).forward(text, n_past=0, taps=(0, 1)).hidden
    for tap in (0, 1):
        assert np.array_equal(np.concatenate([hidden[tap] for _, hidden in drafter.told]), expected[tap])


def test_a_prompt_over_the_context_changes_nothing(model: Model) -> None:
    """The error comes through, and the sequence is as it was."""
    sequence = TextState(Request(PROMPT, GREEDY, 3), list(PROMPT))
    with pytest.raises(ContextFullError):
        step(sequence, Decoder(model.session(len(PROMPT) - 1), Noise(3), CostCurve()))
    assert (sequence.token_ids, sequence.n_cached, sequence.stats.n_steps) == (list(PROMPT), 0, 0)


def test_a_cancelled_prefill_goes_on_where_it_stopped(model: Model, plain: dict[str, list[int]]) -> None:
    """n_cached is what was evaluated, and the next step ends in the same token."""
    session = model.session(64)
    sequence = TextState(Request(PROMPT, GREEDY, 3), list(PROMPT))

    def cancel_at_5(progress: Progress) -> None:
        if progress.done == 5:
            session.cancel()

    decoder = Decoder(session, Noise(3), CostCurve(), on_progress=cancel_at_5)
    with pytest.raises(CancelledError):
        step(sequence, decoder)
    assert (sequence.n_cached, len(sequence.token_ids)) == (5, len(PROMPT))
    decoder.on_progress = None
    assert step(sequence, decoder).token_ids == (plain["greedy"][0],)


def test_a_cancelled_tree_is_dropped(
    model: Model, plain: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is cancelled in the middle of a tree leaves the sequence able to go on, with the same tokens."""
    session = model.session(64)
    drafter = Scripted(late_siblings(plain["greedy"]))
    drafter.begin(PROMPT)
    sequence = TextState(Request(PROMPT, GREEDY, 3), list(PROMPT))
    decoder = Decoder(session, Noise(3), CostCurve(), pinned(drafter, 6, session))
    step(sequence, decoder)
    before = list(sequence.token_ids)

    def cancelled(*_: object) -> None:
        raise CancelledError("in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(SessionState, "advance", cancelled)
        with pytest.raises(CancelledError):
            step(sequence, decoder)
    assert (sequence.token_ids, sequence.n_cached) == (before, len(PROMPT))
    while sequence.n_generated < N_TOKENS:
        step(sequence, decoder)
    assert sequence.token_ids[len(PROMPT) :] == plain["greedy"]
