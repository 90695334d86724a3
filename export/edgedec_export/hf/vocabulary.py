"""A checkpoint's tokenizer.json and tokenizer_config.json as read, and the tokens that a vocabulary is made of."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec_export.hf.safetensors import read_json

# GGUF's numbers for what a token is.
NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6
SPACE = "\u2581"  # SentencePiece's space


@dataclass(slots=True)
class Tokens:
    """The tokens of a vocabulary by number, while it is put together.

    Attributes:
        kinds: GGUF's number for what each is.
        scores: f32[n_vocab] of a SentencePiece vocabulary, else None.
    """

    texts: list[str]
    kinds: list[int]
    scores: NDArray[np.float32] | None = None


class TokenizerFiles:
    """What the files say, with errors that name them.

    Attributes:
        path: tokenizer.json.
        model, vocab: Its parts of those names; vocab is token to number.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokenizer.json"
        self.json = read_json(self.path)
        model = self.json.get("model")
        vocab = model.get("vocab") if isinstance(model, dict) else None
        if not isinstance(model, dict) or not isinstance(vocab, dict) or not vocab:
            self.fail("it has no model with a vocab")
        if model.get("type", "BPE") != "BPE":
            self.refuse(f"its model is of the type {str(model.get('type'))[:40]!r}, expected 'BPE'")
        if any(type(number) is not int or number < 0 for number in vocab.values()):
            self.fail("a token has a number that is none")
        self.model: dict[str, Any] = model
        self.vocab: dict[str, int] = vocab
        config = folder / "tokenizer_config.json"
        self.config = read_json(config) if config.is_file() else {}

    def merges(self) -> list[tuple[str, str]]:
        """Return the merges in order of priority; they are written "left right" or ["left", "right"]."""
        pairs = []
        merges = self.model.get("merges")
        if not isinstance(merges, list):
            self.fail("its model has no merges")
        for merge in merges:
            pair = merge.split(" ") if isinstance(merge, str) else merge
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(p, str) and p for p in pair):
                self.fail(f"the merge {str(merge)[:60]!r} is no pair")
            pairs.append((pair[0], pair[1]))
        return pairs

    def fail(self, found: str) -> NoReturn:
        """Raise ModelFormatError."""
        raise ModelFormatError(f"{self.path}: {found}; download the checkpoint again")

    def refuse(self, found: str) -> NoReturn:
        """Raise UnsupportedModelError."""
        raise UnsupportedModelError(
            f"{self.path}: {found}; its tokens would be others: use llama.cpp's convert_hf_to_gguf.py, or a GGUF "
            "of the model that others made"
        )


def steps(entry: Any, parts: str) -> list[dict[str, Any]]:
    """Return the steps of an entry of tokenizer.json in order: those of a sequence, one, or none.

    Args:
        parts: The key that a sequence has its steps under. Sequences within a sequence are not taken apart.

    >>> steps({"type": "Sequence", "normalizers": [{"type": "NFC"}, 3]}, "normalizers")
    [{'type': 'NFC'}, {'type': '3'}]
    """
    if entry is None:
        return []
    inner = entry.get(parts) if isinstance(entry, dict) and entry.get("type") == "Sequence" else None
    listed = inner if isinstance(inner, list) else [entry]
    return [step if isinstance(step, dict) else {"type": str(step)[:40]} for step in listed]
