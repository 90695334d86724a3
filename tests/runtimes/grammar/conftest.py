"""Fixtures: a tiny model whose tokens are bytes, and grammars for its vocabulary."""

from support.models.byte_models import byte_model as byte_model
from support.models.byte_models import byte_path as byte_path
from support.models.byte_models import grammars as grammars
