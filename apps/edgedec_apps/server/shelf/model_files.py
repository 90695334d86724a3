"""What the file of a model says while the model is not loaded."""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from edgedec.errors import EdgedecError
from edgedec.gguf.file import read_header_of
from edgedec.gguf.metadata import get_text
from edgedec.gguf.model_info import read_model_info
from edgedec.gguf.model_kinds import embeds_only
from edgedec.gguf.places import standing
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec_apps.server.shelf.models import ModelFile, Recipe
from edgedec_apps.server.shelf.names import Named

_MOST_HEADERS = 256  # that are remembered


def with_files(found: Iterable[Named]) -> list[tuple[Named, ModelFile | None]]:
    """Return models with their files; None for a file that is not on this machine."""
    return [(named, model_file(named.recipe)) for named in found]


def model_file(recipe: Recipe) -> ModelFile | None:
    """Return what the header of a model's file says, or None where the file is not on this machine."""
    try:
        path = resolve(recipe.model, ResolveOptions(offline=True))
        stat = standing(path).stat()
    except (EdgedecError, OSError):
        return None
    file = _read(path, stat.st_mtime_ns, stat.st_size)
    return file if recipe.chat_template is None else replace(file, template=recipe.chat_template)


@lru_cache(_MOST_HEADERS)
def _read(path: Path, mtime_ns: int, n_bytes: int) -> ModelFile:
    """Read a file's header; time and size are those of the file, so that another file is read again."""
    try:
        template = get_text(read_header_of(path), "tokenizer.chat_template")
    except EdgedecError:
        template = None
    return ModelFile(path, read_model_info(path), mtime_ns / 1e9, template, embeds_only(path))
