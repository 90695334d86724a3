"""The best of several texts of one prompt: written together, then chosen by one of the methods of edgedec.choosing."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, Unpack

from edgedec.api.request_options import RequestOptions, SamplingOptions
from edgedec.chat import Message
from edgedec.choosing.choice import (
    NEEDS_JUDGE,
    Choose,
    Chosen,
    chosen_among,
    may_stop,
    require_choose,
    require_logprobs,
)
from edgedec.choosing.command_scorer import SCORER_S
from edgedec.choosing.judgement import Question, chance_yes, question_of
from edgedec.choosing.sample_count import another_is_wanted, n_agreeing
from edgedec.choosing.scorer import Scorer, require_scorer, scores_of
from edgedec.choosing.vote import ANSWER, answer_of, answer_pattern
from edgedec.decoding.branches import Branches
from edgedec.decoding.samples import Until
from edgedec.errors import CancelledError, OptionError, argument
from edgedec.model import Model, ModelCard
from edgedec.noise import SEED_LIMIT
from edgedec.progress import CancelToken, OnProgress
from edgedec.sampling import SamplingParams
from edgedec.sequence import Generation
from edgedec.sessions.forks import require_forks
from edgedec.tokenizer import Tokenizer

ROUND = 4
"""Texts of a round of n="auto"."""
MOST_AUTO = 32
EPS = 0.02
"""n="auto" ends when another text is expected to add less than this to the chance of the right answer."""

Write = Callable[[int, int, Until], tuple[Generation, ...]]
"""`(first text, how many, until)` -> these texts; text k draws with the first seed plus k."""


@dataclass(frozen=True, slots=True)
class BestOf:
    """How a text is chosen.

    Attributes:
        n: How many texts, or "auto" for as many as TTSPM (arXiv:2505.20522) expects to help, at most MOST_AUTO.
        choose: The method.
        answer: The regular expression of an answer.
        scorer: For "score": a function `(prefix, steps) -> scores`, or the argument list of a command.
        scorer_seconds: Most seconds of a call of the scorer.
    """

    n: int | Literal["auto"] = 8
    choose: Choose = "vote"
    answer: str = ANSWER
    scorer: Scorer | Sequence[str] | None = None
    scorer_seconds: float = SCORER_S

    def __post_init__(self) -> None:
        require_choose(self.choose)
        answer_pattern(self.answer)
        require_scorer(self.scorer, self.scorer_seconds)
        if (self.choose == "score") != (self.scorer is not None):
            raise OptionError("scorer", self.scorer, f"it goes with {argument('choose')}='score', and only with that")
        if isinstance(self.n, str) and self.n != "auto":
            raise OptionError("n", self.n, "it must be a whole number, or 'auto'")
        if self.n == "auto" and self.choose not in ("vote", "bag"):
            raise OptionError("n", self.n, "'auto' counts the texts that agree, so it goes with 'vote' and 'bag'")


def written(write: Write, how: BestOf) -> tuple[Generation, ...]:
    """Return the texts that are chosen among; those that can't matter any more are stopped early."""
    if how.n != "auto":
        n = how.n
        return write(0, n, lambda ended: may_stop(how.choose, ended, n, how.answer))
    texts: tuple[Generation, ...] = ()
    while True:
        texts += write(len(texts), ROUND, lambda ended: False)
        answers = [answer_of(text.text, how.answer) for text in texts]
        is_cancelled = any(text.finish_reason == "cancelled" for text in texts)
        if is_cancelled or not another_is_wanted(n_agreeing(answers), len(answers), EPS, MOST_AUTO):
            return texts


def scored(
    texts: Sequence[Generation],
    how: BestOf,
    prefix: str,
    judge: Callable[[Sequence[Generation]], list[float]],
    cancel: CancelToken | None,
) -> list[float]:
    """Return the scores that the method needs, by text; none where it needs none.

    Args:
        texts: The texts.
        how: The method.
        prefix: The prompt as text, for the caller's scorer.
        judge: `(texts)` -> the judged chance of each to be right.
        cancel: Ends a call of the scorer.
    """
    if how.choose in NEEDS_JUDGE:
        return judge(texts)
    if how.scorer is None:
        return []
    return scores_of(how.scorer, prefix, [text.text for text in texts], how.scorer_seconds, cancel)


class ManyTexts(Protocol):
    """What choosing needs of an engine.

    Attributes:
        model: The runtime's model.
    """

    model: Model

    @property
    def card(self) -> ModelCard:
        """The facts of the model."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

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

    def require_room(self, n: int, n_prompt: int, max_tokens: int | None, *, rows_each: int = 0) -> None:
        """Raise MemoryCapError unless the memory plan has room for n texts of a prompt."""

    def branches(
        self,
        prompt: Sequence[int],
        *,
        most: int,
        cancel: CancelToken | None,
        on_progress: OnProgress | None = None,
    ) -> AbstractContextManager[Branches]:
        """Open branches of a prompt inside the block."""


def best_of(
    engine: ManyTexts,
    prompt_ids: Sequence[int],
    how: BestOf,
    words: tuple[str, str],
    cancel: CancelToken | None,
    options: RequestOptions,
) -> Chosen:
    """Write texts, score them where the method needs it, and return the choice.

    Args:
        engine: Writes the texts.
        prompt_ids: The prompt.
        how: How many, and how one is chosen.
        words: The prompt as text, for the caller's scorer; and what the model reads after a text before it judges that
            text, with control tokens spelled out.
        cancel: Stops all texts and the scorer.
        options: The options of the texts.

    Raises:
        CapabilityError: A judgement was asked for, and the runtime can't fork; nothing was written.
        OptionError: The method needs log-probabilities, and the options leave them out; nothing was written.
        What samples() and scores_of() raise.
    """
    prefix, turn = words
    if how.choose in ("likely", "bag") and options.get("logprobs", 0) is None:
        require_logprobs(None)
    asked = None
    if how.choose in NEEDS_JUDGE:
        require_forks(engine.model)
        asked = question_of(engine.tokenizer, turn, parse_special=True)
    seed = options.get("seed")
    first_seed = secrets.randbits(62) if seed is None else seed

    def write(first: int, n: int, until: Until) -> tuple[Generation, ...]:
        more: RequestOptions = {**options, "seed": (first_seed + first) % SEED_LIMIT}
        return engine.samples(prompt_ids, n, until=until, cancel=cancel, **more)

    def judge(texts: Sequence[Generation]) -> list[float]:
        assert asked is not None, "a method that needs a judgement has a question"
        with engine.branches(prompt_ids, most=2, cancel=cancel) as branches:
            return judged_texts(branches, texts, asked)

    texts = written(write, how)
    try:
        scores = scored(texts, how, prefix, judge, cancel)
    except CancelledError:  # the texts are there: the likeliest is chosen, or the first without log-probabilities
        return chosen_among(texts, "likely" if texts[0].logprob_sum is not None else "vote", answer=how.answer)
    return chosen_among(texts, how.choose, answer=how.answer, scores=scores)


def judged_texts(branches: Branches, texts: Sequence[Generation], question: Question) -> list[float]:
    """Return the judged chance of each text to be right; each is read again, behind the prompt that is read once."""
    found: list[float] = []
    for text in texts:
        (branch,) = branches.fork(branches.root)
        logits = branches.forward({branch: [*text.token_ids, *question.token_ids]})[branch]
        found.append(chance_yes(logits[-1], question))
        branches.drop(branch)
    return found


def prompt_text(prompt: str | Sequence[int] | Sequence[Message]) -> str:
    """Return a prompt as a scorer gets it: a text as it is, a chat's last message, and nothing of token ids.

    >>> prompt_text("2 + 2?"), prompt_text([{"role": "user", "content": "2 + 2?"}]), prompt_text([1, 2])
    ('2 + 2?', '2 + 2?', '')
    """
    if isinstance(prompt, str):
        return prompt
    last = prompt[-1] if len(prompt) else None
    return str(last.get("content", "")) if isinstance(last, Mapping) else ""
