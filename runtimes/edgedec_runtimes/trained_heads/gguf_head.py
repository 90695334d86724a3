"""Read a trained head from a GGUF, by its architecture."""

from collections.abc import Callable, Mapping

from edgedec.gguf.file import GGUF, once_per_header
from edgedec_runtimes.trained_heads import gguf_block, gguf_eagle3
from edgedec_runtimes.trained_heads.gguf_values import HeadFile
from edgedec_runtimes.trained_heads.head import Head
from edgedec_runtimes.trained_heads.record import Record

_READERS: Mapping[str, Callable[[GGUF], Head]] = {
    gguf_eagle3.ARCHITECTURE: gguf_eagle3.read_eagle3,
    gguf_block.ARCHITECTURE: gguf_block.read_dflash,
    gguf_block.IK_ARCHITECTURE: gguf_block.read_dflash_draft,
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


def gguf_record(gguf: GGUF) -> Record:
    """Return the record in a GGUF; an empty one where there is none (raises what parse_record raises)."""
    return HeadFile(gguf, "").record()
