"""Tiles of a tiny model for tests: each tensor's bytes in reverse, and three bytes more."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgedec.gguf.file import read_gguf
from edgedec.progress import Progress
from edgedec_runtimes.cpu.tiles.cache import Job, TileTensor, open_tiles
from edgedec_runtimes.cpu.tiles.file import U8, Tiles

LAYOUT = "16x1-v1"


@dataclass
class Maker:
    """Opens the tiles of the model at `path` with the cache below `root`, and notes what that did."""

    path: Path
    root: Path
    filled: list[str] = field(default_factory=list)
    reports: list[Progress] = field(default_factory=list)
    on_fill: Callable[[str], None] = lambda name: None

    def tensors(self) -> list[TileTensor]:
        """Return what the model's tiles take."""
        return [TileTensor(name, info.n_bytes + 3) for name, info in read_gguf(self.path).tensors.items()]

    def expected(self) -> dict[str, bytes]:
        """Return what the tiles must be."""
        gguf = read_gguf(self.path)
        return {name: gguf.read_tensor_bytes(name)[::-1] + bytes(3) for name in gguf.tensors}

    def job(self, **options: Any) -> Job:
        """Return the job of the model's tiles, with these options in place of the maker's own."""
        gguf = read_gguf(self.path)

        def fill(name: str, out: U8, start: int) -> None:
            self.filled.append(name)
            self.on_fill(name)
            data = np.frombuffer(gguf.read_tensor_bytes(name), np.uint8)
            out[: len(data)] = data[::-1]

        chosen: dict[str, Any] = {"tensors": self.tensors(), "layout": LAYOUT, "fill": fill, "cache_dir": self.root}
        return Job(gguf, **(chosen | {"on_progress": self.reports.append} | options))

    def open(self, **options: Any) -> Tiles:
        """Open the tiles; notes the tensors that were filled and the progress."""
        self.filled.clear()
        self.reports.clear()
        return open_tiles(self.job(**options))

    def files(self) -> list[Path]:
        """Return all files below the cache's root."""
        return sorted(path for path in self.root.rglob("*") if path.is_file())

    def tile_file(self) -> Path:
        """Return the only tile file."""
        (path,) = self.root.glob("tiles/*.tiles")
        return path

    def phases(self) -> list[str]:
        """Return the phases of the progress, in their order."""
        return list(dict.fromkeys(report.phase for report in self.reports))


def contents(tiles: Tiles) -> dict[str, bytes]:
    """Return the tiles as bytes."""
    return {name: tiles[name].tobytes() for name in names(tiles)}


def names(tiles: Tiles) -> list[str]:
    """Return the names of the tensors, in the order of the file."""
    return [tensor.name for tensor in tiles.header.tensors]


def until_seen(path: Path, change: Callable[[], object]) -> None:
    """Change a file again and again until its times tell: some file systems' clocks tick every few milliseconds."""
    before = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == before:
        change()
