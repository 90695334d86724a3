"""Load a draft head from wherever it lies: the folder of a checkpoint, or a GGUF."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from edgedec.errors import EdgedecError, UnsupportedModelError
from edgedec.gguf.file import GGUF, once_per_header, read_gguf
from edgedec.gguf.metadata import get_text
from edgedec_runtimes.architectures.nextn import is_nextn_alone, nextn_layer
from edgedec_runtimes.trained_heads import gguf_assistant, gguf_block, gguf_eagle3, gguf_split
from edgedec_runtimes.trained_heads.block_checkpoint import read_block_checkpoint
from edgedec_runtimes.trained_heads.block_settings import is_block_config
from edgedec_runtimes.trained_heads.checkpoint import read_checkpoint
from edgedec_runtimes.trained_heads.checkpoint_tensors import CONFIG
from edgedec_runtimes.trained_heads.head import Head
from edgedec_runtimes.trained_heads.nextn import read_nextn
from edgedec_runtimes.weights.safetensors import read_json

_EAGLE3_WORDS = ("draft_vocab_size", "eagle_config", "speculators_model_type", "eagle_aux_hidden_state_layer_ids")


def is_head_path(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is that of a draft head rather than a model; False too where it can't be read."""
    place = Path(path)
    try:
        if place.is_dir() or place.name == CONFIG:
            config = read_json(place / CONFIG if place.is_dir() else place)
            return is_block_config(config) or any(word in config for word in _EAGLE3_WORDS)
        gguf = read_gguf(place) if place.suffix == ".gguf" else None
        return gguf is not None and (is_head(gguf) or is_nextn_alone(gguf))
    except EdgedecError:
        return False


def load_head(path: str | os.PathLike[str]) -> Head:
    """Return the head at a path, with its weights as they are stored there.

    Args:
        path: A folder with config.json and safetensors files, a file in such a folder, or a GGUF: of a head, or of a
            model with a nextn layer.

    Raises:
        ModelNotFoundError: There is no such file or folder, or it lacks a part.
        ModelFormatError: A file is damaged, or contradicts itself.
        UnsupportedModelError: It holds no draft head, or one with a setting or a tensor that edgedec does not run.
        StorageError, MemoryCapError: A file can't be read, or there is no memory for it.
    """
    place = Path(path)
    if place.is_dir():
        return _read_folder(place)
    if place.suffix == ".safetensors" or place.name == CONFIG:
        return _read_folder(place.parent)
    gguf = read_gguf(place)
    if not is_head(gguf) and nextn_layer(gguf) is not None:
        return read_nextn(gguf)
    if not is_head(gguf):
        architecture, names = get_text(gguf, "general.architecture") or "unknown", " or ".join(map(repr, ARCHITECTURES))
        raise UnsupportedModelError(
            f"{place}: the architecture is {architecture[:40]!r}, expected {names}; this is no trained draft head: a "
            "smaller model has an option of its own"
        )
    return read_gguf_head(gguf)


def _read_folder(folder: Path) -> Head:
    is_block = is_block_config(read_json(folder / CONFIG))
    return read_block_checkpoint(folder) if is_block else read_checkpoint(folder)


_READERS: Mapping[str, Callable[[GGUF], Head]] = {
    gguf_eagle3.ARCHITECTURE: gguf_eagle3.read_eagle3,
    gguf_block.ARCHITECTURE: partial(gguf_block.read_dflash, dialect=gguf_block.DFLASH),
    gguf_block.IK_ARCHITECTURE: partial(gguf_block.read_dflash, dialect=gguf_block.IK),
    gguf_split.ROWS: gguf_split.read_split,
    gguf_split.EXIT: gguf_split.read_split,
    gguf_assistant.ARCHITECTURE: gguf_assistant.read_assistant,
}
ARCHITECTURES = tuple(_READERS)


def is_head(gguf: GGUF) -> bool:
    """Return whether a GGUF holds a draft head rather than a model."""
    return gguf.metadata.get("general.architecture") in _READERS


@once_per_header
def read_gguf_head(gguf: GGUF) -> Head:
    """Return the head that a GGUF holds.

    Raises:
        ModelFormatError: The file is damaged, or contradicts itself.
        UnsupportedModelError: A key or a tensor is none that edgedec runs; the message names it.
        StorageError, MemoryCapError: The file can't be read, or there is no memory for it.
    """
    return _READERS[str(gguf.metadata["general.architecture"])](gguf)
