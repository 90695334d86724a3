"""Naming a file that is no GGUF by its first bytes."""

HEAD_BYTES = 512
"""How many leading bytes `name_format` looks at."""

_MAGICS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer, not the model itself; run `git lfs pull` or download it"),
    (b"lmgg", "a model in the old ggml format (2023); download a GGUF of it"),
    (b"fmgg", "a model in the old ggmf format (2023); download a GGUF of it"),
    (b"tjgg", "a model in the old ggjt format (2023); download a GGUF of it"),
    (b"algg", "a LoRA adapter in the old ggla format; edgedec needs a full model in GGUF"),
    (b"nsgg", "a saved llama.cpp session; edgedec needs the model itself in GGUF"),
    (b"FUGG", "a GGUF with its bytes swapped (big endian); download the little-endian file"),
    (b"PK\x03\x04", "a zip archive or a PyTorch checkpoint; unpack it, or download a GGUF of the model"),
    (b"\x80\x02", "a Python pickle (old PyTorch checkpoint); download a GGUF of the model"),
    (b"\x89HDF", "an HDF5 file (Keras weights); download a GGUF of the model"),
    (b"\x93NUMPY", "a numpy array; edgedec needs a model in GGUF"),
    (b"\x1f\x8b", "a gzip archive; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive; unpack it first"),
    (b"\xfd7zXZ", "an xz archive; unpack it first"),
    (b"7z\xbc\xaf", "a 7-Zip archive; unpack it first"),
    (b"BZh", "a bzip2 archive; unpack it first"),
)

# Field tags that can follow ir_version (field 1) in an ONNX ModelProto: fields 2 to 8, 14 and 20.
_ONNX_SECOND_TAGS = frozenset({0x12, 0x1A, 0x22, 0x28, 0x32, 0x3A, 0x42, 0x72, 0xA2})


def name_format(head: bytes) -> str:
    """Return what format a file has, by its first HEAD_BYTES bytes `head`, and what to do about it.

    >>> name_format(b"<!doctype html><title>Sign in</title>")
    'a web page saved instead of the model; download the file itself, signing in where the site asks for it'
    """
    for magic, name in _MAGICS:
        if head.startswith(magic):
            return name
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "a web page saved instead of the model; download the file itself, signing in where the site asks for it"
    if _is_safetensors(head):
        return "a safetensors file; make a GGUF of its folder (edgedec export FOLDER --to gguf), or download one"
    if head[4:8] == b"TFL3":
        return "a TensorFlow Lite model; download a GGUF of the model"
    if head[257:262] == b"ustar":
        return "a tar archive; unpack it first"
    if len(head) > 2 and head[0] == 0x08 and 1 <= head[1] <= 32 and head[2] in _ONNX_SECOND_TAGS:
        return "an ONNX model; if `edgedec export` wrote it, pass its folder, else download a GGUF of the model"
    if not head.strip(b"\0"):
        return "zeros only at its start, an unfinished download; download it again"
    if text.startswith((b"{", b"[")) and _is_text(head):
        return "JSON text (an error reply, or one of a model's config files), not the model; download the .gguf file"
    if _is_text(head):
        return "a text file, not a model; download the .gguf file"
    return f"no GGUF (it starts with the bytes {head[:8].hex(' ')}, expected 47 47 55 46); download it again"


def _is_safetensors(head: bytes) -> bool:
    """Return whether `head` begins like safetensors: the header's length in eight bytes, then a JSON object."""
    return len(head) > 9 and head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= 100_000_000


def _is_text(head: bytes) -> bool:
    """Return whether `head` is UTF-8 text without control characters, the last of which may be cut off."""
    text = head.decode(errors="replace").rstrip("\ufffd")
    return "\ufffd" not in text and all(c.isprintable() or c in "\t\r\n" for c in text)
