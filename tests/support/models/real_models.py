"""Where the tests marked `model` find real model files."""

import os
from functools import cache
from pathlib import Path

import pytest

from edgedec.errors import EdgedecError
from edgedec.gguf.places import standing
from edgedec.load_options import ResolveOptions
from edgedec_models.resolve import pull
from edgedec_runtimes.tile_files.keeping import make_whole

FETCHED = "smollm2-135m"
"""The real model that the tests fetch where it is absent: 98 MB."""


def models_dir() -> Path:
    """Return $EDGEDEC_MODELS, else ~/.cache/edgedec/models."""
    return Path(os.environ.get("EDGEDEC_MODELS") or Path.home() / ".cache" / "edgedec" / "models")


def real_model(name: str) -> Path:
    """Return the path of a real model such as "smollm2-135m.gguf", or skip the test where it is absent.

    The smallest is fetched where it is absent, and the tests are skipped where that fails, as without a network. Tests
    read the file with other programs, too, so one that is kept as tiles is made whole first.
    """
    path = models_dir() / name
    why = _fetched(path) if name == f"{FETCHED}.gguf" else "set EDGEDEC_MODELS to the directory that has it"
    if not standing(path).is_file():
        pytest.skip(f"no {name} in {models_dir()}: {why}")
    make_whole(path)
    return path


@cache
def _fetched(path: Path) -> str:
    """Fetch the smallest real model unless it is there, and return why it is not; empty where it is."""
    if standing(path).is_file():
        return ""
    if os.environ.get("EDGEDEC_MODELS"):
        return "EDGEDEC_MODELS names another directory"
    try:
        pull(FETCHED, ResolveOptions(cache_dir=path.parent.parent), with_head=False)
    except EdgedecError as error:
        return f"it can't be fetched: {error}"
    return ""
