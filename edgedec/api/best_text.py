"""The best of several texts of one prompt: written together, then chosen by a chooser of edgedec.choosing.choice."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Unpack

from edgedec.api.requests import RequestOptions, SamplingOptions
from edgedec.callers import check_fields
from edgedec.chat import Message
from edgedec.choosing.choice import Chooser, ChosenText, ScoreTexts, chooser_named, chosen_among
from edgedec.choosing.choosers import require_logprobs
from edgedec.choosing.command_scorer import SCORER_S
from edgedec.choosing.partial_texts import AskedPrompt, BranchingEngine
from edgedec.choosing.sample_count import is_enough
from edgedec.choosing.scorer import Scorer, require_scorer, scores_of
from edgedec.choosing.vote import ANSWER, answer_of, answer_pattern
from edgedec.decoding.session_pool import SessionPool, SessionSlot
from edgedec.errors import CancelledError, OptionError, argument
from edgedec.model_card import ModelCard
from edgedec.progress import CancelToken
from edgedec.sampling import SEED_LIMIT, SamplingParams
from edgedec.sequence import Generation, Until

ROUND = 4
"""Texts of a round of n="auto"."""
MOST_AUTO = 32
EPS = 0.02
"""n="auto" ends when another text is expected to add less than this to the chance of the right answer."""


@dataclass(frozen=True, slots=True)
class BestOf:
    """How a text is chosen.

    Attributes:
        n: How many texts, or "auto" for as many as TTSPM (arXiv:2505.20522) expects to help, at most MOST_AUTO.
        choose: The chooser, a plug-in of `edgedec.choosers`.
        answer: The regular expression of an answer.
        scorer: For "score": a function `(prefix, steps) -> scores`, or the argument list of a command.
        scorer_seconds: Most seconds of a call of the scorer.

    Raises:
        OptionError: The chooser is unknown, a value is out of range, or the scorer is missing or not wanted.
        PluginError: The chooser does not import.
    """

    n: int | Literal["auto"] = 8
    choose: str = "vote"
    answer: str = ANSWER
    scorer: Scorer | Sequence[str] | None = None
    scorer_seconds: float = SCORER_S

    def __post_init__(self) -> None:
        check_fields(self)
        chooser = self.chooser
        answer_pattern(self.answer)
        require_scorer(self.scorer, self.scorer_seconds)
        if chooser.takes_scorer and self.scorer is None:
            raise OptionError("scorer", None, f"{argument('choose')}={self.choose!r} needs one; give a function")
        if self.scorer is not None and not chooser.takes_scorer:
            raise OptionError("scorer", self.scorer, f"it goes with {argument('choose')}='score', and only with that")
        if self.n == "auto" and not chooser.votes:
            raise OptionError("n", self.n, f"'auto' counts the texts that agree, which is nothing to {self.choose!r}")

    @property
    def chooser(self) -> Chooser:
        """The chooser itself."""
        return chooser_named(self.choose)


class ManyTexts(BranchingEngine, Protocol):
    """What choosing and searching need of an engine.

    Attributes:
        pool: The sessions that the texts are written on.
    """

    pool: SessionPool[SessionSlot]

    @property
    def card(self) -> ModelCard:
        """The facts of the model."""

    def sampling(self, **options: Unpack[SamplingOptions]) -> SamplingParams:
        """Return sampling parameters: the options given, then the defaults."""

    def samples(
        self,
        prompt: Sequence[int],
        n: int,
        *,
        until: Until,
        cancel: CancelToken | None,
        **options: Unpack[RequestOptions],
    ) -> tuple[Generation, ...]:
        """Generate n texts of a prompt; text k draws with the seed plus k."""


def best_of(engine: ManyTexts, asked: AskedPrompt, how: BestOf, options: RequestOptions) -> ChosenText:
    """Write texts, score them where the chooser needs it, and return the choice.

    Args:
        engine: Writes the texts.
        asked: The prompt.
        how: How many, and how one is chosen.
        options: The options of the texts.

    Raises:
        OptionError: The chooser needs log-probabilities, and the options leave them out; nothing was written.
        What the chooser's open_scorer() raises; nothing was written.
        What samples() and scores_of() raise.
    """
    if how.chooser.needs_logprobs and options.get("logprobs", 0) is None:
        require_logprobs(None)
    score = _scoring(asked, how)
    texts = _written(engine, asked, how, options)
    try:
        scores = score(texts)
    except CancelledError:  # the texts are there: the likeliest is chosen, or the first without log-probabilities
        return chosen_among(texts, "likely" if texts[0].logprob_sum is not None else "vote", answer=how.answer)
    return chosen_among(texts, how.choose, answer=how.answer, scores=scores)


def _scoring(asked: AskedPrompt, how: BestOf) -> ScoreTexts:
    """Return what scores texts for a chooser; nothing does where it needs no scores."""
    scorer, open_scorer = how.scorer, how.chooser.open_scorer
    if scorer is not None:
        return lambda texts: scores_of(
            scorer, asked.prefix, [text.text for text in texts], how.scorer_seconds, asked.cancel
        )
    return (lambda texts: []) if open_scorer is None else open_scorer(asked)


def _written(engine: ManyTexts, asked: AskedPrompt, how: BestOf, options: RequestOptions) -> tuple[Generation, ...]:
    """Return the texts that are chosen among; those that can't matter any more are stopped early."""
    seed = options.get("seed")
    first_seed = secrets.randbits(62) if seed is None else seed

    def write(first: int, n: int, until: Until) -> tuple[Generation, ...]:
        more: RequestOptions = {**options, "seed": (first_seed + first) % SEED_LIMIT}
        return engine.samples(asked.token_ids, n, until=until, cancel=asked.cancel, **more)

    if how.n != "auto":
        n, may_stop = how.n, how.chooser.may_stop
        return write(0, n, lambda ended: may_stop(ended, n - len(ended), how.answer))
    texts: tuple[Generation, ...] = ()
    while True:
        texts += write(len(texts), ROUND, lambda ended: False)
        answers = [answer_of(text.text, how.answer) for text in texts]
        is_cancelled = any(text.finish_reason == "cancelled" for text in texts)
        if is_cancelled or is_enough(answers, EPS, MOST_AUTO):
            return texts


def prompt_text(prompt: str | Sequence[int] | Sequence[Message]) -> str:
    """Return a prompt as a scorer gets it: a text as it is, the texts of a chat's last message, nothing of token ids.

    >>> prompt_text("2 + 2?"), prompt_text([{"role": "user", "content": "2 + 2?"}]), prompt_text([1, 2])
    ('2 + 2?', '2 + 2?', '')
    """
    if isinstance(prompt, str):
        return prompt
    last = prompt[-1] if len(prompt) else None
    content = last.get("content", "") if isinstance(last, Mapping) else ""
    return "\n".join(part["text"] for part in content if "text" in part) if isinstance(content, list) else str(content)
