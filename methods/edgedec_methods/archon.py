"""Archon: answers are generated, critiqued, verified, tested, ranked and fused, as the layers of a TOML file say.

    [[layer]]
    kind = "generate"        # n answers of each model; the greedy one of the first model is always the first
    models = ["large", "small"]
    n = 4
    [[layer]]
    kind = "rank"            # the first model judges all answers together, and `keep` of them go on
    keep = 2

The other kinds: `critique` writes one of each answer, which later layers read; `verify` reasons about each, and those
that are right go on, or all; `test` writes n tests in words, and the `keep` answers that pass the most go on; `fuse`
writes n answers of each model from those that are there.

A layer without `models` has the first model. The first layer generates. `searched` looks for the layers that measure
best. The paper's own search is Bayesian; this is the greedy one that it is compared with.

Paper: Archon, Saad-Falcon et al. 2024, arXiv:2409.15254
Option: Python only, `layers_of`, `through_layers` and `searched`
For: several loaded models of 7B and more
Measured: 1.5B: 8 of 12 word problems, 33 s; greedily 9, 5 s (`python benchmarks/answers/judged_answers.py MODEL`)
Status: study
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count
from typing import Any, Literal, get_args

from edgedec.api.engine import Engine
from edgedec.errors import OptionError, RequestError
from edgedec_methods.multilingual import judged_together

Kind = Literal["generate", "critique", "verify", "test", "rank", "fuse"]
MOST = 64
MOST_CHARACTERS = 10_000  # of a TOML file: a key of 100,000 parts would take all memory
FUSED = (
    "{question}\n\nThese are answers to the question above, which may be wrong:\n\n{answers}\n\n"
    "Write one answer to the question that has what is right in them, and nothing else."
)
ANSWERED = "{question}\n\nAn answer to the question above:\n\n{text}\n\n"
CRITIQUE = ANSWERED + "Say in two short sentences what is right and what is wrong."
VERIFIED = ANSWERED + 'Reason step by step whether it is right. End with "Verdict: right" or "Verdict: wrong".'
TESTS = "{question}\n\nDon't answer. Write {n} tests, one a line, each of something that a right answer must have."
TESTED = ANSWERED + 'Tests of it:\n\n{tests}\n\nWrite the number of each test with "passed" or "failed".'
_RIGHT, _PASSED = re.compile(r"Verdict:\W*right\b", re.IGNORECASE), re.compile(r"\bpassed\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer.

    Attributes:
        kind: What it does.
        models: The names of its models; empty for the first one.
        n: How many answers of each model, or how many tests, where it writes some.
        keep: How many answers go on, where it ranks or tests.

    Raises:
        OptionError: A value is out of range.
    """

    kind: Kind
    models: tuple[str, ...] = ()
    n: int = 1
    keep: int = 1

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise OptionError("kind", self.kind, f"it must be one of {', '.join(get_args(Kind))}")
        if not isinstance(self.models, tuple) or not all(isinstance(name, str) for name in self.models):
            raise OptionError("models", self.models, "it must be a list of names")
        for name in ("n", "keep"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MOST:
                raise OptionError(name, value, f"it must be a whole number from 1 to {MOST}")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, and the critiques of it."""

    text: str
    critiques: tuple[str, ...] = ()


def layers_of(text: str) -> tuple[Layer, ...]:
    """Return the layers of a TOML file's text (RequestError where it is none, or a layer is not known).

    >>> [layer.kind for layer in layers_of('[[layer]]\\nkind = "generate"\\nn = 2\\n[[layer]]\\nkind = "fuse"')]
    ['generate', 'fuse']
    """
    if len(text) > MOST_CHARACTERS:
        raise RequestError(f"the layers have {len(text)} characters; they may have {MOST_CHARACTERS}")
    names, layers = {each.name for each in fields(Layer)}, list[Layer]()
    try:
        tables = tomllib.loads(text).get("layer", [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) and "kind" in table for table in tables):
            raise RequestError("layers are written as [[layer]], each with a kind")
        for table in tables:
            if unknown := table.keys() - names:
                raise RequestError(f"a layer has {', '.join(sorted(unknown))}; it may have {', '.join(sorted(names))}")
            models = table.get("models", [])
            layers.append(Layer(**table | {"models": tuple(models) if isinstance(models, list) else models}))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the layers are no TOML: {error}") from error
    if not layers or layers[0].kind != "generate":
        raise RequestError('the first layer must generate; give [[layer]] with kind = "generate" first')
    return tuple(layers)


def through_layers(
    layers: Sequence[Layer], engines: Mapping[str, Engine], question: str, *, seed: int = 0, **options: Any
) -> list[Answer]:
    """Return the answers that leave the last layer, the best first where that layer ranks.

    Args:
        layers: The layers; the first one generates.
        engines: The models by name; the first one is the one of layers without models.
        question: What the user asks.
        seed: The first of the seeds, of which each text that is drawn has its own.
        **options: Those of Engine.samples, for every text.

    Raises:
        RequestError: A layer names a model that there is not.
        EdgedecError: As Engine.samples, Engine.chat and edgedec.api.branching.branches.
    """
    if missing := [name for layer in layers for name in layer.models if name not in engines]:
        raise RequestError(f"a layer names the model {missing[0]!r}; there are {', '.join(engines)}")
    seeds, answers = count(seed), list[Answer]()
    for layer in layers:
        used = [engines[name] for name in layer.models] or [next(iter(engines.values()))]
        if layer.kind == "generate":
            greedy: Any = {**options, "temperature": 0}
            answers += [Answer(used[0].chat(_turn(question), **greedy).text)]
            answers += _written(used, question, layer.n, seeds, options)
        elif layer.kind == "fuse":
            listed = "\n\n".join(f"{place}. {_shown(answer)}" for place, answer in enumerate(answers, 1))
            answers = _written(used, FUSED.format(question=question, answers=listed), layer.n, seeds, options)
        elif layer.kind == "critique":
            said = _said(used[0], [CRITIQUE.format(question=question, text=a.text) for a in answers], seeds, options)
            answers = [Answer(a.text, (*a.critiques, words)) for a, words in zip(answers, said, strict=True)]
        elif layer.kind == "verify":
            said = _said(used[0], [VERIFIED.format(question=question, text=a.text) for a in answers], seeds, options)
            answers = [a for a, words in zip(answers, said, strict=True) if _RIGHT.search(words)] or answers
        else:
            if layer.kind == "rank":
                scores = judged_together(used[0], question, list(map(_shown, answers)), cancel=options.get("cancel"))
            else:
                (tests,) = _said(used[0], [TESTS.format(question=question, n=layer.n)], seeds, options)
                asked = [TESTED.format(question=question, text=a.text, tests=tests.strip()) for a in answers]
                scores = [float(len(_PASSED.findall(words))) for words in _said(used[0], asked, seeds, options)]
            order = sorted(range(len(answers)), key=lambda place: -scores[place])
            answers = [answers[place] for place in order[: layer.keep]]
    return answers


def searched(
    measure: Callable[[Sequence[Layer]], float], first: Layer, choices: Sequence[Layer], *, most: int = 64
) -> tuple[tuple[Layer, ...], float]:
    """Return the layers that measure best, and their figure: each round puts the best choice behind those there are.

    Args:
        measure: `(layers)` -> how good their answers are, by tasks of known answers.
        first: The layer that generates.
        choices: What may stand behind it.
        most: Most stacks to measure.
    """
    best: tuple[Layer, ...] = (first,)
    figure, n, grows = measure(best), 1, True
    while grows:
        tried = [(measure((*best, layer)), (*best, layer)) for layer in choices[: most - n]]
        n += len(tried)
        top, layers = max(tried, key=lambda each: each[0], default=(figure, best))
        if grows := top > figure:
            best, figure = layers, top
    return best, figure


def _said(engine: Engine, asked: Sequence[str], seeds: Iterator[int], options: Mapping[str, Any]) -> list[str]:
    """Return what a model says to each message."""
    return [_written([engine], each, 1, seeds, options)[0].text for each in asked]


def _written(
    engines: Sequence[Engine], content: str, n: int, seeds: Iterator[int], options: Mapping[str, Any]
) -> list[Answer]:
    """Return n answers of each model to a message."""
    answers = list[Answer]()
    for engine in engines:
        first, *_ = (next(seeds) for _ in range(n))  # text k draws with the first seed plus k
        drawn: Any = {**options, "seed": first}
        answers += [Answer(text.text) for text in engine.samples(_turn(content), n, **drawn)]
    return answers


def _shown(answer: Answer) -> str:
    """Return an answer with its critiques, as a model reads them."""
    return "\n".join([answer.text.strip(), *(f"(Critique: {words.strip()})" for words in answer.critiques)])


def _turn(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]
