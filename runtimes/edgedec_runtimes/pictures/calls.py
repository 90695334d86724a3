"""What the child process does with pictures: it decodes their files, and encodes them with libmtmd."""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgedec.model import Session
from edgedec.progress import CancelToken, OnProgress, report_progress
from edgedec_runtimes.pictures import decoding
from edgedec_runtimes.pictures.contract import Picture, PictureLayout
from edgedec_runtimes.pictures.header import Opening
from edgedec_runtimes.pictures.limits import Limits
from edgedec_runtimes.pictures.mtmd import Mtmd, encoder_version

PHASE = "picture"
Encoded = tuple[PictureLayout, list[NDArray[np.float32]]]


class PictureCalls:
    """The calls that the parent may make (edgedec_runtimes.child.host.Hosted)."""

    beside: ClassVar[frozenset[str]] = frozenset({"measure"})
    reporting: ClassVar[frozenset[str]] = frozenset({"encode", "encode_file"})

    def __init__(self) -> None:
        self.sessions: dict[int, Session] = {}
        self.loading = CancelToken()
        self._encoder: Mtmd | None = None

    def decoder(self) -> str:
        """Return the decoder's name and version."""
        return decoding.decoder_version()

    def encoder(self) -> str:
        """Return what the bits of rows depend on beside the projector."""
        return encoder_version()

    def measure(self, data: bytes, limits: Limits, name: str) -> tuple[int, int]:
        """Return width and height of the picture in a file."""
        return decoding.measure(data, limits, name)

    def decode(self, data: bytes, limits: Limits, name: str) -> Picture:
        """Return the picture in a file."""
        return decoding.decode(data, limits, name)

    def layout(self, opening: Opening, width: int, height: int) -> PictureLayout:
        """Return what a picture of that size becomes."""
        return self._opened(opening).layout(width, height)

    def encode(self, opening: Opening, picture: Picture, on_progress: OnProgress | None) -> Encoded:
        """Return a picture's layout and rows."""
        return self._opened(opening).encode(
            picture, lambda done, total: report_progress(on_progress, PHASE, done, total, "tiles")
        )

    def encode_file(
        self, opening: Opening, data: bytes, limits: Limits, name: str, on_progress: OnProgress | None
    ) -> Encoded:
        """Return layout and rows of the picture in a file."""
        return self.encode(opening, self.decode(data, limits, name), on_progress)

    def _opened(self, opening: Opening) -> Mtmd:
        if self._encoder is None:
            self._encoder = Mtmd(opening)
        return self._encoder
