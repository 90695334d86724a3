"""Fixtures: what drafters without a model are tested with, and tiny models to draft with."""

from support.decoding.draft_model_fixtures import draft_model as draft_model
from support.decoding.draft_model_fixtures import folder as folder
from support.decoding.draft_model_fixtures import prompts_are_read_whole as prompts_are_read_whole
from support.decoding.draft_model_fixtures import target as target
from support.decoding.drafter_fixtures import budget_holds as budget_holds
from support.decoding.drafter_fixtures import candidates as candidates
from support.decoding.drafter_fixtures import generate as generate
from support.decoding.drafter_fixtures import make_context as make_context
