"""The keywords of edgedec.load are the fields of EngineOptions."""

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.gguf_writer import Typed
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.api.options import DraftOptions, EngineOptions, Lossy
from edgedec.api.requests import RequestOptions
from edgedec.errors import RequestError
from edgedec.gguf.file import ValueType
from edgedec.sampling import SamplingParams

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
