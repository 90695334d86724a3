"""Write, check, write again: the caller's check says what is wrong with a text, and the model writes it anew.

The first text is the greedy one. Where it does not pass, n texts are written together, in rounds of two kinds: they
answer the prompt itself, or the best text so far and what the check said about it. The kinds take turns until one of
them has raised the score; the next round is of the kind that raised it more, for each text that it wrote (a
compute-optimal mixture of breadth and depth, arXiv:2408.03314). A text takes the place of the best one only where its
score is higher. That goes on until a text passes, or until texts, seconds or tokens are spent. The rounds of the second
kind are Iterative Agent Decoding (arXiv:2504.01931), whose reward is the score of the check.

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
from edgedec.callers import check_fields, one_line
from edgedec.chat import Chat, messages_of
from edgedec.choosing.choice import ChosenText
from edgedec.choosing.command_scorer import SCORER_S, CommandScorer
from edgedec.choosing.scorer import checked_scores, in_time
from edgedec.decoding.text_room import require_room
from edgedec.errors import CancelledError, MemoryCapError, OptionError, PluginError, PromptTooLongError, ScorerError
from edgedec.progress import CancelToken, OnProgress, report_progress
from edgedec.sampling import SEED_LIMIT
from edgedec.sequence import Generation

N_TOGETHER = 4
"""Texts that are written together, where the caller does not say how many."""
ROUNDS = 4
"""Rounds after the first text, where the caller does not say how many texts are allowed."""
SHOWN = 1500
"""Most characters of what a check said that the model is shown: the beginning and the end."""
MOST_TEXTS = 1024
MOST_TOKENS = 1 << 40
PRIOR = 0.125
"""What either kind of round is taken to have raised the score by before it was tried, so that neither is given up."""
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
    n: int = N_TOGETHER
    texts: int | None = None
    seconds: float | None = None
    tokens: int | None = None
    check_seconds: float = SCORER_S

    def __post_init__(self) -> None:
        check_fields(self)
        _require("refine", self.n, 256)
        _require("n_texts", self.most, MOST_TEXTS)
        _require("refine_tokens", 1 if self.tokens is None else self.tokens, MOST_TOKENS)
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
        revised: By text, whether it answers the best text before its round; else it answers the prompt.
    """

    verdicts: tuple[Verdict | None, ...] = ()
    rounds: tuple[int, ...] = ()
    revised: tuple[bool, ...] = ()

    __repr__ = one_line

    @property
    def passed(self) -> bool:
        """Whether the best text passed."""
        return _score(self.verdicts[self.place]) == 1

    def said(self, place: int) -> str:
        """Return the round of a text and what the check said about it, cut to a length for a person."""
        verdict, note = self.verdicts[place], f"round {self.rounds[place]}{', revised' if self.revised[place] else ''}"
        if verdict is None:
            return f"{note}, not checked"
        words = f": {cut(verdict.words, 200)}" if verdict.words else ""
        return f"{note}, score {verdict.score:.3f}{words}"

    def lines(self) -> list[str]:
        """Return a line for each text: its round, its score, and what the check said."""
        return [f"text {place + 1}: {self.said(place)}" for place in range(len(self.texts))]


def refined(
    engine: Engine,
    messages: Chat,
    how: RefineBy,
    *,
    cancel: CancelToken | None = None,
    **options: Any,
) -> Refined:
    """Write texts until one passes a check or the budget is spent, and return the best one with all others.

    Args:
        engine: Writes the texts.
        messages: What the user says, or the chat, whose last message is answered.
        how: The check, and the budget.
        cancel: Ends the work, from any thread; the best text so far is returned.
        **options: Those of Engine.chat, for every text. At temperature 0 a round has one text, which answers the best
            text, and the first that is no better ends the work.

    Raises:
        OptionError: An option is out of range.
        ScorerError: The check does not start, or a function that is the check fails; the error has the texts.
        MemoryCapError: The memory plan has no room for the texts of a round; nothing was written.
        What Engine.chat() and Engine.samples() raise.
    """
    messages, seed = messages_of(messages), options.pop("seed", None)
    seed = secrets.randbits(62) if seed is None else seed
    options = {"reuse": "exact", **options}
    greedy = engine.requests.sampling(**{name: options[name] for name in ("temperature",) if name in options}).greedy
    n = 1 if greedy else how.n
    if how.most > 1:
        require_room(
            engine.pool.slots[0], min(n, how.most - 1), len(engine.chat_ids(messages)), options.get("max_tokens")
        )
    texts, verdicts, rounds, best, why = list[Generation](), list[Verdict | None](), list[int](), 0, ""
    deep = list[bool]()  # by text, whether it is revised
    with _stopping(cancel, how.seconds) as stop:
        while not why:
            first, revises = len(texts), bool(texts) and (greedy or _revises([_score(each) for each in verdicts], deep))
            options["seed"] = (seed + first) % SEED_LIMIT
            if first == 0:
                texts.append(engine.chat(messages, cancel=stop, **options | {"temperature": 0}))
            else:
                more = revised(messages, texts[best].text, verdicts[best]) if revises else messages
                n_next = min(n, how.most - first)
                if revises and not _fits(engine, more, n_next, options.get("max_tokens")):
                    revises, more = False, messages
                texts += engine.samples(more, n_next, cancel=stop, **options)
            if stop.cancelled and not (cancel is not None and cancel.cancelled):  # the seconds are over
                texts = [
                    replace(text, finish_reason="length") if text.finish_reason == "cancelled" else text
                    for text in texts
                ]
            rounds += [rounds[-1] + 1 if rounds else 0] * (len(texts) - first)
            deep += [revises] * (len(texts) - first)
            verdicts += _verdicts(how, prompt_text(messages), texts, first, stop, options.get("on_progress"))
            best = max(range(len(texts)), key=lambda place: _score(verdicts[place]))  # of equals the first
            is_stuck = greedy and best < first  # it would be asked the same again
            why = _ended(how, texts, verdicts[best], stop.cancelled or is_stuck)
    scores = tuple(max(0.0, _score(verdict)) for verdict in verdicts)
    return Refined(best, tuple(texts), (None,) * len(texts), scores, why, tuple(verdicts), tuple(rounds), tuple(deep))


def _revises(scores: Sequence[float], revised: Sequence[bool]) -> bool:
    """Return whether the next round answers the best text: whether such texts raised the score more, by text.

    >>> _revises([0], [False]), _revises([0, 0], [False, False]), _revises([0, 0, 0], [False, False, True])
    (False, True, False)
    >>> _revises([0, 0, 0.5], [False, False, True])
    True
    """
    n, gains, best = [0, 0], [PRIOR, PRIOR], scores[0]
    for score, deep in zip(scores[1:], revised[1:], strict=True):
        n[deep] += 1
        gains[deep] += max(0.0, score - best)
        best = max(best, score)
    return gains[True] * n[False] > gains[False] * n[True]


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


def _fits(engine: Engine, messages: Sequence[Mapping[str, Any]], n: int, max_tokens: int | None) -> bool:
    """Return whether a chat fits the context with as much again as its last answer, and n texts fit the memory plan."""
    try:
        n_prompt = len(engine.chat_ids(messages))
        require_room(engine.pool.slots[0], n, n_prompt, max_tokens)
    except (PromptTooLongError, MemoryCapError):
        return False
    return engine.n_ctx - n_prompt > len(engine.tokenizer.encode(messages[-2]["content"]))


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
    verdicts = dict[str, Verdict | None]()
    for place, text in enumerate(texts[first:], first):
        report_progress(on_progress, "checking", place + 1, how.most, "texts")
        if text.text not in verdicts:
            try:
                verdicts[text.text] = None if stop.cancelled else _verdict(how, prefix, text.text, stop)
            except CancelledError:
                verdicts[text.text] = None
            except PluginError as error:
                raise ScorerError(error.marked, tuple(each.text for each in texts)) from error
    return [verdicts[text.text] for text in texts[first:]]


def _verdict(how: RefineBy, prefix: str, text: str, stop: CancelToken) -> Verdict:
    """Return what the check says about a text."""
    check = how.check
    if callable(check):
        outcome = in_time(lambda: check(prefix, text), how.check_seconds, stop)
        if not (isinstance(outcome, tuple) and len(outcome) == 2 and isinstance(outcome[1], str)):
            raise PluginError(f"the check returned {outcome!r:.100}; it must return a score from 0 to 1 and its words")
        return Verdict(checked_scores([outcome[0]], 1)[0], outcome[1])
    ran = CommandScorer(check, seconds=how.check_seconds, cancel=stop).run(prefix, [text])
    said = ran.said.decode("utf-8", "replace").strip()
    try:
        (score,) = checked_scores(ran.scores(), 1)
    except PluginError:
        wrong = ran.failure.partition(";")[0] or f"printed {ran.printed[:60]!r}, and no JSON array with one score"
        notes = [] if said and ran.is_status else [f"The check {wrong}."]
        return Verdict(0.0, "\n".join([*notes, *filter(None, [said])]))
    return Verdict(score, said)


def _ended(how: RefineBy, texts: Sequence[Generation], best: Verdict | None, is_over: bool) -> str:
    """Return why the best text is chosen, as part of a sentence, where the work ends; else an empty text."""
    score = _score(best)
    if score == 1:
        return "it passed the check"
    held = (
        "nothing was checked"
        if best is None
        else f"none passed; its score, {score:.3f}, is the highest of {len(texts)}"
    )
    if is_over:
        return held
    spent = len(texts) >= how.most or (
        how.tokens is not None and sum(len(text.token_ids) for text in texts) >= how.tokens
    )
    return held if spent else ""


def _score(verdict: Verdict | None) -> float:
    """Return the score of a verdict; of no verdict less than any."""
    return -1.0 if verdict is None else verdict.score


def _require(option: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
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
