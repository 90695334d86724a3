"""A vocabulary without a model, which stands for the text model where libmtmd wants one: no weights are loaded twice.

libmtmd asks its text model for the text around a picture's rows, as tokens. The stub has a token for each byte and for
each mark, so its tokens spell the text, which the real vocabulary then tokenizes.
"""

import struct
from collections.abc import Sequence
from pathlib import Path

from edgedec.gguf.values import ValueType

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
