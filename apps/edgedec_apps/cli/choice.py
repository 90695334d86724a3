"""From the options of choosing to the way in which a text is chosen or searched for, and how the choice is shown."""

import json
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgedec.api.best_text import ROUND, BestOf, best
from edgedec.api.engine import Engine
from edgedec.chat import Message
from edgedec.choosing.choice import ChosenText
from edgedec.choosing.command_scorer import SCORER_S
from edgedec.choosing.search_by import SearchBy
from edgedec.choosing.vote import ANSWER
from edgedec.errors import EdgedecError, OptionError, RequestError, counted
from edgedec.plugins import SCORERS, SEARCHES, is_installed
from edgedec.progress import CancelToken
from edgedec.sequence import Generation
from edgedec.sessions.text_pages import require_count
from edgedec_apps.choices import Choices, require_choices
from edgedec_apps.cli.exit_codes import NOT_PASSED
from edgedec_apps.cli.methods import Method
from edgedec_apps.cli.options import LoadFlags, OutputFlags
from edgedec_apps.cli.shown.terminal import one_line, say
from edgedec_apps.refine import N_TOGETHER, RefineBy, Refined, refined

AUTO = "auto"
_KEYS = {"refine": "n", "refine_seconds": "seconds", "refine_tokens": "tokens", "size": "n"}
_KEYS |= {"answer": "answer", "check": "check", "scorer": "scorer", "scorer_seconds": "scorer-seconds"}
"""The key of a method for each argument of BestOf, SearchBy and RefineBy."""
Way = BestOf | SearchBy | RefineBy
"""How one text is chosen among several, searched for, or refined."""


def count_of(texts: str | None) -> int:
    """Return how many texts are written together; for "auto", those of its first round.

    Raises:
        RequestError: It is no whole number from 1 to 256.
    """
    if texts is None:
        return 1
    if texts == AUTO:
        return ROUND
    if not texts.isascii() or not texts.isdigit() or len(texts) > 9:
        raise OptionError("n_texts", texts, "it must be a whole number from 1 to 256, or auto with a vote")
    return require_count(int(texts), "n_texts")


def way_of(asked: Mapping[Method, dict[str, Any]], texts: str | None) -> Way | None:
    """Return how a text is chosen, searched for or refined, by the methods of a prompt; None where texts are written.

    Raises:
        RequestError: Methods exclude each other, or one lacks what it needs.
        OptionError: A value is out of range.
    """
    ways = [method for method in asked if method.name != "passages"]
    n = count_of(texts)
    if not ways:
        if texts == AUTO:
            raise RequestError("--texts auto needs a way to choose; add one, such as --method vote")
        return None
    if len(ways) > 1:
        both = " and ".join(f"--method {each.typed}" for each in ways)
        raise RequestError(f"{both} exclude each other; leave one out")
    method, values = ways[0], asked[ways[0]]
    try:
        return _refining(values, texts) if method.name == "refine" else _choosing(method, values, texts, n)
    except OptionError as error:
        if (key := _KEYS.get(error.argument)) is None:
            raise
        raise OptionError(f"--method {method.typed}:{key}", error.value, error.accepted) from error


def choices_of(words: str, *, excluded: bool) -> list[str]:
    """Return the texts of --choices: those of a JSON list, or those between commas.

    Raises:
        RequestError: An option excludes this one, it is no such list, or a text is empty or twice there.
    """
    if excluded:
        what = "--texts, --grammar, --think, and methods of writing texts"
        raise RequestError(f"--choices excludes {what}, as one of the choices is the whole answer; leave one out")
    try:
        texts = json.loads(words) if words.lstrip().startswith("[") else [text.strip() for text in words.split(",")]
    except ValueError:
        texts = None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise OptionError("choices", words, 'it must be texts such as yes,no or a JSON list such as ["yes", "no"]')
    require_choices(texts)
    return texts


def say_choices(weighed: Choices, *, all_of_them: bool) -> None:
    """Say on standard error how probable the choices are: the first five, or all of them."""
    say(f"{counted(len(weighed.choices), 'choice')} with {weighed.mass:.4f} of all answers · {weighed.total_s:.2f} s")
    for choice in weighed.ranked[: None if all_of_them else 5]:
        say(f"  {choice.probability:.4f}  {one_line(choice.text)}")


def _choosing(method: Method, values: dict[str, Any], texts: str | None, n: int) -> BestOf | SearchBy:
    """Return how a text is searched for, or chosen among several (RequestError where texts are missing, or given)."""
    scorer = None if "scorer" not in values else _scorer_of(values["scorer"])
    seconds, answer = values.get("scorer_seconds", SCORER_S), values.get("answer", ANSWER)
    if method.kind == SEARCHES:
        if texts is not None:
            raise RequestError(f"--method {method.typed} and --texts exclude each other; its size is its key n")
        return SearchBy(method.name, values.get("n"), scorer, seconds, answer)
    if "n" in values:
        raise RequestError(f"--method {method.typed} takes no key n; say how many texts with --texts, such as -k 8")
    if texts is None:
        raise RequestError(f"--method {method.typed} needs several texts; say how many with --texts, such as -k 8")
    if isinstance(scorer, str):
        raise OptionError("scorer", scorer, "it scores the steps of a search; give model:NAME or a program")
    many: Any = AUTO if texts == AUTO else n
    return BestOf(many, method.name, answer=answer, scorer=scorer, scorer_seconds=seconds)


@dataclass(frozen=True, slots=True)
class RewardModel:
    """Stands for a scorer by the model of that name, until with_reward_model() has loaded it."""

    name: str

    def __call__(self, prefix: str, steps: Sequence[str], /) -> Sequence[float]:
        """Never be called."""
        raise AssertionError("a loaded model takes its place")


def _scorer_of(words: str) -> list[str] | str | RewardModel:
    """Return the scorer that words name: "model:NAME", a plug-in, or a command (OptionError: none of these)."""
    name, colon, model = words.partition(":")
    if colon and model and name == "model":
        return RewardModel(model)
    return words if is_installed(SCORERS, name) else command_of(words)


@contextmanager
def with_reward_model(
    way: Way | None, load: LoadFlags, output: OutputFlags, cancel: CancelToken
) -> Iterator[Way | None]:
    """Yield how a text is chosen, its reward model loaded, where it has one, until the block ends.

    Raises:
        EdgedecError: The reward model can't be opened, or is none.
    """
    if way is None or isinstance(way, RefineBy) or not isinstance(way.scorer, RewardModel):
        yield way
        return
    from edgedec_apps.cli.opening import open_beside
    from edgedec_apps.reward import reward_scorer

    with open_beside(way.scorer.name, load, output, cancel) as engine:
        yield replace(way, scorer=reward_scorer(engine, cancel))


def _refining(values: dict[str, Any], texts: str | None) -> RefineBy:
    """Return how a text is refined (OptionError where a value is out of range)."""
    if texts == AUTO:
        raise OptionError("n_texts", AUTO, "with --method refine it is the most texts in all, a whole number")
    return RefineBy(
        check=command_of(values["check"], "check"),
        n=values.get("n", N_TOGETHER),
        texts=None if texts is None else count_of(texts),
        seconds=values.get("seconds"),
        tokens=values.get("tokens"),
        check_seconds=values.get("check_seconds", SCORER_S),
    )


def chosen(engine: Engine, prompt: str | list[Message], way: Way, options: dict[str, Any]) -> ChosenText:
    """Return the text that is chosen, searched for or refined.

    Raises:
        RequestError: A text is to be refined, and the prompt is no chat.
        EdgedecError: As edgedec.api.best_text.best and edgedec_apps.refine.refined.
    """
    if not isinstance(way, RefineBy):
        return best(engine, prompt, way, **options)
    if isinstance(prompt, str):
        raise RequestError("the model has no chat template, which --method refine needs; leave it out")
    return refined(engine, prompt, way, **options)


def n_texts_of(way: Way | None, texts: str | None) -> int:
    """Return how many texts are held at the same time, for the memory plan."""
    if isinstance(way, RefineBy):
        return way.n
    return way.n_texts if isinstance(way, SearchBy) else count_of(texts)


def command_of(words: str, name: str = "scorer") -> list[str]:
    """Return the arguments of a command, split as a shell splits words; `name` is the option that has it."""
    try:
        parts = shlex.split(words)
    except ValueError as error:
        raise OptionError(name, words, f"its quotes must close ({error})") from error
    if not parts or not parts[0]:
        raise OptionError(name, words, "it must name a program")
    if shutil.which(parts[0]) is None:
        path = Path(parts[0])
        what = "a folder" if path.is_dir() else "no program that may be run (chmod +x)" if path.exists() else ""
        wrong = f"{parts[0]!r} is {what}" if what else f"there is no program {parts[0]!r}"
        raise OptionError(name, words, f"{wrong}; give the path of a program")
    return parts


class NotPassedError(EdgedecError):
    """No refined text passed the check; the best one is printed."""

    exit_code = NOT_PASSED


def require_passed(verdicts: Iterable[object]) -> None:
    """Raise NotPassedError unless every refined text passed its check."""
    for each in verdicts:
        if isinstance(each, Refined) and not each.passed:
            raise NotPassedError(
                f"none of {counted(len(each.texts), 'text')} passed the check; the best one is printed; "
                "allow more texts (--texts), or take another model"
            )


def say_choice(chosen: ChosenText, *, others: bool) -> None:
    """Say on standard error which text was chosen and why; where `others` is true, show the other texts, too."""
    n = len(chosen.texts)
    say(f"chosen: text {chosen.place + 1} of {n}: {chosen.why}")
    if not others:
        for line in chosen.lines() if isinstance(chosen, Refined) else ():
            say(f"  {one_line(line)}")
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


def _refined_document(refined: Refined) -> dict[str, Any]:
    verdicts = [None if each is None else {"score": each.score, "words": each.words} for each in refined.verdicts]
    kinds = {"rounds": list(refined.rounds), "revised": list(refined.revised)}
    return {"passed": refined.passed, "verdicts": verdicts} | kinds
