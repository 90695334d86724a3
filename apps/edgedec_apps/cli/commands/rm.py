"""edgedec rm: delete a model from the cache."""

from typing import Annotated

import typer

from edgedec.memory_plan import format_bytes
from edgedec_apps.cli.terminal import say
from edgedec_models.cache import list_models, remove_model
from edgedec_models.folders import cache_folder


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name that edgedec list shows.")],
) -> None:
    """Delete a model and its tiles from the cache; files elsewhere are never deleted."""
    from edgedec_runtimes.cpu.tiles.listing import remove_missing, remove_tiles_of

    before = {stored.path for stored in list_models() if stored.origin == "cache"}
    n_freed = remove_model(model)
    gone = before - {stored.path for stored in list_models()}
    n_tiles = sum(remove_tiles_of(cache_folder(), path) for path in gone) + remove_missing(cache_folder())
    tiles = f", {format_bytes(n_tiles)} of them tiles" if n_tiles else ""
    say(f"{model}: {format_bytes(n_freed + n_tiles)} freed{tiles}")
