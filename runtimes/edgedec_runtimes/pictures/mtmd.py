"""libmtmd of llama.cpp, which runs in a child process, as it aborts on what it does not expect.

Only its functions for pixels are called, never those for files, which know other formats and start other programs.

A vocabulary without a model, which stands for the text model where libmtmd wants one: no weights are loaded twice.

libmtmd asks its text model for the text around a picture's rows, as tokens. The stub has a token for each byte and for
each mark, so its tokens spell the text, which the real vocabulary then tokenizes.
"""

import ctypes
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, RequestError
from edgedec.gguf.values import ValueType
from edgedec.pictures import Block
from edgedec_runtimes.llamacpp.library import last_complaint, mtmd
from edgedec_runtimes.pictures.contract import Picture, PictureLayout
from edgedec_runtimes.pictures.header import Opening

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
                embeddings = api.mtmd_get_output_embd(self._context)
                shape = (block.n_rows, self._header.row_width)
                rows.append(np.ctypeslib.as_array(embeddings, shape).astype(np.float32))  # valid until the next call
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


_MARKS = [
    "\n\n",
    *"""
    <start_of_image> <end_of_image> <fake_token_around_image> <global-img> <image> </image> <|image_start|>
    <|image_end|> <|img_thumbnail|> <|vision_start|> <|vision_end|> <img> </img> [IMG_END] [IMG_BREAK] <|image>
    <image|> <|im_start|> <|im_end|> <|media_start|> <|media_end|> <|media_begin|> <|begin_of_image|> <|end_of_image|>
    """.split(),
]
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_CONTROL, _NORMAL, _UNKNOWN, _BYTE = 3, 1, 2, 6  # llama.cpp's enum llama_token_type
TOKENS = ("<unk>", "<s>", "</s>", *_BYTES, *_MARKS)
_FIRST_BYTE, _FIRST_MARK = 3, 3 + 256


def spelled(token_ids: Sequence[int]) -> str:
    """Return the text that tokens of the stub spell (ValueError for one that the stub does not have).

    >>> spelled([_FIRST_MARK + 1, _FIRST_BYTE + 65])
    '<start_of_image>A'
    """
    pieces = []
    for token_id in token_ids:
        if not _FIRST_BYTE <= token_id < len(TOKENS):
            raise ValueError(token_id)
        is_mark = token_id >= _FIRST_MARK
        pieces.append(TOKENS[token_id].encode() if is_mark else bytes([token_id - _FIRST_BYTE]))
    return b"".join(pieces).decode(errors="replace")


def write_stub(path: Path, architecture: str) -> None:
    """Write the stub as a GGUF; `architecture` is the text model's, which decides how rows are placed."""
    kinds = [_UNKNOWN, _CONTROL, _CONTROL] + [_BYTE] * len(_BYTES) + [_CONTROL] * len(_MARKS)
    pairs = [
        _pair("general.architecture", ValueType.STRING, _text(architecture)),
        _pair("tokenizer.ggml.model", ValueType.STRING, _text("llama")),
        _array("tokenizer.ggml.tokens", ValueType.STRING, [_text(token) for token in TOKENS]),
        _array("tokenizer.ggml.scores", ValueType.FLOAT32, [struct.pack("<f", 0.0)] * len(TOKENS)),
        _array("tokenizer.ggml.token_type", ValueType.INT32, [struct.pack("<i", kind) for kind in kinds]),
        *(
            _pair(f"tokenizer.ggml.{name}_token_id", ValueType.UINT32, struct.pack("<I", token_id))
            for token_id, name in enumerate(("unknown", "bos", "eos"))
        ),
        *(_pair(f"tokenizer.ggml.add_{name}", ValueType.BOOL, b"\0") for name in ("bos_token", "space_prefix")),
    ]
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs) + bytes(64))


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _pair(key: str, kind: ValueType, value: bytes) -> bytes:
    return _text(key) + struct.pack("<I", kind) + value


def _array(key: str, kind: ValueType, values: Sequence[bytes]) -> bytes:
    return _pair(key, ValueType.ARRAY, struct.pack("<IQ", kind, len(values)) + b"".join(values))
