"""How a checkpoint of sentence-transformers makes one vector of a text: modules.json and the file of its pooling."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.model_kinds import Pooling
from edgedec_runtimes.weights.config_values import shown
from edgedec_runtimes.weights.safetensors import read_json, read_json_list

_MODULES = ("Transformer", "Pooling", "Normalize")
_POOLING_FLAGS: Mapping[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_POOLING_NAMES: Mapping[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}


def pooling_of_modules(folder: Path) -> Pooling | None:
    """Return the pooling that the modules of a folder name; None where there are none.

    Raises:
        UnsupportedModelError: There is a module, or a pooling, that a GGUF can't express.
        ModelNotFoundError, ModelFormatError, StorageError: A file is missing, damaged, or can't be read.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return None
    found: Pooling | None = None
    for module in read_json_list(path):
        kind = str(module.get("type") if isinstance(module, dict) else module).rpartition(".")[2]
        if kind not in _MODULES:
            raise UnsupportedModelError(f"{path}: it has a module {shown(kind)}, expected {', '.join(_MODULES)}")
        if kind == "Pooling":
            where = module.get("path")
            if not isinstance(where, str) or not re.fullmatch(r"[\w-]+", where):
                raise ModelFormatError(f"{path}: its module Pooling has the path {shown(where)}, expected a folder")
            found = _pooling_of(folder / where / "config.json")
    return found


def _pooling_of(path: Path) -> Pooling:
    given: dict[str, Any] = read_json(path)
    named = given.get("pooling_mode")
    if isinstance(named, str) and named in _POOLING_NAMES:
        return _POOLING_NAMES[named]
    modes = [key for key, value in given.items() if key.startswith("pooling_mode_") and value is True]
    if named is not None or len(modes) != 1 or modes[0] not in _POOLING_FLAGS:
        what = shown(named) if named is not None else ", ".join(modes) or "none"
        raise UnsupportedModelError(
            f"{path}: its pooling is {what}, expected one of {', '.join(_POOLING_FLAGS)}; take another model"
        )
    return _POOLING_FLAGS[modes[0]]
