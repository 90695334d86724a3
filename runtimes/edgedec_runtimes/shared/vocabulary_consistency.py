"""Refusing a GGUF whose vocabulary contradicts itself, or lacks tokens that llama.cpp takes for granted."""

import re
from collections import Counter
from typing import NoReturn

import numpy as np

from edgedec.errors import ModelFormatError
from edgedec.gguf.file import GGUF, GGUFArray, ValueType
from edgedec.gguf.metadata import get_array, get_bool, get_text

# llama.cpp recurses once for each byte of a token; what it builds for PLaMo 2 costs the cube of a token's length.
_MAX_TOKEN_BYTES, _MAX_SUFFIX_COST = 4096, 2**30

_BPE = frozenset({"gpt2", "gemma4", "hybriddna", "whitespace"})
# Token ids that llama.cpp takes where the metadata names none, by tokenizer.
_DEFAULT_BOS = {"llama": 1, "bert": 101, "gpt2": 11, "hybriddna": 11, "whitespace": 11}
_DEFAULT_EOS = {"llama": 2, "t5": 1, "gpt2": 11, "hybriddna": 11, "whitespace": 11}
# Pre-tokenizers of byte-pair vocabularies that begin texts with BOS where the metadata does not say.
_ADDS_BOS = frozenset(
    """
    llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken chameleon gemma4
    """.split()
)
_BYTE_KIND = 6
_TEXT_BYTES = (*range(0xC0), *range(0xC2, 0xF5))  # the bytes that occur in UTF-8


def refuse(gguf: GGUF, actual: str, expected: str) -> NoReturn:
    """Raise the error of a header that contradicts itself: what was found, and what was expected in its place."""
    raise ModelFormatError(
        f"{gguf.paths[0]}: {actual}, expected {expected}; the file is damaged or was converted wrongly: "
        "download another GGUF of the model"
    )


def check_vocabulary(gguf: GGUF, n_vocab: int) -> None:
    """Refuse a vocabulary over which llama.cpp would end the process, or hang (ModelFormatError)."""
    tokens = get_array(gguf, "tokenizer.ggml.tokens", frozenset({ValueType.STRING}))
    if tokens is None:
        return
    scores = get_array(gguf, "tokenizer.ggml.scores", frozenset({ValueType.FLOAT32, ValueType.INT32}))
    kinds = get_array(gguf, "tokenizer.ggml.token_type", frozenset({ValueType.INT32}))
    for which, array in (("scores", scores), ("token_type", kinds)):
        if array is not None and len(array) != n_vocab:
            refuse(gguf, f"tokenizer.ggml.{which} has {len(array)} elements", f"{n_vocab}, one for each token")
    texts = _texts(tokens)
    longest = max(map(len, texts), default=0)
    if longest > _MAX_TOKEN_BYTES:
        refuse(gguf, f"the vocabulary has a token of {longest} bytes", f"at most {_MAX_TOKEN_BYTES}")
    distinct = set(texts)
    if len(distinct) != n_vocab:
        twice, _ = Counter(texts).most_common(1)[0]
        refuse(gguf, f"the vocabulary has the token {twice[:40]!r} more than once", "every token once")
    _check_tokenizer(gguf, n_vocab, distinct)


def _texts(tokens: GGUFArray) -> list[bytes]:
    """Return the tokens as llama.cpp sees them: up to a NUL byte, and under a made-up name where nothing is left."""
    texts = tokens.strings()
    if b"" in texts or b"\0" in b"".join(texts):
        return [text.partition(b"\0")[0] or b"[EMPTY_%d]" % i for i, text in enumerate(texts)]
    return texts


def _check_tokenizer(gguf: GGUF, n_vocab: int, texts: set[bytes]) -> None:
    """Refuse a vocabulary that lacks tokens which llama.cpp's tokenizer of its kind takes for granted."""
    model = get_text(gguf, "tokenizer.ggml.model")
    if model == "llama":
        bare = [byte for byte in _TEXT_BYTES if b"<0x%02X>" % byte not in texts and bytes([byte]) not in texts]
        if bare:
            actual = f"the vocabulary has no token for {len(bare)} bytes, such as <0x{bare[0]:02X}>"
            refuse(gguf, actual, "one for each byte of UTF-8, to spell out what no other token covers")
    if model == "rwkv":
        bare = sorted(set(_TEXT_BYTES) - _spelled_bytes(texts))
        if bare:
            actual = f"the vocabulary has no token for {len(bare)} bytes, such as \\x{bare[0]:02x}"
            refuse(gguf, actual, "one for each byte of UTF-8")
    if model == "t5":
        check_replacements(gguf)
    if model == "plamo2" and sum(len(text) ** 3 for text in texts) > _MAX_SUFFIX_COST:
        refuse(gguf, "the vocabulary of the tokenizer plamo2 is of long tokens", "short ones, or loading takes hours")
    if model == "bert":
        kinds = get_array(gguf, "tokenizer.ggml.token_type", frozenset({ValueType.INT32}))
        if kinds is not None and np.any(kinds.numpy() == _BYTE_KIND):
            refuse(gguf, "tokens of the tokenizer bert are bytes", "none of that kind")
        _check_special(gguf, "seperator", 102, n_vocab)
    adds_bos = get_bool(gguf, "tokenizer.ggml.add_bos_token")
    pre = "gemma4" if model == "gemma4" else get_text(gguf, "tokenizer.ggml.pre")
    if adds_bos is None or pre == "gemma4":
        adds_bos = model == "llama" or (model in _BPE and pre in _ADDS_BOS)
    if model == "bert" or (adds_bos and (model in _BPE or model in ("llama", "t5"))):
        _check_special(gguf, "bos", _DEFAULT_BOS.get(model), n_vocab)
    adds_eos = get_bool(gguf, "tokenizer.ggml.add_eos_token")
    if (adds_eos and (model in _BPE or model in ("llama", "t5"))) or (adds_eos is None and model == "t5"):
        _check_special(gguf, "eos", _DEFAULT_EOS.get(model), n_vocab)


def _check_special(gguf: GGUF, which: str, default: int | None, n_vocab: int) -> None:
    """Refuse a token that is added to every text and does not exist: the metadata's, else the tokenizer's default."""
    key = f"tokenizer.ggml.{which}_token_id"
    token_id = gguf.metadata.get(key)
    expected = (token_id, default)
    if not any(type(n) is int and 0 <= n < n_vocab for n in expected):
        refuse(gguf, f"every text gets the token {which}, and {key} is {token_id}", f"a token, 0 to {n_vocab - 1}")


def _spelled_bytes(texts: set[bytes]) -> set[int]:
    r"""Return the bytes that have a token of their own, spelled as in RWKV's vocabularies.

    >>> sorted(_spelled_bytes({b"A", rb"\n", rb"\x01", b"AB"}))
    [1, 10, 65]
    """
    spelled = {text[0] for text in texts if len(text) == 1 and text != b"\\"}
    letters = {ord("t"): 9, ord("n"): 10, ord("r"): 13}
    spelled |= {letters.get(text[1], text[1]) for text in texts if len(text) == 2 and text[0] == 92 and text[1] != 120}
    hexadecimal = re.compile(rb"\\x[0-9a-f]{2}")
    return spelled | {int(text[2:], 16) for text in texts if len(text) == 4 and hexadecimal.fullmatch(text)}


def check_replacements(gguf: GGUF) -> None:
    """Refuse a table of replaced characters (SentencePiece) whose steps lead outside of it.

    The table is a double array of 32-bit nodes; texts that end in NUL follow it. From node i a step with byte c goes to
    node (i ^ offset of i) ^ c. From a node that is marked as an end it goes to node i ^ offset of i, whose number is a
    place in the texts. llama.cpp ends the process where a step leads outside.
    """
    key = "tokenizer.ggml.precompiled_charsmap"
    array = get_array(gguf, key, frozenset({ValueType.INT8, ValueType.UINT8}))
    if array is None or not len(array):
        return
    n_bytes = int.from_bytes(array.data[:4], "little")
    texts = array.data[4 + n_bytes :]
    if not texts or texts[-1]:
        refuse(
            gguf, f"{key} has {len(array)} bytes, {n_bytes} of them its table", "a table, then texts that end in NUL"
        )
    nodes = np.frombuffer(array.data[4 : 4 + n_bytes // 4 * 4], "<u4").astype(np.int64)
    offsets = (nodes >> 10) << ((nodes & 0x200) >> 6)
    targets = np.arange(len(nodes)) ^ offsets
    inner = nodes < 2**31
    ends = targets[inner & (nodes & 0x100 != 0)]
    if np.any((targets | 0xFF)[inner] >= len(nodes)) or np.any((nodes[ends] & (2**31 - 1)) >= len(texts)):
        refuse(gguf, f"{key} leads outside its {len(nodes)} nodes and {len(texts)} bytes of text", "places inside")
