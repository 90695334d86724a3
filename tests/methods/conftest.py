"""Fixtures: contexts without a model, candidates, random generations that any drafter must survive, and tiny models."""

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
