"""Where the tests marked `model` find real model files."""

import os
from pathlib import Path

import pytest

from edgedec.gguf.places import standing
from edgedec_runtimes.tile_files.keeping import make_whole


def models_dir() -> Path:
    """Return $EDGEDEC_MODELS, else ~/.cache/edgedec/models."""
    return Path(os.environ.get("EDGEDEC_MODELS") or Path.home() / ".cache" / "edgedec" / "models")


def real_model(name: str) -> Path:
    """Return the path of a real model such as "smollm2-135m.gguf", or skip the test where it is absent.

    Tests read the file with other programs, too, so one that is kept as tiles is made whole first.
    """
    path = models_dir() / name
    if not standing(path).is_file():
        pytest.skip(f"no {name} in {models_dir()} (set EDGEDEC_MODELS to the directory that has it)")
    make_whole(path)
    return path
