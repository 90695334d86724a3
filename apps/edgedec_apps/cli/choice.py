"""From the options of choosing to the way in which a text is chosen or searched for, and how the choice is shown."""

import shlex
import shutil
from typing import Any

from edgedec.api.best_text import ROUND, BestOf
from edgedec.choosing.choice import ChosenText
from edgedec.choosing.scorer import SCORER_S
from edgedec.choosing.search_by import SearchBy, search_named
from edgedec.choosing.vote import ANSWER
from edgedec.errors import OptionError, RequestError, counted
from edgedec.plugins import CHOOSERS, plugins
from edgedec.sequence import Generation
from edgedec.sessions.text_pages import require_count
from edgedec_apps.cli.sampling_options import ChoiceFlags
from edgedec_apps.cli.shown.terminal import say

AUTO = "auto"


def count_of(flags: ChoiceFlags) -> int:
    """Return how many texts are written together; for "auto", those of its first round.

    Raises:
        RequestError: It is no whole number from 1 to 256.
    """
    if flags.texts is None:
        return 1
    if flags.texts == AUTO:
        return ROUND
    if not flags.texts.isascii() or not flags.texts.isdigit() or len(flags.texts) > 9:
        raise OptionError("n_texts", flags.texts, "it must be a whole number from 1 to 256, or auto with --choose")
    return require_count(int(flags.texts), "texts")


def way_of(flags: ChoiceFlags) -> BestOf | SearchBy | None:
    """Return how a text is chosen or searched for; None where the texts are only written.

    Raises:
        RequestError: Options contradict each other, or one is missing.
        OptionError: A value is out of range.
    """
    n = count_of(flags)
    command = None if flags.scorer is None else _command(flags.scorer)
    seconds = SCORER_S if flags.scorer_seconds is None else flags.scorer_seconds
    answer = ANSWER if flags.answer is None else flags.answer
    if flags.search is not None:
        if flags.choose is not None or flags.texts is not None:
            other = "--choose" if flags.choose is not None else "--texts"
            raise RequestError(f"--search and {other} exclude each other; the size of a search stands behind its colon")
        name, size = search_named(flags.search)
        return SearchBy(name, size, command, seconds, answer)
    if flags.choose is None:
        for given, name in ((command, "--scorer"), (flags.texts == AUTO, "--texts auto")):
            if given:
                raise RequestError(f"{name} needs a way to choose; add --choose ({', '.join(plugins(CHOOSERS))})")
        return None
    if flags.texts is None:
        raise RequestError("--choose needs several texts; say how many with --texts, such as -k 8")
    many: Any = AUTO if flags.texts == AUTO else n
    return BestOf(many, flags.choose, answer=answer, scorer=command, scorer_seconds=seconds)


def n_texts_of(way: BestOf | SearchBy | None, flags: ChoiceFlags) -> int:
    """Return how many texts are held at the same time, for the memory plan."""
    return way.n_texts if isinstance(way, SearchBy) else count_of(flags)


def _command(words: str) -> list[str]:
    """Return the arguments of a command, split as a shell splits words."""
    try:
        found = shlex.split(words)
    except ValueError as error:
        raise OptionError("scorer", words, f"its quotes must close ({error})") from error
    if not found or not found[0]:
        raise OptionError("scorer", words, "it must name a program")
    if shutil.which(found[0]) is None:
        raise OptionError("scorer", words, f"there is no program {found[0]!r}; give its path")
    return found


def say_choice(chosen: ChosenText, *, others: bool) -> None:
    """Say on standard error which text was chosen and why; where `others` is true, show the other texts, too."""
    n = len(chosen.texts)
    say(f"chosen: text {chosen.place + 1} of {n}: {chosen.why}")
    if not others:
        return
    for place, text in enumerate(chosen.texts):
        say(f"  text {place + 1}{' (chosen)' if place == chosen.place else ''}: {_facts(chosen, place, text)}")
        if place != chosen.place:
            for line in text.text.splitlines() or [""]:
                say(f"    {line}")


def _facts(chosen: ChosenText, place: int, text: Generation) -> str:
    facts = [f"{counted(len(text.token_ids), 'token')} ({text.finish_reason})"]
    if (answer := chosen.answers[place]) is not None:
        facts.append(f"answer {answer:.60}")
    if text.logprob_sum is not None and text.token_ids:
        facts.append(f"mean log-probability {text.logprob_sum / len(text.token_ids):.3f}")
    if chosen.scores:
        facts.append(f"score {chosen.scores[place]:.3f}")
    return ", ".join(facts)


def choice_document(chosen: ChosenText) -> dict[str, Any]:
    """Return the choice as plain types for JSON."""
    return {
        "place": chosen.place,
        "why": chosen.why,
        "answers": list(chosen.answers),
        "scores": list(chosen.scores),
    }
