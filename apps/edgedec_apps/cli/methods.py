"""`--method NAME[:KEY=VALUE,...]`: the methods that there are, their keys, and what a command line asks of them."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from importlib import import_module
from typing import Any, Literal

from edgedec.api.options import Lossy
from edgedec.callers import did_you_mean
from edgedec.choosing.choice import chooser_named
from edgedec.choosing.command_scorer import SCORER_S
from edgedec.choosing.search_by import Search
from edgedec.errors import PluginError, RequestError
from edgedec.method_keys import Key, keys_of, read_keys, split_pairs
from edgedec.plugins import CHOOSERS, SEARCHES, SESSIONS, TEXT_METHODS, Plugin, plugins

Stage = Literal["load", "text", "prompt"]
"""When a method is asked for: as a model is loaded, with a text, or for all that is written to a prompt."""
_SCORER = (
    Key("scorer", str, "a program and its arguments, which no shell reads: it gets texts as JSON and prints scores"),
    Key("scorer_seconds", float, "most seconds of a call of the scorer", SCORER_S),
)
_ANSWER = Key("answer", str, 'what an answer is, for votes, as a regular expression (default: what follows "Answer:")')
_FIELD = re.compile(r"(?m)^(For|Measured): (.+(?:\n {4}.+)*)$")


@dataclass(frozen=True, slots=True)
class Method:
    """A method that `--method` names.

    Attributes:
        name: Its name in Python; a person types dashes or underscores.
        kind: The plug-in's group; "" for a method that is no plug-in.
        stage: When it is asked for.
        keys: Its keys; a value without a key is the first one's. None where what it takes can't be typed.
        what: What it does, in a sentence.
        gain: Whom it is for.
        cost: What was measured.
    """

    name: str
    kind: str
    stage: Stage
    keys: tuple[Key, ...] | None
    what: str
    gain: str
    cost: str

    @property
    def typed(self) -> str:
        """The name as it is typed."""
        return self.name.replace("_", "-")


_OWN = (
    Method(
        "layer_skip",
        "",
        "load",
        (
            Key("speedup", float, "layers are left out until a token reads 1/X of the bytes of weights", MISSING),
            Key("force", bool, "allow more than was measured for the model", False),
        ),
        "LOSSY. Layer skip (arXiv:2404.06954): layers are left out in every forward.",
        "speed that is worth another text",
        "docs/faster.md; edgedec eval measures the perplexity of each speed-up",
    ),
    Method(
        "momentum",
        "",
        "text",
        (Key("x", float, "X times n is taken from the probability of a token that repeats n tokens", MISSING),),
        "Momentum Decoding (arXiv:2212.02175): what repeats the text becomes less probable.",
        "greedy texts that go in circles",
        "of 20 greedy answers of smollm2-135m 9 looped without it, none with 0.1",
    ),
    Method(
        "ignore_end",
        "",
        "text",
        (),
        "A text goes on past the model's end tokens.",
        "measuring texts of one length",
        "",
    ),
    Method(
        "passages",
        "",
        "prompt",
        (
            Key("n", int, "most passages that are read (default: a quarter of the context)"),
            Key("model", str, "an embedding model, by whose vectors passages are searched, not by words"),
        ),
        "Of a file that is longer than the context, the passages are read that match the question best.",
        "long files; it is on by itself, and the keys change it",
        "",
    ),
    Method(
        "pictures",
        "",
        "load",
        (
            Key("projector", str, "the file with which the model reads pictures (mmproj), or off", "auto"),
            Key("max_tokens", int, "most tokens of a picture: fewer are faster, and show less"),
        ),
        "How a model reads pictures; it is on by itself where a projector lies beside the model.",
        "models that can choose how many tokens a picture takes",
        "",
    ),
    Method(
        "refine",
        "",
        "prompt",
        (
            Key("check", str, "a program and its arguments: gets a text as JSON, prints its score, says what is wrong"),
            Key("n", int, "texts that are written together after the first one", 4),
            Key("check_seconds", float, "most seconds of a check", SCORER_S),
            Key("seconds", float, "no work goes on after so many"),
            Key("tokens", int, "no texts are begun once so many tokens are written"),
        ),
        "A text is written, checked, and written again where it did not pass; --texts is the most in all.",
        "what a program can check, such as code with tests",
        "half the tokens of the best of 8 by the same check; it solved no more (docs/better-answers.md)",
    ),
)
OWN: Mapping[str, Method] = {method.name: method for method in _OWN}
_GROUPS: Mapping[str, Stage] = {SESSIONS: "load", TEXT_METHODS: "text", CHOOSERS: "prompt", SEARCHES: "prompt"}
_WHERE = {"text": "edgedec run and chat have it", "prompt": "edgedec run has it"}


def names() -> list[str]:
    """Return the names of all methods, as they are typed."""
    listed = [name for group in _GROUPS for name in plugins(group)]
    return sorted({name.replace("_", "-") for name in (*listed, *OWN)})


def method_named(name: str) -> Method:
    """Return the method that a person names.

    Raises:
        RequestError: There is none of this name; the message lists all.
        PluginError: It does not import, or is something else than its group says.
    """
    plain = name.strip().replace("-", "_")
    if plain in OWN:
        return OWN[plain]
    for group in _GROUPS:
        for plugin in plugins(group).values():
            if plugin.name.replace("-", "_") == plain:
                return _of_plugin(plugin)
    hint = did_you_mean(name, names()) or f"; there are {', '.join(names())}"
    raise RequestError(f"--method {name!r:.60} is no method{hint} (edgedec methods says what each does)")


def all_methods() -> Iterator[Method]:
    """Yield all methods; those that don't import are left out, as edgedec doctor says what is wrong with them."""
    for name in names():
        try:
            yield method_named(name)
        except PluginError:
            continue


_TOLD = {
    "vote": (
        "Self-consistency (arXiv:2203.11171): the text with the answer that most texts state.",
        "questions with one short answer",
        "with 8 texts 82 % of 50 word problems right for 88 plain steps",
    ),
    "likely": (
        "The text with the highest mean log-probability.",
        "several texts without a checker",
        "with 4 texts 86 % of 50 word problems right for 60 plain steps",
    ),
    "score": (
        "The text with the highest score of the caller's scorer.",
        "what a program can judge, such as code with tests",
        "with 8 texts 48 % of 50 functions right for 67 plain steps; greedy decoding has 24 % for 34",
    ),
}
"""What the core's own choosers do, whom they are for, and what was measured."""


def about(module: str) -> tuple[str, str, str]:
    """Return what a guest's docstring says: what it does, whom it is for, and what was measured, a line each."""
    doc = inspect.cleandoc(import_module(module).__doc__ or "")
    fields = {name: re.sub(r"\s+", " ", text).replace("`", "") for name, text in _FIELD.findall(doc)}
    return doc.partition("\n\n")[0].replace("\n", " "), fields.get("For", ""), fields.get("Measured", "")


def _of_plugin(plugin: Plugin) -> Method:
    target = plugin.load()
    keys: tuple[Key, ...] | None
    if plugin.group == SESSIONS:
        keys = keys_of(target)
    elif plugin.group == TEXT_METHODS:
        keys = None if target.key is None else (target.key,)
    elif plugin.group == CHOOSERS:
        chooser = chooser_named(plugin.name)
        keys = (*(_SCORER if chooser.takes_scorer else ()), *((_ANSWER,) if chooser.votes else ()))
    else:
        keys = _search_keys(plugin, target)
    own = _TOLD.get(plugin.name) if plugin.group == CHOOSERS else None
    told = own or about(plugin.target.partition(":")[0])
    return Method(plugin.name, plugin.group, _GROUPS[plugin.group], keys, *told)


def _search_keys(plugin: Plugin, search: object) -> tuple[Key, ...]:
    if not isinstance(search, Search):
        raise PluginError(f"the plug-in {plugin.name!r} of {plugin.group} must be a Search (edgedec doctor --all)")
    size = Key("n", int, f"its size, 1 to {search.most}", search.n)
    return (size, _ANSWER) if search.scored == "no" else (size, *_SCORER, _ANSWER)


@dataclass(frozen=True, slots=True)
class AskedMethod:
    """A method that a command line names, with the values that it gives, by the names of keys in Python."""

    method: Method
    values: dict[str, Any]


def asked_methods(given: Sequence[str] | None, *stages: Stage) -> list[AskedMethod]:
    """Return the methods of some stages that `--method` options name, each once, with its values.

    Raises:
        RequestError: There is no such method or key, or a key that must be given is missing.
        OptionError: A key does not take the value.
    """
    pairs = dict[str, list[tuple[str, str]]]()
    methods = dict[str, Method]()
    for text in given or ():
        name, _, words = text.partition(":")
        method = method_named(name)
        if method.stage in stages:
            methods[method.name] = method
            pairs.setdefault(method.name, []).extend(split_pairs(words))
    return [AskedMethod(method, _values(method, pairs[name])) for name, method in methods.items()]


def _values(method: Method, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    if method.keys is None:
        raise RequestError(f"--method {method.typed} takes what can't be typed; it is for Python (docs/methods.md)")
    return read_keys(f"--method {method.typed}", method.keys, pairs)


def require_stages(given: Sequence[str] | None, *stages: Stage) -> None:
    """Raise RequestError where a command does not write texts, or not by itself, and `--method` is for that."""
    for text in given or ():
        method = method_named(text.partition(":")[0])
        if method.stage not in stages:
            raise RequestError(f"--method {method.typed} has no effect here: {_WHERE[method.stage]}; leave it out")


def without_stages(given: Sequence[str] | None, *stages: Stage) -> list[str]:
    """Return the `--method` options that are not of these stages (RequestError where there is no such method)."""
    return [text for text in given or () if method_named(text.partition(":")[0]).stage not in stages]


def lossy_of(asked: Sequence[AskedMethod]) -> Lossy:
    """Return what the methods of loading make of a text."""
    values = {each.method.name: each.values for each in asked}
    skip = values.get("layer_skip", {})
    sessions = {name: values[name] for name in values if name not in OWN and name != "slide"}
    return Lossy(
        slide="slide" in values,
        layer_skip=skip.get("speedup"),
        layer_skip_force=skip.get("force", False),
        methods=sessions or None,
    )


def text_options(asked: Sequence[AskedMethod]) -> dict[str, Any]:
    """Return the options of Engine.stream that the methods of texts are."""
    options, methods = dict[str, Any](), dict[str, object]()
    for each in asked:
        name, values = each.method.name, each.values
        if name == "momentum":
            options["momentum"] = values["x"]
        elif name == "ignore_end":
            options["ignore_end"] = True
        elif name == "stop_unsure":
            options["stop_unsure"] = values["chance"]
        elif name == "json_close":
            options["json_close"] = values.get("on", True)
        else:
            methods[name] = next(iter(values.values()), True)
    return options | ({"methods": methods} if methods else {})
