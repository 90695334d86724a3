"""A checkpoint's tokenizer.json and tokenizer_config.json, and the tokens that become the GGUF's vocabulary."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec_runtimes.weights.safetensors import read_json

# GGUF's numbers for the kinds of tokens.
NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6
SPACE = "\u2581"  # SentencePiece's space


@dataclass(slots=True)
class Tokens:
    """The tokens of a vocabulary, by id.

    Attributes:
        kinds: GGUF's number for the kind of each token.
        scores: float32[n_vocab] of a SentencePiece vocabulary, else None.
    """

    texts: list[str]
    kinds: list[int]
    scores: NDArray[np.float32] | None = None


class TokenizerFiles:
    """The content of the two files; its errors name tokenizer.json.

    Args:
        folder: The checkpoint.
        kind: The kind of tokenizer that is expected.

    Attributes:
        path: tokenizer.json.
        model, vocab: The parts of tokenizer.json with these names; vocab maps a token to its id.
    """

    def __init__(self, folder: Path, kind: str = "BPE") -> None:
        self.path = folder / "tokenizer.json"
        self.json = read_json(self.path)
        model = self.json.get("model")
        vocab = model.get("vocab") if isinstance(model, dict) else None
        if not isinstance(model, dict) or not isinstance(vocab, dict) or not vocab:
            self.fail("it has no model with a vocab")
        if model.get("type", kind) != kind:
            self.refuse(f"its model is of the type {str(model.get('type'))[:40]!r}, expected {kind!r}")
        if any(type(number) is not int or number < 0 for number in vocab.values()):
            self.fail("a token has an id that is not a whole number from 0 on")
        self.model: dict[str, Any] = model
        self.vocab: dict[str, int] = vocab
        config = folder / "tokenizer_config.json"
        self.config = read_json(config) if config.is_file() else {}

    def merges(self) -> list[tuple[str, str]]:
        """Return the merges, the first one first; the file has them as "left right" or ["left", "right"]."""
        pairs = []
        merges = self.model.get("merges")
        if not isinstance(merges, list):
            self.fail("its model has no merges")
        for merge in merges:
            pair = merge.split(" ") if isinstance(merge, str) else merge
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(p, str) and p for p in pair):
                self.fail(f"the merge {str(merge)[:60]!r} is not a pair of two tokens")
            pairs.append((pair[0], pair[1]))
        return pairs

    def fail(self, actual: str) -> NoReturn:
        """Raise ModelFormatError."""
        raise ModelFormatError(f"{self.path}: {actual}; download the checkpoint again")

    def refuse(self, actual: str) -> NoReturn:
        """Raise UnsupportedModelError."""
        raise UnsupportedModelError(
            f"{self.path}: {actual}; the GGUF would make other tokens; use llama.cpp's convert_hf_to_gguf.py, or "
            "a ready-made GGUF of the model"
        )


def steps(entry: Any, parts: str) -> list[dict[str, Any]]:
    """Return the steps of an entry of tokenizer.json in order: those of a sequence, the one step, or none.

    Args:
        parts: The key under which a sequence has its steps. Sequences within a sequence are not expanded.

    >>> steps({"type": "Sequence", "normalizers": [{"type": "NFC"}, 3]}, "normalizers")
    [{'type': 'NFC'}, {'type': '3'}]
    """
    if entry is None:
        return []
    inner = entry.get(parts) if isinstance(entry, dict) and entry.get("type") == "Sequence" else None
    listed = inner if isinstance(inner, list) else [entry]
    return [step if isinstance(step, dict) else {"type": str(step)[:40]} for step in listed]
