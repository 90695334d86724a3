"""Where a model's file lies: a GGUF, or in its place a file of tiles, which no other program reads.

    models/NAME.gguf            the GGUF
    models/tiles/NAME.tiles     the tiles that took its place

A model keeps the name of its GGUF's path after tiles took the GGUF's place. `standing` returns the file that is there.
"""

import os
from pathlib import Path

TILE_MAGIC = b"edgedec tiles\r\n\0"
"""The first bytes of a tile file."""
_GGUF = ".gguf"


def tiled_place(path: Path) -> Path:
    """Return where the tiles lie that take the place of a model's GGUF."""
    return path.parent / "tiles" / f"{path.stem}.tiles"


def standing(path: Path) -> Path:
    """Return the file that holds the model at a path: its tiles where the GGUF is not there, else the path itself."""
    if path.suffix.lower() != _GGUF or os.path.lexists(path):
        return path
    tiled = tiled_place(path)
    return tiled if os.path.lexists(tiled) else path


def model_place(path: Path) -> Path:
    """Return the path of the model that a file holds: that of its GGUF for tiles that took its place."""
    place = path.parent.with_name(f"{path.stem}{_GGUF}")
    return place if path == tiled_place(place) and standing(place) == path else path
