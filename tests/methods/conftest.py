"""Fixtures: contexts without a model, candidates, random generations that any drafter must survive, and models."""

from collections.abc import Iterator

import pytest
from support.decoding.draft_model_fixtures import draft_model as draft_model
from support.decoding.draft_model_fixtures import folder as folder
from support.decoding.draft_model_fixtures import prompts_are_read_whole as prompts_are_read_whole
from support.decoding.draft_model_fixtures import target as target
from support.decoding.drafter_fixtures import budget_holds as budget_holds
from support.decoding.drafter_fixtures import candidates as candidates
from support.decoding.drafter_fixtures import generate as generate
from support.decoding.drafter_fixtures import make_context as make_context
from support.models.byte_models import byte_model as byte_model
from support.models.byte_models import byte_path as byte_path
from support.models.byte_models import grammars as grammars
from support.models.real_models import real_model

import edgedec


@pytest.fixture(scope="module")
def smollm() -> Iterator[edgedec.Engine]:
    """The 135M on the cpu runtime."""
    with edgedec.load(real_model("smollm2-135m.gguf"), runtime="cpu", n_ctx=256, draft="off", n_threads=2) as engine:
        yield engine
