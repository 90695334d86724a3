"""From pictures to the rows of a prompt: each is measured, laid out, and encoded once while its rows are kept."""

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import RequestError
from edgedec.memory_plan import MemoryTerm, format_bytes
from edgedec.pictures import PictureRows, Pictures
from edgedec.progress import CancelToken, OnProgress, check_cancelled, stage
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.child.rows import process_term
from edgedec_runtimes.pictures.child import PictureChild
from edgedec_runtimes.pictures.contract import Picture, PictureEncoder, PictureLayout, by_first_id, row_ids
from edgedec_runtimes.pictures.decoding import of_image
from edgedec_runtimes.pictures.limits import Limits
from edgedec_runtimes.pictures.mtmd_encoder import MtmdEncoder
from edgedec_runtimes.pictures.prompts import prompt_ids, with_marks


@dataclass(frozen=True, slots=True)
class Source:
    """A picture before it is decoded, or the pixels that an application gave.

    Attributes:
        name: What messages call the picture.
        digest: SHA-256 of the file, or of size and pixels.
        data: The file's bytes; empty where there are pixels.
        pixels: The pixels, or None.
    """

    name: str
    digest: bytes
    data: bytes
    pixels: Picture | None = None


def source_of(picture: Any, name: str, limits: Limits) -> Source:
    """Return what an application gave as a picture in one form.

    Args:
        picture: The bytes of a file, a path, or a PIL.Image.
        name: What messages call the picture; "" to call a file by its name.
        limits: What a picture is refused for.

    Raises:
        RequestError: It is none of these, a file can't be read, or it is beyond the limits.
    """
    if isinstance(picture, str | os.PathLike):
        path = Path(picture)
        return source_of(_read(path, limits), name or path.name, limits)
    name = name or "the picture"
    if isinstance(picture, bytes | bytearray | memoryview):
        data = bytes(picture)
        limits.require_bytes(len(data), name)
        return Source(name, sha256(data).digest(), data)
    if hasattr(picture, "getexif") and hasattr(picture, "convert"):
        pixels = of_image(picture, limits, name)
        size = f"{pixels.width} x {pixels.height}: ".encode()
        return Source(name, sha256(size + pixels.rgb).digest(), b"", pixels)
    raise RequestError(
        f"{name}: a picture is given as the bytes of a file, a path or a PIL.Image, found {type(picture).__name__}"
    )


def _read(path: Path, limits: Limits) -> bytes:
    """Return the bytes of a file, at most one more than the limits allow (RequestError where it can't be read)."""
    try:
        if not path.is_file():
            raise RequestError(
                f"the picture {str(path)!r} does not exist, or is no file (the current folder is {Path.cwd()})"
            )
        with path.open("rb") as file:
            return file.read(limits.n_bytes + 1)
    except OSError as error:
        raise RequestError(f"the picture {str(path)!r} can't be read: {error.strerror or error}") from error


PHASE = "reading picture"
KEPT_BYTES = 64 << 20
DECODING_S = 60.0
"""Seconds that a picture may take to be measured or decoded, the start of a process included."""
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class MarkedPicture:
    """A picture of a prompt, before anything of it is decoded.

    Attributes:
        marker: The text that stands for it until the prompt's tokens are made.
        source: The picture.
        width, height: Of the picture as it is encoded.
        layout: What it becomes in a prompt.
        ids: For each block of the layout, the ids of its rows.
    """

    marker: str
    source: Source
    width: int
    height: int
    layout: PictureLayout
    ids: tuple[tuple[int, ...], ...]

    @property
    def name(self) -> str:
        """What messages call the picture."""
        return self.source.name

    @property
    def n_rows(self) -> int:
        """The rows that it becomes."""
        return self.layout.n_rows


class PictureReader:
    """Reads the pictures of one model's prompts; any thread may call it, and one picture at a time is encoded.

    Attributes:
        limits: What a picture is refused for.
    """

    def __init__(
        self,
        encoder: PictureEncoder,
        child: PictureChild,
        projector: bytes,
        limits: Limits,
        most_bytes: int = KEPT_BYTES,
    ) -> None:
        """Prepare; nothing is loaded before the first picture.

        Args:
            encoder: Makes the rows.
            child: Decodes the pictures.
            projector: A hash of the encoder's file.
            limits: What a picture is refused for.
            most_bytes: Most bytes of the rows that are kept for pictures that come again.
        """
        self._encoder, self._child, self._projector = encoder, child, projector
        self.limits = limits
        self._most_bytes, self._n_bytes = most_bytes, 0
        self._kept = OrderedDict[int, tuple[PictureRows, ...]]()  # by the first id, the newest last
        self._sizes = OrderedDict[bytes, tuple[int, int]]()
        self._lock, self._turns = threading.Lock(), threading.Condition()
        self._encoding, self._measuring = deque[object](), deque[object]()  # whose turn it is, and who waits
        self._decoder: str | None = None

    @property
    def processes(self) -> tuple[int, ...]:
        """The process that decodes, where it runs; see edgedec.runtime.HasProcesses."""
        return self._child.processes

    def mark(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], tuple[MarkedPicture, ...]]:
        """Return messages with a mark in place of each picture, and the pictures (raises what measure() raises)."""
        marked, pictures = with_marks(messages)
        return marked, tuple(self.measure(one.image, one.name, one.marker) for one in pictures)

    def ids(self, tokenizer: Tokenizer, text: str, pictures: Sequence[MarkedPicture], n_most: int) -> list[int]:
        """Return the ids of a rendered prompt; see edgedec.pictures.PictureReader."""
        spelled = [(picture.marker, picture.layout, picture.ids) for picture in pictures]
        return prompt_ids(tokenizer, text, spelled, n_most)

    def measure(self, picture: Any, name: str = "", marker: str = "") -> MarkedPicture:
        """Return size, layout and ids of a picture: the bytes of a file, a path or a PIL.Image.

        Raises:
            RequestError: It is no picture, or beyond the limits.
            RuntimeUnavailableError: Pillow or the encoder's library is not installed.
            RuntimeLostError: The process that decodes was lost.
        """
        source = source_of(picture, name, self.limits)
        width, height = self._size(source)
        layout = self._encoder.layout(width, height)
        if self._decoder is None:
            self._decoder = self._child.ask("decoder")
        what = f"{self._encoder.identity}\n{self._decoder}\n".encode()
        key, first, ids = sha256(source.digest + self._projector + what).digest(), 0, list[tuple[int, ...]]()
        for block in layout.blocks:
            ids.append(row_ids(key, block.n_rows, first))
            first += block.n_rows
        return MarkedPicture(marker, source, width, height, layout, tuple(ids))

    def rows(
        self,
        pictures: Sequence[MarkedPicture],
        cancel: CancelToken | None = None,
        on_progress: OnProgress | None = None,
    ) -> Pictures:
        """Return the rows of pictures, encoded where they are not kept.

        Args:
            pictures: What measure() returned.
            cancel: Stops the work.
            on_progress: Is told of each picture that is encoded.

        Raises:
            RequestError: A picture is damaged, or the encoder can't take it.
            CancelledError: `cancel` was cancelled.
            RuntimeLostError: The process that encodes was lost; the next call starts it again.
        """
        blocks = list[PictureRows]()
        for i, picture in enumerate(pictures):
            encoded = self._find(picture)
            if encoded is None:
                with stage(on_progress, PHASE, f"{i + 1} of {len(pictures)}"):
                    encoded = self._encoded(picture, cancel, on_progress)
            blocks += encoded
        return by_first_id(blocks)

    def terms(self) -> tuple[MemoryTerm, ...]:
        """Return what reading pictures takes, in all processes."""
        process = process_term()
        description = f"of pictures that may come again, at most {format_bytes(self._most_bytes)}"
        return (
            MemoryTerm("process of pictures", process.n_bytes, process.detail, grows=True),
            *self._encoder.terms(),
            MemoryTerm("pixels", self.limits.memory_bytes, "of the largest picture, while it is decoded", grows=True),
            MemoryTerm("rows of pictures", self._most_bytes, description, grows=True),
        )

    def close(self) -> None:
        """End the child and free the rows; calling it again does nothing."""
        self._encoder.close()
        self._child.close()
        with self._lock:
            self._kept.clear()
            self._n_bytes = 0

    def _size(self, source: Source) -> tuple[int, int]:
        if source.pixels is not None:
            return source.pixels.width, source.pixels.height
        with self._lock:
            size = self._sizes.get(source.digest)
        if size is None:
            with self._turn(self._measuring, None):  # so the patience is for this picture alone
                size = self._child.ask("measure", source.data, self.limits, source.name, patience_s=DECODING_S)
            with self._lock:
                self._sizes[source.digest] = size
                if len(self._sizes) > 1024:
                    self._sizes.popitem(last=False)
        return size

    def _find(self, picture: MarkedPicture) -> tuple[PictureRows, ...] | None:
        with self._lock:
            encoded = self._kept.get(picture.ids[0][0])
            if encoded is not None:
                self._kept.move_to_end(picture.ids[0][0])
        return encoded

    def _encoded(
        self, picture: MarkedPicture, cancel: CancelToken | None, on_progress: OnProgress | None
    ) -> tuple[PictureRows, ...]:
        """Return the rows of a picture that is not kept, or is encoded by another thread in this moment."""
        with self._turn(self._encoding, cancel):
            encoded = self._find(picture)
            if encoded is None:
                made = self._encode(picture.source, cancel, on_progress)
                parts = zip(picture.layout.blocks, made, picture.ids, strict=True)
                encoded = tuple(PictureRows(block, rows, ids) for block, rows, ids in parts)
                self._keep(encoded)
        return encoded

    def _encode(
        self, source: Source, cancel: CancelToken | None, on_progress: OnProgress | None
    ) -> list[NDArray[np.float32]]:
        if isinstance(self._encoder, MtmdEncoder) and source.pixels is None:
            return self._encoder.encode_file(source.data, self.limits, source.name, cancel, on_progress)
        pixels: Picture | None = source.pixels
        if pixels is None:
            pixels = self._child.ask(
                "decode", source.data, self.limits, source.name, cancel=cancel, patience_s=DECODING_S
            )
        return self._encoder.encode(pixels, cancel, on_progress)

    @contextmanager
    def _turn(self, queue: deque[object], cancel: CancelToken | None) -> Iterator[None]:
        """Wait for a turn in the order of the callers: who has many pictures lets others in between."""
        caller = object()
        queue.append(caller)
        try:
            with self._turns:
                while queue[0] is not caller:
                    check_cancelled(cancel, "reading pictures")
                    self._turns.wait(_POLL_S)
            yield
        finally:
            with self._turns:
                queue.remove(caller)
                self._turns.notify_all()

    def _keep(self, blocks: tuple[PictureRows, ...]) -> None:
        with self._lock:
            self._kept[blocks[0].ids[0]] = blocks
            self._n_bytes += _n_bytes(blocks)
            while self._n_bytes > self._most_bytes:
                _, dropped = self._kept.popitem(last=False)
                self._n_bytes -= _n_bytes(dropped)


def _n_bytes(blocks: Sequence[PictureRows]) -> int:
    return sum(block.rows.nbytes for block in blocks)
