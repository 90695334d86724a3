"""Write, check, write again: the caller's check says what is wrong with a text, and the model writes it anew.

The first text is the greedy one. Where it does not pass, n texts are written together: in odd rounds they answer the
prompt itself, in even rounds the best text so far and what the check said about it, as small models cling to a text
that they are shown. A text takes the place of the best one only where its score is higher. That goes on until a text
passes, or until texts, seconds or tokens are spent. The even rounds are Iterative Agent Decoding (arXiv:2504.01931),
whose reward is the score of the check.

Text k draws with the seed plus k, so it is a function of the seed and of what the check said before it, not of time.
"""

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import Timer
from typing import Any, NamedTuple

from edgedec.api.best_text import prompt_text
from edgedec.api.engine import Engine
from edgedec.choosing.choice import ChosenText
from edgedec.choosing.scorer import SCORER_S, checked_scores, in_time
from edgedec.errors import CancelledError, OptionError, PluginError, PromptTooLongError, ScorerError
from edgedec.progress import CancelToken, OnProgress, report_progress
from edgedec.sampling import SEED_LIMIT
from edgedec.sequence import Generation
from edgedec_apps.command_scorer import CommandScorer

ROUNDS = 4
"""Rounds after the first text, where the caller does not say how many texts are allowed."""
SHOWN = 1500
"""Most characters of what a check said that the model is shown: the beginning and the end."""
MOST_TEXTS = 1024
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Verdict(NamedTuple):
    """What a check says about a text.

    Attributes:
        score: From 0 to 1; 1 passes.
        words: What is wrong, for the model and for a person; may be empty.
    """

    score: float
    words: str = ""


Check = Callable[[str, str], tuple[float, str]]
"""`(prefix, text)` -> a Verdict, or as a pair; `prefix` is the last message of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefineBy:
    """How a text is refined.

    Attributes:
        check: A function, or the argument list of a command. The command gets {"prefix": text, "steps": [text]} on its
            standard input and prints a JSON array with the text's score. What it writes to standard error says what is
            wrong. A command that fails, or takes too long, gives the score 0.
        n: How many texts are written together.
        texts: Most texts in all; None for the greedy one and ROUNDS times n.
        seconds: No work goes on after so many; None for no such limit. It cuts a text in the middle, so it may change
            how many texts there are, and never what they say.
        tokens: No texts are begun once so many tokens are written; None for no such limit.
        check_seconds: Most seconds of a check.

    Raises:
        OptionError: A value is out of range.
    """

    check: Check | Sequence[str]
    n: int = 4
    texts: int | None = None
    seconds: float | None = None
    tokens: int | None = None
    check_seconds: float = SCORER_S

    def __post_init__(self) -> None:
        _require("refine", self.n, 256)
        _require("n_texts", self.most, MOST_TEXTS)
        _require("refine_tokens", 1 if self.tokens is None else self.tokens, 1 << 40)
        if self.seconds is not None and not 0 < self.seconds < 1e7:
            raise OptionError("refine_seconds", self.seconds, "it must be above 0")
        if not callable(self.check):
            CommandScorer(self.check, seconds=self.check_seconds)
        elif not 0 < self.check_seconds < 1e9:
            raise OptionError("scorer_seconds", self.check_seconds, "it must be above 0")

    @property
    def most(self) -> int:
        """Most texts in all."""
        return 1 + ROUNDS * self.n if self.texts is None else self.texts


@dataclass(frozen=True, slots=True)
class Refined(ChosenText):
    """The best text, and all others in the order in which they were written.

    Attributes:
        verdicts: By text, what the check said; None for a text that was not checked, as the work ended before.
        rounds: By text, the round in which it was written, from 0.
    """

    verdicts: tuple[Verdict | None, ...] = ()
    rounds: tuple[int, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the best text passed."""
        return _score(self.verdicts[self.place]) == 1

    def said(self, place: int) -> str:
        """Return the round of a text and what the check said about it, cut to a length for a person."""
        verdict = self.verdicts[place]
        if verdict is None:
            return f"round {self.rounds[place]}, not checked"
        words = f": {cut(verdict.words, 200)}" if verdict.words else ""
        return f"round {self.rounds[place]}, score {verdict.score:.3f}{words}"

    def lines(self) -> list[str]:
        """Return a line for each text: its round, its score, and what the check said."""
        return [f"text {place + 1}: {self.said(place)}" for place in range(len(self.texts))]


def refined(
    engine: Engine,
    messages: Sequence[Mapping[str, Any]],
    how: RefineBy,
    *,
    cancel: CancelToken | None = None,
    **options: Any,
) -> Refined:
    """Write texts until one passes a check or the budget is spent, and return the best one with all others.

    Args:
        engine: Writes the texts.
        messages: The chat, whose last message is answered.
        how: The check, and the budget.
        cancel: Ends the work, from any thread; the best text so far is returned.
        **options: Those of Engine.chat, for every text. At temperature 0 a round has one text.

    Raises:
        OptionError: An option is out of range.
        ScorerError: The check does not start, or a function that is the check fails; the error has the texts.
        What Engine.chat() and Engine.samples() raise.
    """
    seed = options.pop("seed", None)
    seed = secrets.randbits(62) if seed is None else seed
    options = {"reuse": "exact", **options}
    greedy = engine.sampling(**{name: options[name] for name in ("temperature",) if name in options}).greedy
    n = 1 if greedy else how.n
    texts, verdicts, rounds, best, why = list[Generation](), list[Verdict | None](), list[int](), 0, ""
    with _stopping(cancel, how.seconds) as stop:
        while not why:
            first, turn = len(texts), rounds[-1] + 1 if rounds else 0
            options["seed"] = (seed + first) % SEED_LIMIT
            if turn == 0:
                texts.append(engine.chat(messages, cancel=stop, **options | {"temperature": 0}))
            else:
                more = messages if turn % 2 else revised(messages, texts[best].text, verdicts[best])
                texts += engine.samples(
                    _fitting(engine, messages, more), min(n, how.most - first), cancel=stop, **options
                )
            if stop.cancelled and not (cancel is not None and cancel.cancelled):  # the seconds are over
                texts = [
                    replace(text, finish_reason="length") if text.finish_reason == "cancelled" else text
                    for text in texts
                ]
            rounds += [turn] * (len(texts) - first)
            verdicts += _verdicts(how, prompt_text(messages), texts, first, stop, options.get("on_progress"))
            best = max(range(len(texts)), key=lambda place: _score(verdicts[place]))  # of equals the first
            why = _ended(how, texts, verdicts[best], stop)
    scores = tuple(max(0.0, _score(verdict)) for verdict in verdicts)
    return Refined(best, tuple(texts), (None,) * len(texts), scores, why, tuple(verdicts), tuple(rounds))


def revised(messages: Sequence[Mapping[str, Any]], text: str, verdict: Verdict | None) -> list[Mapping[str, Any]]:
    """Return a chat with an answer and what the check said about it, so that the model writes the answer again."""
    words = "" if verdict is None else cut(verdict.words)
    said = f" The check said:\n\n{words}" if words else ""
    turn = f"Your answer did not pass a check.{said}\n\nSo it is not right. Write a different answer, which passes."
    return [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": turn}]


def cut(words: str, most: int = SHOWN) -> str:
    """Return the beginning and the end of what a check said, without control characters.

    >>> cut("a" * 10, 8), cut("one\\r\\n\\x1b[31mtwo\\n")
    ('aa ... aaaaaa', 'one\\n[31mtwo')
    """
    plain = _CONTROLS.sub("", words.replace("\r\n", "\n")).strip()
    head = most // 4
    return plain if len(plain) <= most else f"{plain[:head]} ... {plain[head - most :]}"


def _fitting(
    engine: Engine, messages: Sequence[Mapping[str, Any]], more: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Return the longer chat, `more`, where it and as much as its last answer fit the context; else `messages`."""
    if more is messages:
        return messages
    try:
        n_left = engine.n_ctx - len(engine.chat_ids(more))
    except PromptTooLongError:
        return messages
    return more if n_left > len(engine.tokenizer.encode(more[-2]["content"])) else messages


def _verdicts(
    how: RefineBy,
    prefix: str,
    texts: Sequence[Generation],
    first: int,
    stop: CancelToken,
    on_progress: OnProgress | None,
) -> list[Verdict | None]:
    """Check the texts from `first` on, one after another; equal texts of a round are checked once.

    Raises:
        ScorerError: The check does not start, or a function failed as a check.
    """
    found = dict[str, Verdict | None]()
    for place, text in enumerate(texts[first:], first):
        report_progress(on_progress, "checking", place + 1, how.most, "texts")
        if text.text not in found:
            try:
                found[text.text] = None if stop.cancelled else _verdict(how, prefix, text.text, stop)
            except CancelledError:
                found[text.text] = None
            except PluginError as error:
                raise ScorerError(error.marked, tuple(each.text for each in texts)) from error
    return [found[text.text] for text in texts[first:]]


def _verdict(how: RefineBy, prefix: str, text: str, stop: CancelToken) -> Verdict:
    """Return what the check says about a text."""
    check = how.check
    if callable(check):
        found = in_time(lambda: check(prefix, text), how.check_seconds, stop)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], str)):
            raise PluginError(f"the check returned {found!r:.100}; it must return a score from 0 to 1 and its words")
        return Verdict(checked_scores([found[0]], 1)[0], found[1])
    ran = CommandScorer(check, seconds=how.check_seconds, cancel=stop).run(prefix, [text])
    said = ran.said.decode("utf-8", "replace").strip()
    try:
        (score,) = checked_scores(ran.scores(), 1)
    except PluginError:
        wrong = ran.failure.partition(";")[0] or f"printed {ran.printed[:60]!r}, and no JSON array with one score"
        told = [] if said and ran.is_status else [f"The check {wrong}."]
        return Verdict(0.0, "\n".join([*told, *filter(None, [said])]))
    return Verdict(score, said)


def _ended(how: RefineBy, texts: Sequence[Generation], best: Verdict | None, stop: CancelToken) -> str:
    """Return why the best text is chosen, as part of a sentence, where the work ends; else an empty text."""
    score = _score(best)
    if score == 1:
        return "it passed the check"
    held = (
        "nothing was checked"
        if best is None
        else f"none passed; its score, {score:.3f}, is the highest of {len(texts)}"
    )
    if stop.cancelled:
        return held
    spent = len(texts) >= how.most or (
        how.tokens is not None and sum(len(text.token_ids) for text in texts) >= how.tokens
    )
    return held if spent else ""


def _score(verdict: Verdict | None) -> float:
    """Return the score of a verdict; of no verdict less than any."""
    return -1.0 if verdict is None else verdict.score


def _require(option: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise OptionError(option, value, f"it must be a whole number from 1 to {most}")


@contextmanager
def _stopping(cancel: CancelToken | None, seconds: float | None) -> Iterator[CancelToken]:
    """Yield a token that is cancelled with `cancel`, and after so many seconds."""
    stop = CancelToken()
    timer = None if seconds is None else Timer(seconds, stop.cancel)
    with nullcontext() if cancel is None else cancel.calling(stop.cancel):
        if cancel is not None and cancel.cancelled:
            stop.cancel()
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            yield stop
        finally:
            if timer is not None:
                timer.cancel()
