"""edgedec rm: delete a model from the cache."""

from typing import Annotated

from edgedec.memory_plan import format_bytes
from edgedec_apps.cli import completion
from edgedec_apps.cli.declared import argument
from edgedec_apps.cli.shown.terminal import say


def command(
    model: Annotated[str, argument("MODEL", "A name that edgedec list shows.", complete=completion.stored_model)],
) -> None:
    """Delete a model and its tiles from the cache, or a preset; files elsewhere are never deleted."""
    from edgedec_models.cache import remove

    freed = remove(model)
    tiles = f", {format_bytes(freed.n_tile_bytes)} of them tiles" if freed.n_tile_bytes else ""
    say(f"{model}: {format_bytes(freed.n_bytes)} freed{tiles}")
