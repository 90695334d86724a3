"""A model that was fetched and has run on the cpu runtime: a file of tiles stands in the cache for its GGUF."""

from pathlib import Path

import pytest

import edgedec
from edgedec.load_options import ResolveOptions
from edgedec_models.resolve import pull
from edgedec_runtimes.tile_files.record import is_tiled
from support.processes.servers import StubServer


def kept_as_tiles(path: Path, cache: Path) -> Path:
    """Return where the model of a GGUF lies in a cache, as tiles."""
    with pytest.MonkeyPatch.context() as patch, StubServer() as server:
        patch.setenv("NO_PROXY", "*")
        server.add(f"/{path.name}", path.read_bytes())
        fetched = pull(f"{server.root}/{path.name}", ResolveOptions(cache))
    with edgedec.load(fetched, runtime="cpu", n_ctx=64, cache_dir=cache):
        assert is_tiled(fetched)
    return fetched
