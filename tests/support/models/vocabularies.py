"""Small vocabularies that llama.cpp and edgedec both load, and broken ones."""

import random
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from edgedec.gguf.file import ValueType
from support.models.gguf_writer import Typed, write_gguf
from support.models.tiny_t5 import replacements, unigram
from support.texts.token_texts import written

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"


def letters() -> list[str]:
    """Return GPT-2's letter for each byte."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printing else next(others)) for byte in range(256)]


@cache
def _merges(n: int) -> tuple[tuple[str, str], ...]:
    """Train merges on the corpus without cutting it into words first, so that every cut matters."""
    alphabet = letters()
    symbols = [alphabet[byte] for text in written()[:-4] for byte in text.encode()]
    merges = []
    for _ in range(n):
        pair = Counter(pairwise(symbols)).most_common(1)[0][0]
        merges.append(pair)
        merged, i = [], 0
        while i < len(symbols):
            joined = tuple(symbols[i : i + 2]) == pair
            merged.append("".join(pair) if joined else symbols[i])
            i += 2 if joined else 1
        symbols = merged
    return tuple(merges)


def bpe(pre: str | None = "gpt-2", *, n_merges: int = 250, extra: dict[str, int] | None = None) -> dict[str, Any]:
    """Return the metadata of a byte-level vocabulary; `extra` adds tokens with their types."""
    extra = extra or {"<|endoftext|>": CONTROL, "<|im_start|>": CONTROL, "<tool>": USER_DEFINED, "<unk>": UNKNOWN}
    merges = _merges(n_merges)
    tokens = [*letters(), *("".join(pair) for pair in merges)]
    tokens = list(dict.fromkeys(tokens))
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*tokens, *extra],
        "tokenizer.ggml.token_type": types([NORMAL] * len(tokens) + list(extra.values())),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.eos_token_id": len(tokens),
    }
    return metadata if pre is None else metadata | {"tokenizer.ggml.pre": pre}


def spm(*, seed: int = 0, extra: dict[str, int] | None = None) -> dict[str, Any]:
    """Return the metadata of a SentencePiece vocabulary with many equal scores."""
    rng = random.Random(seed)
    text = "".join(written()[:-4]).replace(" ", SPACE).replace("\x00", "")
    pieces = [text[i : i + rng.randint(1, 6)] for i in (rng.randrange(len(text)) for _ in range(2500))]
    pieces += [piece[:n] for piece in pieces for n in range(1, len(piece))]
    extra = extra or {"<start>": CONTROL, "\n\n": USER_DEFINED, f"{SPACE}{SPACE}x": USER_DEFINED, "[odd]": UNUSED}
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    first = ["<unk>", "<s>", "</s>", *byte_tokens, *extra]
    normal = [piece for piece in dict.fromkeys(pieces) if piece not in first]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + list(extra.values()) + [NORMAL] * len(normal)
    scores = [0.0] * len(first) + [-float(rng.randint(1, 40)) for _ in normal]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": first + normal,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": types(kinds),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def characters(*, n_merges: int = 400, extra: dict[str, int] | None = None) -> dict[str, Any]:
    """Return the metadata of a vocabulary like Gemma 4's: characters and their merges, and bytes for what it lacks."""
    extra = extra or {"<|turn>": CONTROL, "<turn|>": CONTROL, "<|tool_response>": CONTROL, "</s>": CONTROL}
    merges = _character_merges(n_merges)
    symbols = sorted({symbol for pair in merges for symbol in (*pair, "".join(pair))})
    first = ["<pad>", "<eos>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), *extra]
    normal = [symbol for symbol in dict.fromkeys([*symbols, "\n", "\n\n", "\n\n\n"]) if symbol not in first]
    kinds = [CONTROL] * 3 + [BYTE] * 256 + list(extra.values()) + [NORMAL] * len(normal)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": first + normal,
        "tokenizer.ggml.token_type": types(kinds),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
    }


@cache
def _character_merges(n: int) -> tuple[tuple[str, str], ...]:
    """Return pairs of symbols of the corpus at random, some of them across spaces and line breaks."""
    rng = random.Random(n)
    text = "".join(written()[:-4]).replace(" ", SPACE).replace("\x00", "")
    merges: dict[tuple[str, str], None] = {(SPACE, SPACE): None, ("e", SPACE): None, ("\n", "\n"): None}
    while len(merges) < n:
        at, length = rng.randrange(len(text) - 6), rng.randint(2, 6)
        for end in range(2, length + 1):  # every beginning of a piece is the left side of the next merge
            merges[text[at : at + end - 1], text[at + end - 1]] = None
    return tuple(merges)


def types(kinds: list[int]) -> Typed:
    """Return token types as GGUF has them."""
    return Typed(ValueType.ARRAY, kinds, ValueType.INT32)


def write(path: Path, metadata: dict[str, Any]) -> Path:
    """Write a GGUF that is nothing but metadata."""
    return write_gguf(path, metadata)


def unigrams(seed: int) -> dict[str, Any]:
    """Return the metadata of a unigram vocabulary: letters of the corpus, pieces of its words, and random scores."""
    rng, words = (
        random.Random(seed),
        [word for text in written()[:-4] for word in text.replace("\0", " ").split(" ") if word],
    )
    letters_of = sorted(set("".join(words)) - {SPACE})
    pieces = [word[(at := rng.randrange(len(word))) : at + rng.randint(2, 8)] for word in rng.choices(words, k=900)]
    pieces = [f"{SPACE}{piece}" if rng.random() < 0.5 else piece for piece in pieces]
    ordinary = list(dict.fromkeys([SPACE, *rng.sample(letters_of, len(letters_of) * 3 // 4), *pieces]))
    tokens = {"<pad>": CONTROL, "</s>": CONTROL, "<unk>": UNKNOWN, "<tool>": USER_DEFINED}
    tokens |= {token: UNUSED if rng.random() < 0.02 else NORMAL for token in ordinary if token not in tokens}
    rules = {"\n": " ", "\t": " ", "ﬁ": "fi", "½": "1/2", "e\u0301": "é", "\u00a0": " ", "\u200b": "", "１": "1"}
    return unigram() | {
        "general.architecture": "t5",
        "tokenizer.ggml.tokens": [*tokens],
        "tokenizer.ggml.token_type": types([*tokens.values()]),
        "tokenizer.ggml.scores": np.array([-rng.uniform(2, 12) for _ in tokens], np.float32),
        "tokenizer.ggml.precompiled_charsmap": replacements(rules),
    }
