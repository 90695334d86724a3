"""libmtmd of llama.cpp, which runs in a child process, as it aborts on what it does not expect.

Only its functions for pixels are called, never those for files, which know other formats and start other programs.
"""

import ctypes
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, RequestError
from edgedec.pictures import Block
from edgedec_runtimes.llamacpp.library import last_complaint, mtmd
from edgedec_runtimes.pictures.contract import Picture, PictureLayout
from edgedec_runtimes.pictures.opening import Opening
from edgedec_runtimes.pictures.stub import spelled, write_stub

_MARKER = b"<__media__>"
_FLASH = 1  # LLAMA_FLASH_ATTN_TYPE_ENABLED: with it the rows have the same bits for any number of threads
_TEXT, _IMAGE = 0, 1


class Mtmd:
    """A projector file that libmtmd holds, and the stub that stands for its text model."""

    def __init__(self, opening: Opening) -> None:
        """Load the projector.

        Raises:
            ModelFormatError: libmtmd refuses the file.
            RuntimeUnavailableError: No llama.cpp is installed, or it has no libmtmd.
        """
        self._header = opening.header
        api = self._api = mtmd()
        with tempfile.TemporaryDirectory(prefix="edgedec-") as folder:
            stub = Path(folder) / "stub.gguf"
            write_stub(stub, opening.architecture)
            params = self._api.llama_model_default_params()
            params.vocab_only = True
            self._vocabulary = self._api.llama_model_load_from_file(str(stub).encode(), params)
        if not self._vocabulary:
            raise ModelFormatError(f"llama.cpp has no architecture {opening.architecture!r}: {last_complaint()}")
        settings = api.mtmd_context_params_default()
        settings.use_gpu, settings.warmup, settings.print_timings = False, False, False
        settings.n_threads, settings.flash_attn_type = opening.n_threads, _FLASH
        settings.media_marker = _MARKER
        if opening.max_tokens is not None:
            settings.image_max_tokens = opening.max_tokens
        path = opening.header.path
        self._context = api.mtmd_init_from_file(str(path).encode(), self._vocabulary, settings)
        if not self._context or not api.mtmd_support_vision(self._context):
            raise ModelFormatError(f"{path}: libmtmd does not load this picture encoder: {last_complaint()}")

    def layout(self, width: int, height: int) -> PictureLayout:
        """Return what a picture of that size becomes; no pixel is needed."""
        with self._chunks(width, height, None) as chunks:
            return self._layout(chunks)

    def encode(
        self, picture: Picture, on_block: Callable[[int, int], None]
    ) -> tuple[PictureLayout, list[NDArray[np.float32]]]:
        """Return a picture's layout and f32[n_rows, row_width] for each of its blocks.

        Args:
            picture: The pixels.
            on_block: Called with how many blocks are done, and with their number.

        Raises:
            RequestError: libmtmd can't encode it.
        """
        api = self._api
        with self._chunks(picture.width, picture.height, picture.rgb) as chunks:
            layout = self._layout(chunks)
            images = [chunk for chunk in chunks if api.mtmd_input_chunk_get_type(chunk) == _IMAGE]
            rows = []
            for i, (chunk, block) in enumerate(zip(images, layout.blocks, strict=True)):
                on_block(i, len(images))
                if api.mtmd_encode_chunk(self._context, chunk):
                    raise RequestError(f"libmtmd can't encode the picture: {last_complaint()}")
                found = api.mtmd_get_output_embd(self._context)
                shape = (block.n_rows, self._header.row_width)
                rows.append(np.ctypeslib.as_array(found, shape).astype(np.float32))  # valid until the next call
        return layout, rows

    def close(self) -> None:
        """Free the projector and the stub."""
        self._api.mtmd_free(self._context)
        self._api.llama_model_free(self._vocabulary)

    @contextmanager
    def _chunks(self, width: int, height: int, rgb: bytes | None) -> Iterator[list[Any]]:
        """Yield the chunks of a prompt that is one picture; without pixels they can only be counted."""
        api = self._api
        pixels = None if rgb is None else np.frombuffer(rgb, np.uint8).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmap = api.mtmd_bitmap_init(width, height, pixels)
        chunks = api.mtmd_input_chunks_init()
        try:
            text = api.mtmd_input_text()
            text.text, text.text_len, text.add_special, text.parse_special = _MARKER, len(_MARKER), False, True
            bitmaps = (ctypes.c_void_p * 1)(bitmap)
            status = api.mtmd_tokenize(self._context, chunks, ctypes.byref(text), bitmaps, 1)
            if status:
                raise RequestError(f"libmtmd can't take a picture of {width} x {height} pixels: {last_complaint()}")
            yield [api.mtmd_input_chunks_get(chunks, i) for i in range(api.mtmd_input_chunks_size(chunks))]
        finally:
            api.mtmd_input_chunks_free(chunks)
            api.mtmd_bitmap_free(bitmap)

    def _layout(self, chunks: list[Any]) -> PictureLayout:
        api, parts, blocks = self._api, list[str | int](), list[Block]()
        for chunk in chunks:
            if api.mtmd_input_chunk_get_type(chunk) == _TEXT:
                parts.append(self._text(chunk))
                continue
            image = api.mtmd_input_chunk_get_tokens_image(chunk)
            n_rows = api.mtmd_input_chunk_get_n_tokens(chunk)
            n_x, n_y = api.mtmd_image_tokens_get_nx(image), api.mtmd_image_tokens_get_ny(image)
            parts.append(len(blocks))
            blocks.append(Block(n_rows, n_x, n_y, self._header.is_mutual))
        return PictureLayout(tuple(parts), tuple(blocks))

    def _text(self, chunk: Any) -> str:
        n = ctypes.c_size_t()
        tokens = self._api.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n))
        try:
            return spelled(tokens[: n.value])
        except ValueError:
            raise RequestError(
                f"the picture encoder {self._header.projector_type} puts a mark around pictures that edgedec does not "
                "know; use another model, or report this"
            ) from None


def encoder_version() -> str:
    """Return the release that decides on the bits of rows, with llama.cpp's kernels for this processor."""
    api = mtmd()
    features = api.llama_print_system_info().decode(errors="replace").strip()
    return f"libmtmd {api.llama_version().decode()} {features}"
