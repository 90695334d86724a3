"""The options of edgedec.load, and what an application gets wrong by type: told, not guessed at."""

import asyncio
import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from support.models.gguf_writer import Typed
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.api.best_text import BestOf, best
from edgedec.api.branching import branches, partial_texts
from edgedec.api.options import DraftOptions, EngineOptions, Lossy
from edgedec.api.requests import RequestOptions
from edgedec.choosing.search_by import SearchBy
from edgedec.errors import EdgedecError, RequestError
from edgedec.gguf.file import ValueType
from edgedec.grammar import Grammar
from edgedec.load_options import LoadOptions
from edgedec.sampling import SamplingParams
from edgedec_apps.bench.recorder import record_text
from edgedec_apps.embedding import embed
from edgedec_apps.extraction import extract
from edgedec_apps.infill import infill_ids
from edgedec_apps.prompt_cache import load_prompt_cache, save_prompt_cache
from edgedec_apps.ranking import rank
from edgedec_apps.refine import RefineBy, refined


@pytest.fixture(scope="module")
def engine(tiny_path: Path) -> Iterator[edgedec.Engine]:
    """The tiny model, for two requests at a time."""
    with edgedec.load(tiny_path, runtime="cpu", n_ctx=256, n_parallel=2) as engine:
        yield engine


@pytest.mark.parametrize("prompt", [b"hi", bytearray(b"hi"), None, 5, ["a"], [1.5], {"a": 1}], ids=repr)
def test_a_prompt_is_text_or_token_ids(engine: edgedec.Engine, prompt: Any) -> None:
    """Bytes would be taken for token ids and 1.5 for 1: both are refused, as is what holds no ids at all."""
    with pytest.raises(RequestError, match=r"prompt is .*; it must be (a text or )?a sequence"):
        engine.generate(prompt, max_tokens=1)
    assert len(engine.generate("hi", max_tokens=1, ignore_end=True).token_ids) == 1


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"n_ctx": 0}, "n_ctx is 0; "),
        ({"n_ctx": "64"}, "n_ctx is '64'"),
        ({"n_ctx": 64.5}, "n_ctx is 64.5"),
        ({"n_threads": True}, "n_threads is True"),
        ({"n_parallel": 1.5}, "n_parallel is 1.5"),
        ({"n_gpu_layers": "all"}, "n_gpu_layers is 'all'"),
        ({"memory": -5}, "'-5' is no size"),
        ({"memory": 0}, "'0' is no size"),
        ({"memory": "9" * 400}, "below 2\\^63"),
        ({"n_draft_max": 0}, "n_draft_max is 0"),
        ({"n_draft_max": 10**6}, "n_draft_max is 1000000"),
        ({"runtime_options": {1: 2}}, "the cpu runtime has no option 1; its own are"),
    ],
    ids=str,
)
def test_options_of_loading_have_types_and_bounds(tmp_path: Path, options: dict[str, Any], found: str) -> None:
    """Each refusal names the option and the value."""
    with pytest.raises(RequestError, match=found):
        edgedec.load(tiny_llama(tmp_path / "tiny.gguf"), runtime="cpu", **options).close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"grammar": "x"}, "grammar is 'x'; it must be a Grammar: make one by Grammar.regex"),
        ({"json_schema": ["a"]}, "json_schema is \\['a'\\]; it must be a mapping, a text or None"),
        ({"json_schema": "[]"}, "the JSON schema is a list; it must be an object"),
        ({"json_close": 1, "json_schema": {}}, "json_close is 1; it must be True or False"),
        ({"reuse": "all"}, "reuse is 'all'; it must be exact or longest"),
        ({"draft": "off"}, "draft is 'off'; it must be True or False"),
        ({"verify": ["coupled"]}, "verify is \\['coupled'\\]; it must be a text"),
        ({"verify": "coupling"}, "verify is 'coupling'; it must be one of coupled"),
        ({"cancel": "x"}, "cancel is 'x'; it must be an edgedec.CancelToken or None"),
        ({"max_new_tokens": 4}, r"generate\(\) has no argument 'max_new_tokens'; did you mean max_tokens\?$"),
        ({"num_predict": 4}, r"has no argument 'num_predict'; did you mean max_tokens\?$"),
        ({"temp": 0.5}, r"has no argument 'temp'; did you mean temperature\?$"),
        ({"stream": True}, r"generate\(\) has no argument 'stream'; it has prompt, cancel, temperature, .*grammar"),
        ({"options": {}}, r"generate\(\) has no argument 'options'; it has"),
    ],
    ids=str,
)
def test_options_of_a_request_have_types(engine: edgedec.Engine, options: dict[str, Any], found: str) -> None:
    """Each refusal says what was found and what was expected; nothing is taken for something else."""
    with pytest.raises(RequestError, match=found):
        engine.generate("hi", max_tokens=1, **options)


@pytest.mark.parametrize(
    "make", [Grammar.regex, Grammar.lark, Grammar.gbnf, lambda source: Grammar("json_schema", source)]
)
@pytest.mark.parametrize("source", [None, 5, b"a", ["a"]])
def test_a_grammar_is_made_of_text(make: Any, source: Any) -> None:
    """Its source is a str, and its kind one of four."""
    with pytest.raises(RequestError, match=f"is a {type(source).__name__}; it must be a str"):
        make(source)
    with pytest.raises(RequestError, match="kind is 'ebnf'; it must be one of json_schema, regex, lark, gbnf"):
        Grammar("ebnf", "root ::= x")  # type: ignore[arg-type]


RUBBISH: dict[str, Any] = {"None": None, "list": [], "dict": {}, "text": "rubbish", "bytes": b"x", "bool": True}
RUBBISH |= {"float": 1.5, "nan": math.nan, "object": object(), "-1": -1, "0": 0, "huge": 10**30, "texts": ["x"]}
RUBBISH |= {"Nones": [None], "mapping": {"a": 1}, "numpy": np.int64(2), "float32": np.float32(0.5)}
NUMBER = "float float32 numpy"
_NAMES_BY_KINDS = {  # the names of arguments by what of the rubbish is none to them; where None is the default, it, too
    "None": "futures",
    "bool": "as_said continued draft grammars ignore_end layer_skip_force offline overlap slide tiles_only",
    "text": "after answer before cache_dir chat_template device kv_type messages path pattern query question "
    "separator source store text",
    "bool 0": "think",
    "numpy": "dimensions image_max_tokens max_document_tokens max_rows most n n_ctx n_draft_max n_parallel n_texts "
    "n_threads planning_bytes prompt_cache_bytes resident_bytes tokens",
    "numpy 0": "logprobs n_reserved seed",
    "numpy huge": "max_tokens",
    "numpy 0 huge": "top_k",
    "numpy -1 0 huge": "n_gpu_layers n_prompt penalty_last_n rows_each",
    NUMBER: "check_seconds gpu_memory memory prompt_cache repetition_penalty scorer_seconds seconds",
    f"{NUMBER} 0 huge": "temperature",
    f"{NUMBER} -1 0": "frequency_penalty presence_penalty",
    "float numpy": "layer_skip",
    "float32": "stop_unsure top_p",
    "float32 0": "min_p momentum",
    "list": "adapters files layer_split lora resume tools",
    "list text": "prediction prompt",
    "list texts": "machines stop",
    "list texts numpy": "texts",
    "texts": "check documents scorer",
    "text texts": "passage",
    "dict": "logit_bias methods runtime_options",
    "dict mapping": "json_schema schema variables",
    "dict mapping list texts Nones": "pictures",  # picture_rows() made them
}
TAKES = {name: kinds.split() for kinds, names in _NAMES_BY_KINDS.items() for name in names.split()}
LATER = {"requests.mark_pictures": "list"}
# What an error may say in place of an argument's name.
SAY: dict[str, tuple[str, ...]] = {"check": ("scorer is",), "check_seconds": ("scorer_seconds is",)}
SAY |= {"max_document_tokens": ("no room for a document",), "methods": ("no text method", "no session is called")}
SAY |= {"n_reserved": ("the context has room",), "name": ("search is",), "model": ("no model",)}
SAY |= {"path": ("prompt cache",), "pattern": ("the regex",), "runtime_options": ("no option",)}
SAY |= {"source": ("the lark", "the gbnf")} | dict.fromkeys(("json_schema", "schema"), ("JSON schema",))
CHAT = [{"role": "user", "content": "Hi"}]
ASKS: dict[str, Any] = {"messages": CHAT, "max_tokens": 2}
GOES_ON: dict[str, Any] = {"prompt": "Hi", "max_tokens": 2}
GOOD: dict[str, dict[str, Any]] = {  # arguments with which each method works, or says why it can't
    **dict.fromkeys(("chat", "chat_stream", "achat", "achat_stream"), ASKS),
    **dict.fromkeys(("generate", "stream", "agenerate", "astream"), GOES_ON),
    **{name: GOES_ON | {"n": 2} for name in ("samples", "samples_stream", "asamples", "asamples_stream")},
    "chat_ids": {"messages": CHAT},
    "prompt_ids": {"prompt": "Hi"},
    "session": {},
    "fit_messages": {"messages": CHAT, "n_reserved": 2},
    **{f"requests.{name}": {"messages": CHAT} for name in ("render", "mark_pictures")},
    **{f"requests.{name}": {"text": "Hi"} for name in ("cut_ids", "rendered_ids")},
    "requests.sampling": {},
    "requests.picture_rows": {"pictures": ()},
}
OF_ENGINES: list[tuple[Callable[..., Any], dict[str, Any]]] = [  # good arguments beside an engine
    (best, GOES_ON),
    (partial_texts, GOES_ON),
    (branches, {"prompt": "Hi"}),
    (extract, {"question": "a", "passage": "ab"}),
    (infill_ids, {"before": "a", "after": "b"}),
    (embed, {"texts": ["a"], "pooling": "mean"}),
    (rank, {"query": "q", "documents": ["a"]}),
    (record_text, {"prompt": "Hi", "log": None}),
    (save_prompt_cache, {"path": "none/there"}),
    (load_prompt_cache, {"path": "none/there"}),
]


def use_up(result: Any) -> None:
    """Run what a function returned to its end, where it is a coroutine, a stream, a block or a model."""

    async def all_of() -> None:
        if inspect.isawaitable(result):
            await result
        else:
            async for _ in result:
                pass

    if inspect.isawaitable(result) or hasattr(result, "__aiter__"):
        asyncio.run(all_of())
    elif hasattr(result, "__next__"):
        list(result)
    elif hasattr(result, "__exit__"):
        with result:
            pass


def answer(call: Callable[[], Any]) -> str:
    """Return the message of the EdgedecError that a call ends with, empty for none, and what else it raised."""
    try:
        use_up(call())
    except EdgedecError as error:
        return str(error)
    except Exception as error:
        return f"raised {error!r}"
    return ""


def faults(
    function: Callable[..., Any],
    good: dict[str, Any],
    *,
    options: bool = False,
    later: str = "",
    tries_right: bool = True,
) -> list[str]:
    """Throw all rubbish at each argument of a function, and return what was wrong with its answers.

    Args:
        function: The function.
        good: Arguments with which it works, or says why it can't.
        options: Whether the options of requests are among its arguments.
        later: Rubbish that something else refuses, when the value is used.
        tries_right: Whether values that an argument takes are tried, too.
    """
    found, usual = [], answer(partial(function, **good)) if tries_right else ""
    parameters = inspect.signature(function).parameters.values()
    optional = {each.name: each.default is None for each in parameters if each.kind is not each.VAR_KEYWORD}
    if options:
        optional |= {name: type(None) in get_args(hint) for name, hint in RequestOptions.__annotations__.items()}
    for name, takes_none in optional.items():
        takes = [*TAKES.get(name, []), *later.split(), *["None"] * takes_none]
        for kind, rubbish in RUBBISH.items():
            if kind in takes and not tries_right:
                continue
            said = answer(partial(function, **{**good, name: rubbish}))
            names_it = any(word in said for word in (name, *SAY.get(name, ())))
            if said.startswith("raised") or (kind not in takes and said != usual and not names_it):
                found.append(f"{name}={kind}: {said[:150] or 'it is taken'}")
            elif kind not in takes and not said:
                found.append(f"{name}={kind} is taken")
    return found


METHODS = [name for name, _ in inspect.getmembers(edgedec.Engine, inspect.isfunction) if not name.startswith("_")]
MAKERS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (edgedec.DraftOptions, {}),
    (edgedec.Lossy, {}),
    (LoadOptions, {}),
    (SamplingParams, {}),
    (BestOf, {}),
    (SearchBy, {}),
    (RefineBy, {"check": lambda prefix, text: (1.0, "")}),
    (Grammar.json_schema, {"schema": {}}),
    (Grammar.regex, {"pattern": "a"}),
    (Grammar.lark, {"source": "a"}),
    (Grammar.gbnf, {"source": "a"}),
]


def test_no_method_is_left_out() -> None:
    """Each public method of an engine is in the table of good arguments, or has none."""
    without = [name for name in METHODS if len(inspect.signature(getattr(edgedec.Engine, name)).parameters) == 1]
    assert sorted([*(name for name in GOOD if "." not in name), *without]) == METHODS


@pytest.mark.slow
@pytest.mark.parametrize("name", GOOD)
def test_each_argument_of_a_method_refuses_rubbish(
    engine: edgedec.Engine, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an EdgedecError that names the argument; numbers of numpy are numbers."""
    monkeypatch.chdir(tmp_path)  # where a prompt cache is written
    assert not faults(attrgetter(name)(engine), GOOD[name], options=name == "stream", later=LATER.get(name, ""))


@pytest.mark.slow
@pytest.mark.parametrize(("function", "good"), OF_ENGINES, ids=lambda each: getattr(each, "__qualname__", ""))
def test_each_argument_beside_an_engine_refuses_rubbish(
    engine: edgedec.Engine,
    function: Callable[..., Any],
    good: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of an engine's methods; so does the engine itself."""
    monkeypatch.chdir(tmp_path)  # where a prompt cache is written
    assert not faults(partial(function, engine), good)
    with pytest.raises(RequestError, match=r"engine is 5; it must be an edgedec\.Engine"):
        function(5, **good)


@pytest.mark.slow
def test_each_argument_of_load_refuses_rubbish(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is loaded."""
    monkeypatch.chdir(tmp_path)
    good: dict[str, Any] = {"model": tiny_path, "runtime": "cpu", "offline": True}
    assert not faults(edgedec.load, good, later="None", tries_right=False)
    for name in ("model", "runtime", "n_draft_max", "lossy", "lora", "offline"):
        assert f"{name} is missing; it must be" in answer(partial(edgedec.load, **good | {name: None}))


@pytest.mark.parametrize(("make", "good"), MAKERS, ids=lambda each: getattr(each, "__qualname__", ""))
def test_each_option_refuses_rubbish(make: Callable[..., Any], good: dict[str, Any]) -> None:
    """The values that options are made of check theirs."""
    assert not faults(make, good, later="-1 0 huge float32 mapping")


@pytest.mark.slow
def test_a_text_is_one_message_of_the_user(engine: edgedec.Engine, tiny_path: Path) -> None:
    """Wherever messages are taken, a text has the prompt and the answer of the chat with that one message."""
    for take in (engine.chat_ids, engine.requests.render, partial(engine.fit_messages, n_reserved=8)):
        assert take("Hi") == take(CHAT)
    said: dict[str, Any] = {"temperature": 0, "max_tokens": 4}
    expected = engine.chat(CHAT, **said).text
    assert engine.chat("Hi", **said).text == expected
    assert "".join(token.text for token in engine.chat_stream("Hi", **said)) == expected
    assert asyncio.run(engine.achat("Hi", **said)).text == expected
    found = refined(engine, "Hi", RefineBy(check=lambda prefix, text: (float(prefix == "Hi"), "")), **said)
    assert (found.texts[0].text, found.passed) == (expected, True)


PAGE = Path(__file__).parents[2] / "docs" / "embedding.md"


def test_the_keywords_of_load_are_the_fields() -> None:
    """Names, defaults and types, in their order, after the model; so help() and editors show them."""
    model, *keywords = inspect.signature(edgedec.load).parameters.values()
    assert model.name == "model"
    assert len(keywords) <= 27  # with the model's name, 28
    assert all(keyword.kind is inspect.Parameter.KEYWORD_ONLY for keyword in keywords)
    assert [(keyword.name, keyword.default, keyword.annotation) for keyword in keywords] == [
        (field.name, field.default, field.type) for field in fields(EngineOptions)
    ]


def test_load_passes_each_keyword_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the field of its name, whatever it holds."""
    passed = list[Any]()
    monkeypatch.setattr("edgedec.api.load.EngineOptions", lambda **options: options)
    monkeypatch.setattr("edgedec.api.load.open_engine", lambda model, options: passed.extend([model, options]))
    names = [field.name for field in fields(EngineOptions)]
    inspect.unwrap(edgedec.load)("m.gguf", **{name: name for name in names})
    assert passed == ["m.gguf", {name: name for name in names}]


def rows(section: str) -> list[tuple[str, str]]:
    """Return the first two cells, without backticks, of the rows of options below a heading of docs/embedding.md."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \| `([^`]+)`", text, re.MULTILINE)


@pytest.mark.skipif(not PAGE.exists(), reason="the documents are not beside the tests")
def test_the_guide_lists_every_option() -> None:
    """docs/embedding.md has every keyword of load and of a request, with its default."""
    shown = [(name, default) for name, default in rows("Options of edgedec.load") if not default.startswith("--")]
    groups = (EngineOptions, Lossy, DraftOptions)
    assert shown == [(field.name, repr(field.default)) for group in groups for field in fields(group)]
    of_requests = rows("Options of one request")
    sampling = SamplingParams()
    n_sampling = len(SamplingParams.names())
    assert of_requests[:n_sampling] == [(name, repr(getattr(sampling, name))) for name in SamplingParams.names()]
    assert [name for name, _ in of_requests[n_sampling:]] == list(RequestOptions.__annotations__)[n_sampling:]


@pytest.mark.slow
def test_an_unknown_keyword_is_refused(tmp_path: Path) -> None:
    """Before anything is looked for; the model's name may be a keyword."""
    for name, hint in (
        ("context", r"did you mean n_ctx\?$"),
        ("gpu_layers", "did you mean n_gpu_layers or"),
        ("verbose", "it has model, runtime, n_ctx, "),
    ):
        with pytest.raises(RequestError, match=rf"load\(\) has no argument '{name}'; {hint}"):
            edgedec.load("m.gguf", **{name: 4})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="numerics is 'exact'; it must be strict, padded or loose"):
        EngineOptions(drafting=DraftOptions(numerics="exact"))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="the method slide is asked for by slide"):
        Lossy(methods={"slide": {}})
    edgedec.load(model=tiny_llama(tmp_path / "tiny.gguf"), runtime="cpu").close()


@pytest.mark.slow
def test_what_a_model_suppresses_is_never_written_unless_asked_for(tmp_path: Path) -> None:
    """A suppressed token is left out, beside a caller's bias too; a bias for that token replaces the rule."""
    with edgedec.load(tiny_llama(tmp_path / "plain.gguf"), runtime="cpu", n_threads=1) as engine:
        first = engine.generate("ab", temperature=0, max_tokens=1).token_ids[0]
    more = {"tokenizer.ggml.suppress_tokens": Typed(ValueType.ARRAY, [first], ValueType.INT32)}
    suppressing = tiny_llama(tmp_path / "suppressing.gguf", more=more)
    with edgedec.load(suppressing, runtime="cpu", n_threads=1) as engine:

        def written(**options: Any) -> int:
            return engine.generate("ab", temperature=0, max_tokens=1, **options).token_ids[0]

        other = written()
        assert other != first
        assert written(logit_bias={other: -np.inf}) not in (first, other)
        assert written(logit_bias={first: 0.0}) == first
