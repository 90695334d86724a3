"""Finds out what is wrong with a model's tiles when a forward can't use them, by reading all of them."""

from contextlib import suppress

from edgedec.errors import EdgedecError, ModelFormatError, StorageError
from edgedec.gguf.tile_header import REMEDY
from edgedec_runtimes.cpu.library import NOT_FINITE
from edgedec_runtimes.cpu.tiles.cache import Tiles
from edgedec_runtimes.cpu.tiles.file import map_tiles
from edgedec_runtimes.cpu.tiles.listing import delete_tile_file
from edgedec_runtimes.cpu.tiles.streamed_tiles import StreamedTiles


def explain(code: int, reason: str, tiles: Tiles | StreamedTiles) -> EdgedecError:
    """Return the error of a forward that can't read its weights, or whose logits are not finite.

    Damaged tiles are deleted, so that the next load of the model makes them anew.

    Args:
        code: The code of the forward, UNREADABLE or NOT_FINITE.
        reason: The native library's message.
        tiles: The tiles of the model.
    """
    damage = _delete_if_damaged(tiles)
    if code == NOT_FINITE:
        if damage:
            return ModelFormatError(f"{reason}: {damage}")
        return ModelFormatError(
            f"{reason}, and the tiles of {tiles.label} are undamaged: the model's file itself is damaged, or holds no "
            "working model; download it again"
        )
    found = damage or f"the tiles of {tiles.label} are sound now; load the model again"
    return StorageError(f"{reason}: {found}")


def _delete_if_damaged(tiles: Tiles | StreamedTiles) -> str:
    """Read the tile file, delete it where it is damaged, and say what was found and done; "" where it is sound."""
    path = tiles.path
    if path is None:
        return ""
    try:
        with map_tiles(path, tiles.label) as found:
            found.verify()
    except ModelFormatError as error:
        if path.suffix == ".gguf":  # there is no other file of the model
            return f"{str(error).removesuffix(f'; {REMEDY}')}; download the model again with edgedec pull --force"
        with suppress(StorageError):  # then the next load finds it damaged
            delete_tile_file(path)
        return f"{error}. Their file was deleted: load the model again"
    except OSError as error:
        return f"the tiles of {tiles.label} can't be opened any more ({error.strerror or error}); load the model again"
    return ""
