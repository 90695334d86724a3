"""Deletes a model, or a preset, from this machine."""

from dataclasses import dataclass

from edgedec.storage.cache_files import cache_folder
from edgedec_models.cache import list_models, remove_model
from edgedec_models.presets import remove_preset


@dataclass(frozen=True, slots=True)
class Freed:
    """What was deleted: bytes in all, and the bytes of tiles among them."""

    n_bytes: int
    n_tile_bytes: int = 0


def remove(name: str) -> Freed:
    """Delete a preset, or a model of the cache with its tiles; files elsewhere are never deleted.

    Raises:
        ModelNotFoundError: There is nothing of this name in the cache; the message has similar names.
        PullError: Another process is fetching the model at the moment.
        StorageError: A file can't be deleted.
    """
    from edgedec_runtimes.cpu.tiles.listing import remove_missing, remove_tiles_of

    if remove_preset(name):
        return Freed(0)
    before = {stored.path for stored in list_models() if stored.origin == "cache"}
    n_freed = remove_model(name)
    gone = before - {stored.path for stored in list_models()}
    n_tiles = sum(remove_tiles_of(cache_folder(), path) for path in gone) + remove_missing(cache_folder())
    return Freed(n_freed + n_tiles, n_tiles)
