"""The checks of a drafter, and check_drafter, which runs them."""

from collections.abc import Callable
from dataclasses import replace
from operator import eq
from time import monotonic

from edgedec.draft import Draft
from edgedec.drafter import DrafterFactory, DrafterNeeds, Store
from edgedec.model import Model
from edgedec.sampling import SamplingParams
from edgedec.testing.drafting import GREEDY, SEED, DrafterSubject, Proposal, Recorder
from edgedec.testing.results import CheckResult, OnCheck, require, run_checks

# The seconds by which a deadline may be missed, and the tries in which one must be kept, as the machine may be busy.
_SLACK_S, _N_TRIES = 0.25, 3


def needs_are_sane(subject: DrafterSubject) -> None:
    """needs names layers of the model, and begin() does not change it."""
    drafter, _ = subject.open()
    needs = drafter.needs
    require(isinstance(needs, DrafterNeeds), f"needs is {needs!r}, expected DrafterNeeds")
    n_layer = subject.model.card.n_layer
    in_range = all(0 <= tap < n_layer for tap in needs.taps)
    require(in_range, f"needs.taps are {needs.taps}, layers are 0 to {n_layer - 1}")
    drafter.begin([1])
    require(drafter.needs == needs, f"needs changed from {needs} to {drafter.needs}")


def drafts_are_valid(subject: DrafterSubject) -> None:
    """Every draft is a Draft of at most n_max nodes that Draft.check passes."""
    for n_max in (1, 2, 5, 8):
        for proposal in _proposals(subject, (n_max,)):
            _require_valid(proposal.draft, n_max, subject.model.card.n_vocab)


def _proposals(subject: DrafterSubject, lengths: tuple[int, ...]) -> list[Proposal]:
    """Return the proposals in a generation after each prompt, with drafts of at most these lengths in turn."""
    proposals = []
    for prompt in subject.prompts():
        drafter, session = subject.open()
        recorder = Recorder(drafter)
        subject.generate(prompt, session, recorder, lengths=lengths)
        proposals += recorder.proposals
        subject.close_sessions()
    return proposals


def _require_valid(draft: Draft, n_max: int, n_vocab: int) -> None:
    require(isinstance(draft, Draft), f"propose() returned {type(draft).__name__}, expected Draft")
    require(len(draft) <= n_max, f"a draft has {len(draft)} nodes, expected at most {n_max}")
    draft.check(n_vocab)


def empty_histories_are_fine(subject: DrafterSubject) -> None:
    """Without a prompt, and with one of a single token, propose() returns a valid draft."""
    for prompt in ([], [1]):
        drafter, _ = subject.open()
        drafter.begin(prompt)
        _require_valid(drafter.propose(4, monotonic() + 1.0), 4, subject.model.card.n_vocab)


def deadlines_are_kept(subject: DrafterSubject) -> None:
    """propose() returns by its deadline, also when that has passed already."""
    for patience_s in (-1.0, 0.02):
        for prompt in subject.prompts():
            tries = (_latest_s(subject, prompt, patience_s) for _ in range(_N_TRIES))
            late_s = next((late_s for late_s in tries if late_s <= _SLACK_S), None)
            require(late_s is not None, f"given {patience_s} s, propose() was over {_SLACK_S} s late in each try")


def _latest_s(subject: DrafterSubject, prompt: tuple[int, ...], patience_s: float) -> float:
    """Return by how many seconds the latest draft of a generation missed its deadline."""
    drafter, session = subject.open()
    recorder = Recorder(drafter, patience_s=patience_s)
    subject.generate(prompt, session, recorder, lengths=(8,))
    subject.close_sessions()
    return max((proposal.late_s for proposal in recorder.proposals), default=0.0) + min(patience_s, 0.0)


def begin_starts_over(subject: DrafterSubject) -> None:
    """After begin() a drafter that was used proposes what a new one with the same store does."""
    first, second, _ = subject.prompts()
    drafts = []
    for is_new in (False, True):
        store = Store(subject.budget_bytes)
        drafter, session = subject.open(store=store)
        subject.generate(first, session, drafter)
        if is_new:
            drafter, session = subject.open(store=store)
        recorder = Recorder(drafter)
        subject.generate(second, session, recorder)
        drafts.append([(proposal.draft.tokens, proposal.draft.parents) for proposal in recorder.proposals])
    used, new = drafts
    n_equal = [*map(eq, used, new), False].index(False)
    require(used == new, f"draft {n_equal + 1} of {len(used)} is not what a new instance proposes")


def memory_stays_in_budget(subject: DrafterSubject) -> None:
    """memory_bytes() is a whole number from 0 to the budget, before and after a generation."""
    for prompt in subject.prompts():
        drafter, session = subject.open()
        for moment in ("before", "after"):
            held = drafter.memory_bytes()
            require(type(held) is int and held >= 0, f"memory_bytes() is {held!r}, expected a whole number from 0 on")
            require(
                held <= subject.budget_bytes,
                f"memory_bytes() is {held} {moment} a generation, expected at most {subject.budget_bytes}",
            )
            if moment == "before":
                subject.generate(prompt, session, drafter)
        subject.close_sessions()


def every_step_is_accepted(subject: DrafterSubject) -> None:
    """learn() takes the outcome of every step: the prefill, plain steps and drafted ones in any order."""
    for lengths in ((0,), (0, 4), (4, 0, 0, 1), (8, 2, 0)):
        for proposal in _proposals(subject, lengths):
            _require_valid(proposal.draft, proposal.n_max, subject.model.card.n_vocab)


def greedy_text_is_plain_text(subject: DrafterSubject) -> None:
    """Greedy text with the drafter equals plain decoding's, token for token."""
    _compare_texts(subject, GREEDY)


def sampled_text_is_plain_text(subject: DrafterSubject) -> None:
    """Sampled text with the drafter equals plain decoding's of the same seed, with truncation and penalties, too."""
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=SEED)
    _compare_texts(subject, sampled)
    _compare_texts(subject, replace(sampled, top_k=20, repetition_penalty=1.3, presence_penalty=0.5))


def _compare_texts(subject: DrafterSubject, params: SamplingParams) -> None:
    """Compare the text with the drafter to plain decoding's, after each prompt."""
    most = subject.n_draft_most()
    for prompt in subject.prompts():
        drafter, session = subject.open(params)
        outputs = subject.generate(prompt, session, drafter, params, lengths=(most, 1, 0, most))
        subject.close_sessions()
        _, session = subject.open(params)
        expected = subject.generate(prompt, session, None, params)
        subject.close_sessions()
        other = next((i for i, pair in enumerate(zip(outputs, expected, strict=True)) if pair[0] != pair[1]), None)
        require(other is None, f"token {other} differs from plain decoding's (prompt of {len(prompt)} tokens)")


DRAFTER_CHECKS = (
    needs_are_sane,
    drafts_are_valid,
    empty_histories_are_fine,
    deadlines_are_kept,
    begin_starts_over,
    memory_stays_in_budget,
    every_step_is_accepted,
    greedy_text_is_plain_text,
    sampled_text_is_plain_text,
)


def check_drafter(
    factory: DrafterFactory,
    load: Callable[[], Model],
    *,
    on_check: OnCheck | None = None,
    n_tokens: int = 40,
    budget_bytes: int = 64_000_000,
) -> list[CheckResult]:
    """Run every check of a drafter on one model.

    Args:
        factory: Makes the drafter, as an entry point of `edgedec.drafters` does.
        load: Loads a model that declares the capabilities that the drafter needs; a small model will do.
        on_check: Called with each result as it comes.
        n_tokens: Tokens of each generation.
        budget_bytes: The drafter's DraftContext.budget_bytes.
    """
    return run_checks(DRAFTER_CHECKS, DrafterSubject(factory, load, n_tokens, budget_bytes), on_check)
