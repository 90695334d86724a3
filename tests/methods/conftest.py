"""Fixtures: contexts without a model, candidates from lists, and random generations that any drafter must survive."""

from support.byte_models import byte_model as byte_model
from support.byte_models import byte_path as byte_path
from support.byte_models import grammars as grammars
from support.drafter_fixtures import budget_holds as budget_holds
from support.drafter_fixtures import candidates as candidates
from support.drafter_fixtures import generate as generate
from support.drafter_fixtures import make_context as make_context
