"""`--method NAME[:KEY=VALUE,...]`: the methods that there are, and what a command line asks of them.

A guest says in its module's docstring whom it is for, and what was measured. The classes here say so of methods that
are no plug-ins.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from importlib import import_module
from typing import Any, Literal

from edgedec.api.options import Lossy
from edgedec.callers import did_you_mean
from edgedec.choosing.command_scorer import SCORER_S
from edgedec.errors import RequestError
from edgedec.plugins import CHOOSERS, SEARCHES, SESSIONS, TEXT_METHODS, Plugin, plugins
from edgedec_apps.cli.method_keys import read_keys, split_pairs

Stage = Literal["load", "text", "prompt"]
"""When a method is asked for: as a model is loaded, with a text, or for all that is written to a prompt."""
_FIELD = re.compile(r"(?m)^(For|Measured): (.+(?:\n {4}.+)*)$")


@dataclass
class LayerSkip:
    """LOSSY. Layer skip (arXiv:2404.06954): layers are left out in every forward.

    For: speed that is worth another text
    Measured: docs/faster.md; edgedec eval measures the perplexity of each speed-up

    Attributes:
        speedup: layers are left out until a token reads 1/X of the bytes of weights
        force: allow more than was measured for the model
    """

    speedup: float
    force: bool = False


@dataclass
class Momentum:
    """Momentum Decoding (arXiv:2212.02175): what repeats the text becomes less probable.

    For: greedy texts that go in circles
    Measured: of 20 greedy answers of smollm2-135m 9 looped without it, none with 0.1

    Attributes:
        x: X times n is taken from the probability of a token that repeats n tokens
    """

    x: float


@dataclass
class IgnoreEnd:
    """A text goes on past the model's end tokens.

    For: measuring texts of one length
    """


@dataclass
class Passages:
    """Which passages are read of a file that is longer than the context.

    For: long files, where it is on by itself

    Attributes:
        n: most passages that are read (default: a quarter of the context)
        model: an embedding model, by whose vectors passages are searched, not by words
    """

    n: int | None = None
    model: str | None = None


@dataclass
class Pictures:
    """How a model reads pictures.

    For: a projector that does not lie beside the model; else it is on by itself

    Attributes:
        projector: the file with which the model reads pictures (mmproj), or off
        max_tokens: most tokens of a picture: fewer are faster, and show less
    """

    projector: str = "auto"
    max_tokens: int | None = None


@dataclass
class Refine:
    """A text is written, checked, and written again where it did not pass; --texts is the most in all.

    For: what a program can check, such as code with tests
    Measured: half the tokens of the best of 8 by the same check; it solved no more (docs/better-answers.md)

    Attributes:
        check: a program and its arguments: gets a text as JSON, prints its score, says what is wrong
        n: texts that are written together after the first one
        check_seconds: most seconds of a check
        seconds: no work goes on after so many
        tokens: no texts are begun once so many tokens are written
    """

    check: str
    n: int = 4
    check_seconds: float = SCORER_S
    seconds: float | None = None
    tokens: int | None = None


@dataclass
class Choosing:
    """Keys of a search, and of a way to choose one of several texts.

    Attributes:
        n: the size of a search (default: its own); --texts says how many texts there are to choose from
        scorer: likely, likely:last, judge, probe:FILE or model:NAME (a reward model); or a program and its arguments,
            which no shell reads: it gets texts as JSON and prints scores
        scorer_seconds: most seconds of a call of the scorer
        answer: what an answer is, for votes, as a regular expression (default: what follows "Answer:")
    """

    n: int | None = None
    scorer: str | None = None
    scorer_seconds: float = SCORER_S
    answer: str | None = None


_CHOOSERS = {
    "vote": """Self-consistency (arXiv:2203.11171): the text with the answer that most texts state.

    For: questions with one short answer
    Measured: with 8 texts 82 % of 50 word problems right for 88 plain steps""",
    "likely": """The text with the highest mean log-probability.

    For: several texts without a checker
    Measured: with 4 texts 86 % of 50 word problems right for 60 plain steps""",
    "score": """The text with the highest score of the caller's scorer.

    For: what a program can judge, such as code with tests
    Measured: with 8 texts 48 % of 50 functions right for 67 plain steps; greedy decoding has 24 % for 34""",
}
"""What the core's own choosers are, as docstrings of guests say it."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method that `--method` names.

    Attributes:
        name: Its name in Python; a person types dashes or underscores.
        kind: The plug-in's group; "" for a method that is no plug-in.
        stage: When it is asked for.
        keys: The dataclass that declares its keys. None where what it takes can't be typed.
        doc: The docstring that says what it does, whom it is for, and what was measured.
    """

    name: str
    kind: str
    stage: Stage
    keys: type[Any] | None
    doc: str

    @property
    def typed(self) -> str:
        """The name as it is typed."""
        return self.name.replace("_", "-")


_STAGES: dict[str, tuple[Stage, type[Any]]] = {
    "layer_skip": ("load", LayerSkip),
    "pictures": ("load", Pictures),
    "momentum": ("text", Momentum),
    "ignore_end": ("text", IgnoreEnd),
    "passages": ("prompt", Passages),
    "refine": ("prompt", Refine),
}
OWN = {name: Method(name, "", stage, keys, keys.__doc__ or "") for name, (stage, keys) in _STAGES.items()}
_GROUPS: dict[str, Stage] = {SESSIONS: "load", TEXT_METHODS: "text", CHOOSERS: "prompt", SEARCHES: "prompt"}
_WHERE = {"text": "edgedec run and chat have it", "prompt": "edgedec run has it"}


def names() -> list[str]:
    """Return the names of all methods in the spelling of the command line, sorted."""
    return sorted({name.replace("_", "-") for each in _GROUPS for name in (*plugins(each), *OWN)})


def method_named(name: str) -> Method:
    """Return the method that a person names.

    Raises:
        RequestError: There is none of this name; the message lists all.
        PluginError: It does not import.
    """
    plain = name.strip().replace("-", "_")
    if plain in OWN:
        return OWN[plain]
    for group in _GROUPS:
        for plugin in plugins(group).values():
            if plugin.name.replace("-", "_") == plain:
                doc = _CHOOSERS[name] if group == CHOOSERS and name in _CHOOSERS else doc_of(plugin)
                return Method(plugin.name, group, _GROUPS[group], _keys(plugin), doc)
    hint = did_you_mean(name, names()) or f"; there are {', '.join(names())}"
    raise RequestError(f"--method {name!r:.60} is no method{hint} (edgedec methods says what each does)")


def doc_of(plugin: Plugin) -> str:
    """Return the docstring of a guest's module."""
    return import_module(plugin.target.partition(":")[0]).__doc__ or ""


def about(doc: str) -> tuple[str, str, str]:
    """Return what a docstring says: what the method does, whom it is for, and what was measured, a line each."""
    text = inspect.cleandoc(doc)
    lines = {name: re.sub(r"\s+", " ", line).replace("`", "") for name, line in _FIELD.findall(text)}
    return text.partition("\n\n")[0].replace("\n", " "), lines.get("For", ""), lines.get("Measured", "")


def _keys(plugin: Plugin) -> type[Any] | None:
    target = plugin.load()
    if plugin.kind == SESSIONS:
        return target  # type: ignore[no-any-return]  # a dataclass (edgedec.companion)
    if plugin.kind == TEXT_METHODS:
        takes = target.takes
        return takes and make_dataclass("Value", [("value", takes, True) if takes is bool else ("value", takes)])
    return Choosing


def asked_methods(texts: Sequence[str] | None, *stages: Stage) -> dict[Method, dict[str, Any]]:
    """Return the methods of some stages that `--method` options name, with their values by the names of fields.

    Raises:
        RequestError: There is no such method or key, or a key without a default is missing.
        OptionError: A key does not take the value.
    """
    pairs = dict[Method, list[tuple[str, str]]]()
    for text in texts or ():
        name, _, words = text.partition(":")
        method = method_named(name)
        if method.stage in stages:
            if method.keys is None:
                raise RequestError(f"--method {method.typed} takes what can't be typed, in Python only; leave it out")
            pairs.setdefault(method, []).extend(split_pairs(words))
    return {each: read_keys(f"--method {each.typed}:", each.keys or Choosing, pairs[each]) for each in pairs}


def require_stages(texts: Sequence[str] | None, *stages: Stage) -> None:
    """Raise RequestError where a command does not write texts, or not by itself, and `--method` is for that."""
    for text in without_stages(texts, *stages):
        method = method_named(text.partition(":")[0])
        raise RequestError(f"--method {method.typed} has no effect here: {_WHERE[method.stage]}; leave it out")


def without_stages(texts: Sequence[str] | None, *stages: Stage) -> list[str]:
    """Return the `--method` options that are not of these stages (RequestError where there is no such method)."""
    return [text for text in texts or () if method_named(text.partition(":")[0]).stage not in stages]


def values_of(asked: Mapping[Method, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the values of methods by their names."""
    return {method.name: asked[method] for method in asked}


def lossy_of(values: Mapping[str, dict[str, Any]]) -> Lossy:
    """Return what the methods of loading make of a text, by the values of each."""
    skip = values.get("layer_skip", {})
    sessions = {name: values[name] for name in values if name not in OWN and name != "slide"}
    return Lossy(
        slide="slide" in values,
        layer_skip=skip.get("speedup"),
        layer_skip_force=skip.get("force", False),
        methods=sessions or None,
    )


def text_options(asked: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the options of Engine.stream that the methods of texts are, by the values of each."""
    values = {name: next(iter(asked[name].values()), True) for name in asked}
    short = ("momentum", "ignore_end", "stop_unsure", "json_close")
    options = {name: value for name, value in values.items() if name in short}
    methods = {name: value for name, value in values.items() if name not in short}
    return options | ({"methods": methods} if methods else {})
