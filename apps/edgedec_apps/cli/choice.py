"""From the options of choosing to the way in which a text is chosen or searched for, and how the choice is shown."""

import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgedec.api.best_text import ROUND, BestOf
from edgedec.choosing.choice import ChosenText
from edgedec.choosing.command_scorer import SCORER_S
from edgedec.choosing.search_by import SearchBy, search_named
from edgedec.choosing.vote import ANSWER
from edgedec.errors import EdgedecError, OptionError, RequestError, counted
from edgedec.plugins import CHOOSERS, plugins
from edgedec.sequence import Generation
from edgedec.sessions.text_pages import require_count
from edgedec_apps.cli.exit_codes import NOT_PASSED
from edgedec_apps.cli.sampling_options import ChoiceFlags
from edgedec_apps.cli.shown.terminal import one_line, say
from edgedec_apps.refine import RefineBy, Refined, refined

if TYPE_CHECKING:
    from edgedec.api.engine import Engine
    from edgedec.chat import Message

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
    return require_count(int(flags.texts), "n_texts")


def way_of(flags: ChoiceFlags) -> BestOf | SearchBy | RefineBy | None:
    """Return how a text is chosen, searched for or refined; None where the texts are only written.

    Raises:
        RequestError: Options contradict each other, or one is missing.
        OptionError: A value is out of range.
    """
    n = count_of(flags)
    command = None if flags.scorer is None else command_of(flags.scorer)
    seconds = SCORER_S if flags.scorer_seconds is None else flags.scorer_seconds
    answer = ANSWER if flags.answer is None else flags.answer
    if flags.refine is not None:
        return _refining(flags, command, seconds)
    if flags.refine_seconds is not None or flags.refine_tokens is not None:
        raise RequestError("--refine-seconds and --refine-tokens are limits of --refine N; add it, or leave them out")
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


def _refining(flags: ChoiceFlags, command: list[str] | None, seconds: float) -> RefineBy:
    """Return how a text is refined (RequestError where options contradict each other, or one is missing)."""
    for given, name in ((flags.search, "--search"), (flags.choose, "--choose"), (flags.answer, "--answer")):
        if given is not None:
            raise RequestError(f"--refine and {name} exclude each other; leave one out")
    if command is None:
        raise RequestError("--refine needs a check; give one, such as --scorer ./check")
    if flags.texts == AUTO:
        raise OptionError("n_texts", AUTO, "with --refine it is the most texts in all, a whole number")
    most = None if flags.texts is None else count_of(flags)
    limits: dict[str, Any] = {"texts": most, "seconds": flags.refine_seconds, "tokens": flags.refine_tokens}
    return RefineBy(check=command, n=flags.refine or 0, check_seconds=seconds, **limits)


def chosen(
    engine: "Engine", prompt: "str | list[Message]", way: BestOf | SearchBy | RefineBy, options: dict[str, Any]
) -> ChosenText:
    """Return the text that is chosen, searched for or refined.

    Raises:
        RequestError: A text is to be refined, and the prompt is no chat.
        EdgedecError: As Engine.best and edgedec_apps.refine.refined.
    """
    if not isinstance(way, RefineBy):
        return engine.best(prompt, way, **options)
    if isinstance(prompt, str):
        raise RequestError("the model has no chat template, which --refine needs; leave --refine out")
    return refined(engine, prompt, way, **options)


def n_texts_of(way: BestOf | SearchBy | RefineBy | None, flags: ChoiceFlags) -> int:
    """Return how many texts are held at the same time, for the memory plan."""
    if isinstance(way, RefineBy):
        return way.n
    return way.n_texts if isinstance(way, SearchBy) else count_of(flags)


def command_of(words: str, name: str = "scorer") -> list[str]:
    """Return the arguments of a command, split as a shell splits words; `name` is the option that has it."""
    try:
        found = shlex.split(words)
    except ValueError as error:
        raise OptionError(name, words, f"its quotes must close ({error})") from error
    if not found or not found[0]:
        raise OptionError(name, words, "it must name a program")
    if shutil.which(found[0]) is None:
        path = Path(found[0])
        what = "a folder" if path.is_dir() else "no program that may be run (chmod +x)" if path.exists() else ""
        wrong = f"{found[0]!r} is {what}" if what else f"there is no program {found[0]!r}"
        raise OptionError(name, words, f"{wrong}; give the path of a program")
    return found


class NotPassedError(EdgedecError):
    """No text of --refine passed the check; the best one is printed."""

    exit_code = NOT_PASSED


def require_passed(found: Iterable[object]) -> None:
    """Raise NotPassedError unless every refined text passed its check."""
    for each in found:
        if isinstance(each, Refined) and not each.passed:
            raise NotPassedError(
                f"none of {counted(len(each.texts), 'text')} passed the check; the best one is printed; "
                "allow more texts (--texts), or take another model"
            )


def say_choice(chosen: ChosenText, *, others: bool) -> None:
    """Say on standard error which text was chosen and why; where `others` is true, show the other texts, too."""
    n = len(chosen.texts)
    say(f"chosen: text {chosen.place + 1} of {n}: {chosen.why}")
    if isinstance(chosen, Refined) and not others:
        for line in chosen.lines():
            say(f"  {one_line(line)}")
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
    if isinstance(chosen, Refined):
        facts.append(one_line(chosen.said(place)))
    elif chosen.scores:
        facts.append(f"score {chosen.scores[place]:.3f}")
    return ", ".join(facts)


def choice_document(chosen: ChosenText) -> dict[str, Any]:
    """Return the choice as plain types for JSON."""
    return {
        "place": chosen.place,
        "why": chosen.why,
        "answers": list(chosen.answers),
        "scores": list(chosen.scores),
        **(_refined_document(chosen) if isinstance(chosen, Refined) else {}),
    }


def _refined_document(found: Refined) -> dict[str, Any]:
    verdicts = [None if each is None else {"score": each.score, "words": each.words} for each in found.verdicts]
    kinds = {"rounds": list(found.rounds), "revised": list(found.revised)}
    return {"passed": found.passed, **kinds, "verdicts": verdicts}
