"""Scorers: what says how good the texts so far are, so that a search goes on with the better ones.

A scorer is any function `(prefix, steps) -> scores`, or a command; of a search also a plug-in, by its name. `prefix` is
what all texts have in common (the prompt, as text), `steps` is what each of them says so far, and a score is the
chance, 0 to 1, that the text is on the way to a good answer. It is called once for all texts of a round.
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edgedec.choosing.choice import installed
from edgedec.choosing.command_scorer import SCORER_S, CommandScorer
from edgedec.choosing.partial_texts import AskedPrompt, PartialText, PartialTexts
from edgedec.errors import EdgedecError, OptionError, PluginError, ScorerError, argument
from edgedec.plugins import SCORERS
from edgedec.progress import CancelToken, check_cancelled

_POLL_S = 0.02


class Scorer(Protocol):
    """A caller's scorer."""

    def __call__(self, prefix: str, steps: Sequence[str], /) -> Sequence[float]:
        """Return a score from 0 to 1 for each of `steps`, all of which follow `prefix`."""


class TextScorer(Protocol):
    """A scorer as the searches call it: of the texts themselves, so that it can also look at their branches."""

    def __call__(self, texts: PartialTexts, live: Sequence[PartialText], /) -> list[float]:
        """Return a score from 0 to 1 for each text of `live`."""


@dataclass(frozen=True, slots=True)
class CallerScorer:
    """Implements TextScorer by a caller's function, or by a command.

    A function runs in a thread, so that the search can end although the function hangs. Python can't end a thread: one
    that hangs stays until the process ends. A command (edgedec.choosing.command_scorer) leaves nothing over.

    Attributes:
        scorer: The function, or the argument list of a command.
        prefix: The prompt as text.
        seconds: Most seconds of a call.
    """

    scorer: Scorer | Sequence[str]
    prefix: str
    seconds: float = SCORER_S

    def __call__(self, texts: PartialTexts, live: Sequence[PartialText], /) -> list[float]:
        """Return the caller's scores; raises what scores_of() raises."""
        return scores_of(self.scorer, self.prefix, [texts.text(text) for text in live], self.seconds, texts.cancel)


@dataclass(frozen=True, slots=True)
class ScorerKind:
    """A scorer of a search that its name chooses: what an entry point `scorer.NAME` of `edgedec.searches` names.

    Attributes:
        read: `(value)` -> what opens it for a prompt; `value` is what stands behind "NAME:", or nothing. It raises
            OptionError.
    """

    read: Callable[[str], Callable[[AskedPrompt], TextScorer]]


def scorer_named(words: str) -> Callable[[AskedPrompt], TextScorer]:
    """Return what opens the scorer "NAME" or "NAME:VALUE" for a prompt (OptionError: no such name, or value)."""
    name, _, value = words.partition(":")
    return installed(SCORERS, "scorer", name, ScorerKind).read(value)


def text_scorer(scorer: Scorer | Sequence[str] | str, asked: AskedPrompt, seconds: float) -> TextScorer:
    """Return a scorer as a search calls it: a plug-in's, or the caller's function or command."""
    return scorer_named(scorer)(asked) if isinstance(scorer, str) else CallerScorer(scorer, asked.prefix, seconds)


def require_scorer(scorer: Scorer | Sequence[str] | str | None, seconds: float) -> None:
    """Raise OptionError unless `scorer` is a name, a function, an argument list or None, and the seconds above 0."""
    if not isinstance(seconds, int | float) or not 0 < seconds < 1e9:
        raise OptionError("scorer_seconds", seconds, "it must be above 0")
    if isinstance(scorer, str):
        scorer_named(scorer)
    elif scorer is not None and not callable(scorer):
        CommandScorer(scorer, seconds=seconds)


def scores_of(
    scorer: Scorer | Sequence[str], prefix: str, steps: Sequence[str], seconds: float, cancel: CancelToken | None
) -> list[float]:
    """Return the scores that a caller's function or command gives texts.

    Raises:
        ScorerError: The scorer failed, took too long, or returned something else than scores; it has the texts.
        OptionError: The command is no list of strings, or the seconds are not above 0.
        CancelledError: `cancel` was cancelled meanwhile.
        EdgedecError: The function raised one itself.
    """
    try:
        if callable(scorer):
            scores = in_time(lambda: scorer(prefix, steps), seconds, cancel)
        else:
            scores = CommandScorer(scorer, seconds=seconds, cancel=cancel)(prefix, steps)
        return checked_scores(scores, len(steps))
    except PluginError as error:
        raise ScorerError(error.marked, tuple(steps)) from error


def checked_scores(of_scorer: object, n: int) -> list[float]:
    """Return scores as floats (PluginError unless they are n numbers from 0 to 1).

    >>> checked_scores((1, 0.5), 2)
    [1.0, 0.5]
    """
    expected = f"it must return {n} numbers from 0 to 1, one for each text"
    try:
        scores = [float(score) for score in of_scorer]  # type: ignore[attr-defined]
    except (TypeError, ValueError, OverflowError) as error:
        raise PluginError(f"the scorer returned {of_scorer!r:.100}; {expected}") from error
    if len(scores) != n or not all(0 <= score <= 1 for score in scores):
        raise PluginError(f"the scorer returned {scores!s:.100}; {expected}")
    return scores


def in_time(call: Callable[[], Any], seconds: float, cancel: CancelToken | None) -> Any:
    """Return what a function of others returns, if it does so in time.

    Raises:
        PluginError: It raised an error, or took longer.
        CancelledError: `cancel` was cancelled meanwhile.
        EdgedecError: It raised one itself.
    """
    if not 0 < seconds < math.inf:
        raise OptionError("scorer_seconds", seconds, "it must be above 0")
    results: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="edgedec-scorer", daemon=True)
    thread.start()
    left = seconds
    while thread.is_alive() and left > 0:
        thread.join(min(_POLL_S, left))
        left -= _POLL_S
        check_cancelled(cancel, "the search")
    if failed:
        if isinstance(failed[0], EdgedecError):
            raise failed[0]
        raise PluginError(f"the scorer raised {type(failed[0]).__name__}: {failed[0]!s:.200}") from failed[0]
    if not results:
        raise PluginError(
            f"the scorer took longer than {seconds:g} s for a call; make it faster, or allow more with "
            f"{argument('scorer_seconds')}"
        )
    return results[0]
