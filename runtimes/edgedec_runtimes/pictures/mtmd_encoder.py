"""The encoder of pictures that every kind of projector has: libmtmd, in the child process."""

import threading

import numpy as np
from numpy.typing import NDArray

from edgedec.memory_plan import MemoryTerm
from edgedec.progress import CancelToken, OnProgress
from edgedec_runtimes.pictures.calls import Encoded
from edgedec_runtimes.pictures.child import PictureChild
from edgedec_runtimes.pictures.contract import Picture, PictureLayout
from edgedec_runtimes.pictures.header import DYNAMIC, Opening, ProjectorHeader
from edgedec_runtimes.pictures.limits import Limits

_MOST_LAYOUTS = 256
_LIBRARY_BYTES = 20_000_000  # of llama.cpp and its Python binding, beside an interpreter with numpy
_WINDOW_MASK_BYTES = 6  # of a pair of patches, where layers attend in windows


class MtmdEncoder:
    """Implements edgedec_runtimes.pictures.contract.PictureEncoder. The projector is loaded with the first picture."""

    def __init__(self, opening: Opening, child: PictureChild) -> None:
        self._opening, self._child = opening, child
        self._layouts = dict[tuple[int, int], PictureLayout]()
        self._identity: str | None = None
        self._lock = threading.Lock()

    @property
    def identity(self) -> str:
        """What a bit of a row depends on, beside the pixels and the projector file (raises as PictureChild.ask)."""
        if self._identity is None:
            self._identity = f"{self._child.ask('encoder')} {self._opening.architecture} {self._opening.max_tokens}"
        return self._identity

    def layout(self, width: int, height: int) -> PictureLayout:
        """Return what a picture of that size becomes; see edgedec_runtimes.pictures.contract.PictureEncoder."""
        with self._lock:
            layout = self._layouts.get((width, height))
        if layout is None:
            layout = self._child.ask("layout", self._opening, width, height)
            with self._lock:
                if len(self._layouts) >= _MOST_LAYOUTS:
                    self._layouts.clear()
                self._layouts[width, height] = layout
        return layout

    def encode(
        self, picture: Picture, cancel: CancelToken | None = None, on_progress: OnProgress | None = None
    ) -> list[NDArray[np.float32]]:
        """Return the rows of a picture; see edgedec_runtimes.pictures.contract.PictureEncoder."""
        encoded: Encoded = self._child.ask("encode", self._opening, picture, cancel=cancel, on_progress=on_progress)
        return encoded[1]

    def encode_file(
        self,
        data: bytes,
        limits: Limits,
        name: str,
        cancel: CancelToken | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[NDArray[np.float32]]:
        """Return the rows of the picture in a file, whose pixels stay in the child; raises as encode()."""
        arguments = (self._opening, data, limits, name)
        encoded: Encoded = self._child.ask("encode_file", *arguments, cancel=cancel, on_progress=on_progress)
        return encoded[1]

    def terms(self) -> tuple[MemoryTerm, ...]:
        """Return what the child holds for the encoder, beside what it is without."""
        header = self._opening.header
        return (
            MemoryTerm("encoder's library", _LIBRARY_BYTES, "libmtmd and llama.cpp", grows=True),
            MemoryTerm("picture encoder", header.n_bytes, f"{header.path.name}, while it is used", grows=True),
            MemoryTerm("encoder's buffers", _buffer_bytes(header, self._opening.max_tokens), grows=True),
        )

    def close(self) -> None:
        """End the child."""
        self._child.close()


def _buffer_bytes(header: ProjectorHeader, max_tokens: int | None) -> int:
    """Return the bytes of the states of the most patches that are encoded at a time.

    A layer's widest states are those of its feed-forward, beside which about three of the encoder's width are held.
    Measured with flash attention: at most 10 % less for SmolVLM, gemma 3, Qwen3.5 and Qwen2.5-VL.
    """
    n_patches = (header.image_size // header.patch_size) ** 2
    if header.projector_type in DYNAMIC and max_tokens is not None:
        n_patches = max_tokens * header.merge**2
    pixels = 2 * 12 * n_patches * header.patch_size**2
    states = 4 * n_patches * (header.feed_forward_length + 3 * header.embedding_length)
    mask = _WINDOW_MASK_BYTES * n_patches**2 if header.window_pattern else 0
    return pixels + states + mask
