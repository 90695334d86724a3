"""What an application may get wrong by type is told, not guessed at."""

from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.errors import RequestError
from edgedec.grammar import Grammar


@pytest.mark.parametrize("prompt", [b"hi", bytearray(b"hi"), None, 5, ["a"], [1.5], {"a": 1}], ids=repr)
def test_a_prompt_is_text_or_token_ids(tmp_path: Path, prompt: Any) -> None:
    """Bytes would be taken for token ids and 1.5 for 1: both are refused, as is what holds no ids at all."""
    with edgedec.load(tiny_llama(tmp_path / "tiny.gguf"), runtime="cpu", draft="off") as model:
        with pytest.raises(RequestError, match="a prompt must be a string or a sequence of token ids"):
            model.generate(prompt, max_tokens=1)
        assert len(model.generate("hi", max_tokens=1, ignore_end=True).token_ids) == 1


@pytest.mark.parametrize(
    ("options", "found"),
    [
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
        ({"grammar": "x"}, "grammar is a str; it must be a Grammar: make one by Grammar.regex"),
        ({"grammar": {"type": "object"}}, "grammar is a dict"),
        ({"json_schema": ["a"]}, "the JSON schema is a list; it must be an object"),
        ({"json_schema": b"{}"}, "the JSON schema is a bytes"),
        ({"json_schema": 5}, "the JSON schema is a int"),
        ({"json_close": 1, "json_schema": {}}, "json_close is 1; it must be True or False"),
        ({"reuse": "all"}, "reuse is 'all'; it must be 'exact' or 'longest'"),
        ({"draft": "off"}, "draft is 'off'; of a request it must be True or False"),
        ({"verify": ["coupled"]}, "verify is \\['coupled'\\]; it must be one of coupled"),
        ({"cancel": "x"}, "cancel is a str; it must be an edgedec.CancelToken"),
        ({"regex": "a"}, "unknown option regex; known: .* also .*grammar"),
    ],
    ids=str,
)
def test_options_of_a_request_have_types(tmp_path: Path, options: dict[str, Any], found: str) -> None:
    """Each refusal says what was found and what was expected; nothing is taken for something else."""
    model = edgedec.load(tiny_llama(tmp_path / "tiny.gguf"), runtime="cpu", draft="off")
    with model, pytest.raises(RequestError, match=found):
        model.generate("hi", max_tokens=1, **options)


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
