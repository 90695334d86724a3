"""The best of several texts of one prompt, written together and chosen by a chooser; or a search for the best one."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Unpack

from edgedec.api.branching import branches, texts_on
from edgedec.api.engine import Engine
from edgedec.api.requests import Prompt, RequestOptions, is_chat
from edgedec.callers import check_fields, checks_arguments
from edgedec.chat import Message
from edgedec.choosing.choice import Chooser, ChosenText, chooser_named, chosen_among
from edgedec.choosing.choosers import require_logprobs
from edgedec.choosing.command_scorer import SCORER_S
from edgedec.choosing.partial_texts import AskedPrompt, PartialText, PartialTexts
from edgedec.choosing.sample_count import another_is_wanted, n_agreeing
from edgedec.choosing.scorer import Scorer, require_scorer, scores_of, text_scorer
from edgedec.choosing.search_by import SearchBy, SearchRun
from edgedec.choosing.vote import ANSWER, answer_of, answer_pattern
from edgedec.decoding.text_room import require_room
from edgedec.errors import CancelledError, OptionError, argument
from edgedec.progress import CancelToken, check_cancelled
from edgedec.sampling import SEED_LIMIT, SamplingParams
from edgedec.sequence import Generation, Until
from edgedec.sessions.text_pages import ROWS_OF_TEXT
from edgedec.stats import DecodeStats

ROUND = 4
"""Texts of a round of n="auto"."""
MOST_AUTO = 32
EPS = 0.02
"""n="auto" ends when another text is expected to add less than this to the chance of the right answer."""
_OF_DRAWS = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"}
    | {"momentum", "penalty_last_n", "logit_bias"}
)
_OF_ALL = frozenset({"seed", "max_tokens", "stop", "ignore_end", "reuse", "draft", "on_progress"})


@dataclass(frozen=True, slots=True)
class BestOf:
    """How a text is chosen.

    Attributes:
        n: How many texts, or "auto" for as many as TTSPM (arXiv:2505.20522) expects to help, at most MOST_AUTO.
        choose: The name of the chooser, a plug-in.
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


@checks_arguments
def best(
    engine: Engine,
    prompt: Prompt | Sequence[Message],
    how: BestOf | SearchBy | None = None,
    *,
    cancel: CancelToken | None = None,
    think: bool | int | None = None,
    **options: Unpack[RequestOptions],
) -> ChosenText:
    """Choose among several texts of a prompt, or search for the best one; docs/better-answers.md says how.

    When `cancel` stops the writing, the choice is among the texts so far; a search ends with CancelledError.

    Args:
        engine: Has the model.
        prompt: As of Engine.samples().
        how: How many texts, and how one is chosen, or the search; by default the majority vote of 8.
        cancel: Stops all texts and the scorer, from any thread.
        think: As of Engine.samples().
        **options: Those of Engine.samples(). Text k draws with the seed plus k. A search knows no grammar.

    Raises:
        OptionError: The search can't heed an option.
        ScorerError: The scorer raised an error, took too long, or returned something else than scores.
        What Engine.samples() and branches() raise.
    """
    continued, options = engine.requests.chat_or_prompt(prompt, cancel, think, options)
    token_ids = engine.prompt_ids(continued)
    asked = AskedPrompt(
        model=engine.model,
        token_ids=token_ids,
        prefix=prompt_text(prompt),
        open_branches=lambda most: branches(engine, token_ids, most=most, cancel=cancel),
        render=engine.requests.render if is_chat(prompt) else None,
        cancel=cancel,
    )
    if isinstance(how, SearchBy):
        return _searched(engine, asked, how, options)
    return _best_of(engine, asked, BestOf() if how is None else how, options)


def _best_of(engine: Engine, asked: AskedPrompt, how: BestOf, options: RequestOptions) -> ChosenText:
    """Write texts, score them where the chooser needs it, and return the choice.

    Raises:
        OptionError: The chooser needs log-probabilities, and the options leave them out; nothing was written.
        What the chooser's open_scorer() raises; nothing was written.
        What samples() and scores_of() raise.
    """
    if how.chooser.needs_logprobs and options.get("logprobs", 0) is None:
        require_logprobs(None)
    scorer, open_scorer = how.scorer, how.chooser.open_scorer
    score = None if open_scorer is None or scorer is not None else open_scorer(asked)
    texts, scores = _written(engine, asked, how, options), list[float]()
    try:
        if scorer is not None:
            written = [text.text for text in texts]
            scores = scores_of(scorer, asked.prefix, written, how.scorer_seconds, asked.cancel)
        elif score is not None:
            scores = score(texts)
    except CancelledError:  # the texts are there: the likeliest is chosen, or the first without log-probabilities
        return chosen_among(texts, "likely" if texts[0].logprob_sum is not None else "vote", answer=how.answer)
    return chosen_among(texts, how.choose, answer=how.answer, scores=scores)


def _written(engine: Engine, asked: AskedPrompt, how: BestOf, options: RequestOptions) -> tuple[Generation, ...]:
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
        if is_cancelled or not another_is_wanted(n_agreeing(answers), len(answers), EPS, MOST_AUTO):
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


def _searched(engine: Engine, asked: AskedPrompt, how: SearchBy, options: RequestOptions) -> ChosenText:
    """Search for a text of a prompt, and return the texts that the search ends with and the chosen one.

    Raises:
        OptionError: The search does not know an option.
        ScorerError: The caller's scorer failed.
        CancelledError: The search was cancelled.
        CapabilityError: The runtime can't fork, or rows depend there on what else is in their forward.
        ContextFullError, MemoryCapError: There is no room for the texts.
    """
    _require_known(how, options)
    on_progress, cancel = options.pop("on_progress", None), asked.cancel
    of_sampling = {name for name in options if name not in RequestOptions.__annotations__} | {*SamplingParams.names()}
    sampling: dict[str, Any] = {name: value for name, value in options.items() if name in of_sampling}
    params = engine.requests.sampling(**sampling)
    seed = secrets.randbits(62) if params.seed is None else params.seed
    scorer = None if how.scorer is None else text_scorer(how.scorer, asked, how.scorer_seconds)
    run = SearchRun(how.size, params, seed, scorer, how.answer, how.separator, asked)
    check_cancelled(cancel, "the search")
    n_prompt = len(asked.token_ids)
    require_room(engine.pool.slots[0], how.n_texts, n_prompt, params.max_tokens, rows_each=ROWS_OF_TEXT)
    with (
        branches(engine, asked.token_ids, cancel=cancel, on_progress=on_progress) as opened,
        texts_on(engine, opened, asked.token_ids, params, cancel=cancel, on_progress=on_progress) as texts,
    ):
        result = how.search.run(texts, run)
        written = tuple(_generation(texts, text, engine.card.runtime, seed) for text in result.texts)
    answers = tuple(answer_of(text.text, how.answer) for text in written)
    return ChosenText(result.place, written, answers, result.scores, result.why)


def _require_known(how: SearchBy, options: RequestOptions) -> None:
    """Raise OptionError where an option was given that the search has no use for."""
    draws = how.search.draws
    allowed = _OF_ALL | (_OF_DRAWS if draws else {"temperature"})
    for name, value in options.items():
        if name not in allowed and value not in (None, False, "coupled", {}, ()):
            raise OptionError(name, value, f"a search by {how.name!r} can't heed it; leave it or the search out")
    if not draws and options.get("temperature"):
        accepted = f"the search {how.name!r} takes the most probable tokens; leave {argument('temperature')} out, or 0"
        raise OptionError("temperature", options["temperature"], accepted)


def _generation(texts: PartialTexts, text: PartialText, runtime: str, seed: int) -> Generation:
    """Return a text of a search as any other; its statistics are those of the whole search."""
    stats = DecodeStats(runtime=runtime, seed=seed, n_prompt_tokens=len(texts.prompt_ids))
    stats.n_generated_tokens, stats.n_steps = len(text.token_ids), sum(texts.forwards.values())
    stats.add_note(f"{texts.n_tokens} tokens were evaluated in {stats.n_steps} forwards of the search")
    return Generation(
        text=texts.text(text),
        token_ids=text.token_ids,
        finish_reason=text.ended or "length",
        stats=stats,
        logprob_sum=text.logprob - text.end_logprob,
    )
