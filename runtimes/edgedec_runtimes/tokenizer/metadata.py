"""Reading a vocabulary from the metadata of a GGUF, and checking it."""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import GGUF, ValueType, once_per_header
from edgedec.gguf.metadata import get_array, get_bool, get_int, get_text, refuse_missing
from edgedec_runtimes.tokenizer.pretokenizers import NAMES
from edgedec_runtimes.tokenizer.special import (
    KIND_OF_TYPE,
    ROLE_KEYS,
    AmbiguousError,
    Kind,
    assign_roles,
    require_order,
)
from edgedec_runtimes.tokenizer.string_table import StringTable

BPE, SPM, CHARACTERS, BERT, UNIGRAM = "gpt2", "llama", "gemma4", "bert", "t5"
_STRINGS = frozenset({ValueType.STRING})
_INT32 = frozenset({ValueType.INT32})
_BYTE = re.compile(rb"<0x[0-9A-Fa-f]{2}>")  # the text of a byte token
_SPECIAL = Kind.CONTROL | Kind.UNKNOWN | Kind.USER_DEFINED
# llama.cpp strips spaces around some tokens of these models; it knows them by the model's name only.
_STRIPPING_NAMES = ("modern-bert",)
_PHI3_NAMES = ("phi-3", "phi3")
_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")
_STRIPPING_ARCHITECTURES = ("nomic-bert-moe", "jina-bert-v3")


class UncoveredError(UnsupportedModelError):
    """The vocabulary is of a kind that is not covered; `reason` says which kind, without the file and the remedy."""

    def __init__(self, gguf: GGUF, reason: str) -> None:
        super().__init__(f"{gguf.paths[0]}: {reason}; use the llamacpp runtime")
        self.reason = reason


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The tokens of a model and their roles.

    Attributes:
        model: BPE, SPM, CHARACTERS, BERT or UNIGRAM.
        pre: Name of the pre-tokenizer; "" where the metadata names none, and for the others.
        tokens: The tokens' bytes by id.
        kinds: Kind of each token, or the bits of two kinds.
        ends: Ids of the tokens that end a generation.
        special: Texts of special tokens by id: tokens that are recognised where a text spells them out.
        infill: Ids of the tokens for infilling by role.
        strips: Ids of special tokens that swallow the white space behind them.
    """

    model: str
    pre: str
    tokens: StringTable
    kinds: bytearray
    ends: frozenset[int]
    special: dict[int, str]
    infill: dict[str, int]
    strips: frozenset[int]


def metadata_refusal(gguf: GGUF) -> str | None:
    """Return why a vocabulary's algorithm is not covered, by single values of the metadata; None where it is."""
    model = get_text(gguf, "tokenizer.ggml.model")
    if model is None:
        refuse_missing(gguf, "tokenizer.ggml.model")
    if model not in DEFAULT_IDS:
        covered = f"{BPE!r} (BPE), {SPM!r} (SentencePiece), {CHARACTERS!r} (BPE over characters), {BERT!r} (WordPiece)"
        covered += f", {UNIGRAM!r} (SentencePiece's unigram model)"
        return f"its vocabulary is of the kind {model[:40]!r}; covered are {covered}"
    pre = get_text(gguf, "tokenizer.ggml.pre") or ""
    if model == BPE and pre not in NAMES:
        return f"its pre-tokenizer is {pre[:40]!r}; covered are " + ", ".join(sorted(NAMES - {""}))
    name = (get_text(gguf, "general.name") or "").lower()
    architecture = get_text(gguf, "general.architecture") or ""
    for each in (
        *(n for n in _STRIPPING_NAMES if n in name),
        *(a for a in _STRIPPING_ARCHITECTURES if a in architecture),
    ):
        return f"models named {each!r} take spaces off around special tokens, which is not covered"
    return None


@once_per_header
def read_vocabulary(gguf: GGUF) -> Vocabulary:
    """Return the checked tokens of a GGUF and their roles.

    Raises:
        ModelFormatError: The vocabulary is missing, damaged or contradicts itself.
        UnsupportedModelError: The vocabulary is of a kind that is not covered.
    """
    reason = metadata_refusal(gguf)
    if reason is not None:
        raise UncoveredError(gguf, reason)
    model = get_text(gguf, "tokenizer.ggml.model") or ""
    tokens = _read_tokens(gguf)
    kinds = _read_kinds(gguf, tokens.n)
    roles = {key: token_id(gguf, key, tokens.n) for key in (*ROLE_KEYS, "eot_token_id", "eom_token_id")}
    present = {key: i for key, i in roles.items() if i is not None}
    eos = named_token(gguf, "eos", tokens.n, default=DEFAULT_IDS[model]["eos"])
    ends = [i for i in (eos, present.get("eot_token_id"), present.get("eom_token_id")) if i is not None]
    try:
        all_ends, infill = assign_roles(tokens, kinds, present, ends)
        special = {i: _text(gguf, tokens, i) for i in _with(kinds, _SPECIAL)}
        require_order(special.values())
    except AmbiguousError as error:
        raise UncoveredError(gguf, str(error)) from error
    _check_bytes(gguf, tokens, kinds)
    source_end(gguf, tokens.n)
    if model == SPM:
        _require_every_byte(gguf, tokens)
    pre, strips = get_text(gguf, "tokenizer.ggml.pre") or "", _stripping(gguf, special)
    return Vocabulary(model, pre, tokens, kinds, all_ends, special, infill, strips)


def _stripping(gguf: GGUF, special: dict[int, str]) -> frozenset[int]:
    """Return the ids of the tokens that swallow white space: most special ones of Phi 3, which has only its name."""
    name = (get_text(gguf, "general.name") or "").lower()
    if not any(each in name for each in _PHI3_NAMES):
        return frozenset()
    return frozenset(i for i, text in special.items() if text not in _NOT_STRIPPING)


# The ids that llama.cpp takes where the metadata names none.
DEFAULT_IDS: dict[str, dict[str, int | None]] = {
    BPE: {"bos": 11, "eos": 11},
    SPM: {"bos": 1, "eos": 2},
    CHARACTERS: {"bos": None, "eos": None},
    BERT: {"bos": 101, "eos": None},
    UNIGRAM: {"bos": None, "eos": 1},
}


def named_token(gguf: GGUF, role: str, n_vocab: int, *, default: int | None) -> int | None:
    """Return the id of a role's token ("bos", "eos"), or the default where the metadata names no token that exists."""
    token = token_id(gguf, f"{role}_token_id", n_vocab)
    if token is not None:
        return token
    return default if default is not None and default < n_vocab else None


def token_id(gguf: GGUF, key: str, n_vocab: int) -> int | None:
    """Return the id that a key below tokenizer.ggml holds; None where there is no such key, or no such token."""
    number = get_int(gguf, f"tokenizer.ggml.{key}", at_least=-(2**63), at_most=2**64 - 1)
    return number if number is not None and 0 <= number < n_vocab else None


def source_end(gguf: GGUF, n_vocab: int) -> tuple[int, ...]:
    """Return the token with which the decoder of an encoder-decoder model begins, in a tuple; () for other models.

    It stands behind each prompt, which the encoder reads (ModelFormatError where there is no such token).
    """
    start = get_int(gguf, f"{get_text(gguf, 'general.architecture')}.decoder_start_token_id", at_most=2**31 - 1)
    if start is not None and start >= n_vocab:
        raise damaged(gguf, f"its decoder begins with token {start}, and it has {n_vocab}")
    return () if start is None else (start,)


def flag(gguf: GGUF, key: str, *, default: bool) -> bool:
    """Return the boolean of a key below tokenizer.ggml, or the default where it is absent."""
    value = get_bool(gguf, f"tokenizer.ggml.{key}")
    return default if value is None else value


def damaged(gguf: GGUF, actual: str) -> ModelFormatError:
    """Return the error to raise for a vocabulary that contradicts itself; `actual` says how."""
    return ModelFormatError(
        f"{gguf.paths[0]}: {actual}; the file is damaged or was converted wrongly: download another GGUF of the model"
    )


def read_merges(gguf: GGUF) -> StringTable:
    """Return the merges of a BPE vocabulary, each as "left right", in order of priority."""
    merges = get_array(gguf, "tokenizer.ggml.merges", _STRINGS)
    if merges is None:
        refuse_missing(gguf, "tokenizer.ggml.merges")
    return StringTable(merges.strings())


def read_scores(gguf: GGUF, n_vocab: int) -> NDArray[np.float32]:
    """Return float32[n_vocab], the score of each token; zeros where the metadata has none."""
    scores = get_array(gguf, "tokenizer.ggml.scores", _INT32 | {ValueType.FLOAT32})
    if scores is None:
        return np.zeros(n_vocab, np.float32)
    if len(scores) < n_vocab:
        raise damaged(gguf, f"it has {len(scores)} scores for {n_vocab} tokens")
    values: NDArray[np.float32] = scores.numpy()[:n_vocab].astype(np.float32)
    if np.isnan(values).any():
        raise damaged(gguf, f"the score of token {int(np.argmax(np.isnan(values)))} is no number")
    return values


def _read_tokens(gguf: GGUF) -> StringTable:
    array = get_array(gguf, "tokenizer.ggml.tokens", _STRINGS)
    if array is None:
        refuse_missing(gguf, "tokenizer.ggml.tokens")
    strings = array.strings()
    if not strings:
        raise damaged(gguf, "its vocabulary has no tokens")
    # llama.cpp gives empty tokens these names.
    strings = [string or f"[EMPTY_{i}]".encode() for i, string in enumerate(strings)] if b"" in strings else strings
    table = StringTable(strings)
    repeated = table.repeated()
    if repeated is not None:
        shown = table[repeated[0]].decode(errors="replace")[:60]
        raise damaged(gguf, f"tokens {repeated[0]} and {repeated[1]} are both {shown!r}")
    return table


def _read_kinds(gguf: GGUF, n_vocab: int) -> bytearray:
    array = get_array(gguf, "tokenizer.ggml.token_type", _INT32)
    if array is None:
        return bytearray([Kind.NORMAL]) * n_vocab
    if len(array) < n_vocab:
        raise damaged(gguf, f"it has {len(array)} token types for {n_vocab} tokens")
    types = array.numpy()[:n_vocab]
    kinds = np.full(n_vocab, Kind.UNUSED, np.uint8)
    for number, kind in KIND_OF_TYPE.items():
        kinds[types == number] = kind
    return bytearray(kinds.tobytes())


def _with(kinds: bytearray, kind: int) -> list[int]:
    """Return the ids of the tokens that have a bit of `kind` in their kind."""
    return np.flatnonzero(np.frombuffer(kinds, np.uint8) & np.uint8(kind)).tolist()


def _text(gguf: GGUF, tokens: StringTable, number: int) -> str:
    try:
        return tokens[number].decode()
    except UnicodeDecodeError as error:
        raise damaged(gguf, f"special token {number} is {tokens[number][:40]!r}, which is no UTF-8") from error


def _check_bytes(gguf: GGUF, tokens: StringTable, kinds: bytearray) -> None:
    """Refuse a vocabulary with a byte token whose text does not name a byte."""
    for number in _with(kinds, Kind.BYTE):
        if not _BYTE.fullmatch(tokens[number]):
            shown = tokens[number].decode(errors="replace")[:40]
            raise damaged(gguf, f"byte token {number} is {shown!r}, expected one such as '<0x0A>'")


def _require_every_byte(gguf: GGUF, tokens: StringTable) -> None:
    lacking = [byte for byte in range(256) if byte_token(tokens, byte) < 0]
    if lacking:
        raise UncoveredError(gguf, f"its vocabulary has no token for byte 0x{lacking[0]:02X}, so not for every text")


def byte_token(tokens: StringTable, byte: int) -> int:
    """Return the id of the token for a byte in a SentencePiece vocabulary; -1 where there is none."""
    token = tokens.find(f"<0x{byte:02X}>".encode())
    return token if token >= 0 else tokens.find(bytes([byte]))
