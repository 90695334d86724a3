"""The keywords of edgedec.load are the fields of EngineOptions."""

import inspect
from dataclasses import fields
from pathlib import Path

import pytest
from support.tiny_models import tiny_llama

import edgedec
from edgedec.api.options import EngineOptions
from edgedec.errors import RequestError


def test_the_keywords_of_load_are_the_fields() -> None:
    """Names, defaults and types, in their order, after the model; so help() and editors show them."""
    model, *keywords = inspect.signature(edgedec.load).parameters.values()
    assert model.name == "model"
    assert all(keyword.kind is inspect.Parameter.KEYWORD_ONLY for keyword in keywords)
    assert [(keyword.name, keyword.default, keyword.annotation) for keyword in keywords] == [
        (field.name, field.default, field.type) for field in fields(EngineOptions)
    ]


def test_an_unknown_keyword_is_refused(tmp_path: Path) -> None:
    """Before anything is looked for; the model's name may be a keyword."""
    with pytest.raises(TypeError, match="n_contexts"):
        edgedec.load("m.gguf", n_contexts=4)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="draft_numerics is 'exact'; it must be strict or loose"):
        EngineOptions(draft_numerics="exact")  # type: ignore[arg-type]
    edgedec.load(model=tiny_llama(tmp_path / "tiny.gguf"), runtime="cpu").close()
