"""The tokenizer of a GGUF, by llama.cpp."""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from edgedec.errors import ModelFormatError, RequestError
from edgedec_runtimes.llamacpp.library import llama
from edgedec_runtimes.tokenizer.special import SHOWN_CONTROLS
from edgedec_runtimes.tokenizer.token_bound import TokenBound

_PIECE_BYTES = 256
_SPM, _BPE = 1, 2  # llama_vocab_type
_HIDDEN, _USER_DEFINED = 1 << 0 | 1 << 3, 1 << 4  # LLAMA_TOKEN_ATTR_UNKNOWN and _CONTROL, _USER_DEFINED
_STRIPS = 1 << 7 | 1 << 8  # LLAMA_TOKEN_ATTR_LSTRIP and _RSTRIP
_INFILL_ROLES = ("pre", "suf", "mid", "pad", "rep", "sep")
_WHITE_SPACE = b" \t\n\v\f\r"


class LlamaCppTokenizer:
    """Implements edgedec.tokenizer.Tokenizer.

    Args:
        handle: Returns the native vocabulary, or raises once the model is closed.
    """

    def __init__(self, handle: Callable[[], Any]) -> None:
        self._handle = handle
        self._api = llama()

    @property
    def n_vocab(self) -> int:
        """Number of token ids."""
        return int(self._api.llama_vocab_n_tokens(self._handle()))

    @property
    def bos_token(self) -> str:
        """Text of the begin-of-sequence token."""
        return self._text(self._api.llama_vocab_bos(self._handle()))

    @property
    def eos_token(self) -> str:
        """Text of the end-of-sequence token."""
        return self._text(self._api.llama_vocab_eos(self._handle()))

    @property
    def infill_ids(self) -> Mapping[str, int]:
        """Ids of the tokens for infilling by role."""
        ids = {role: getattr(self._api, f"llama_vocab_fim_{role}")(self._handle()) for role in _INFILL_ROLES}
        return {role: int(token_id) for role, token_id in ids.items() if token_id >= 0}

    @cached_property
    def control_texts(self) -> tuple[str, ...]:
        """Texts of control tokens."""
        kinds = [self._api.llama_vocab_get_attr(self._handle(), i) for i in range(self.n_vocab)]
        special = {self._text(i): kind for i, kind in enumerate(kinds) if kind & (_HIDDEN | _USER_DEFINED)}
        return tuple(text for text, kind in special.items() if text and (kind & _HIDDEN or text in SHOWN_CONTROLS))

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False, most: int | None = None
    ) -> list[int]:
        """Return the token ids of `text` (RequestError for lone surrogates, which no UTF-8 text holds).

        `most` has no effect, as llama.cpp tokenizes the whole text in one call; `least_tokens` gives a bound before.
        """
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has a lone surrogate at character {error.start}, which is no Unicode text; "
                f"decode the input as UTF-8 first"
            ) from error
        size = len(data) + 8
        for _ in range(2):
            buffer = (ctypes.c_int32 * size)()
            n = self._api.llama_tokenize(self._handle(), data, len(data), buffer, size, add_special, parse_special)
            if n >= 0:
                return list(buffer[:n])
            size = -n
        raise ModelFormatError("llama.cpp could not tokenize the text with this model's vocabulary")

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of `text`, without tokenizing it; 0 where none is known."""
        return 0 if self._bound is None else self._bound.least_tokens(text)

    @cached_property
    def _bound(self) -> TokenBound | None:
        """The bound for BPE and SentencePiece; None for other kinds, which may leave out parts of a text."""
        api, vocabulary = self._api, self._handle()
        kind = api.llama_vocab_type(vocabulary)
        if kind not in (_SPM, _BPE):
            return None
        vanishing = b""
        if kind == _BPE:  # a byte without a token is dropped there
            there = {piece for piece in map(self._spelled, range(self.n_vocab)) if len(piece) == 1}
            vanishing = bytes(byte for byte in range(256) if bytes([byte]) not in there)
        if any(api.llama_vocab_get_attr(vocabulary, i) & _STRIPS for i in range(self.n_vocab)):
            vanishing += _WHITE_SPACE
        return TokenBound(self._all_spelled(), vanishing)

    def _all_spelled(self) -> Iterator[bytes]:
        """Yield the bytes that each token can stand for in a text.

        With SentencePiece these are also the token's text in the file, as U+2581 may be typed.
        """
        spm = self._api.llama_vocab_type(self._handle()) == _SPM
        for token_id in range(self.n_vocab):
            yield self._spelled(token_id)
            if spm:
                yield self._api.llama_vocab_get_text(self._handle(), token_id) or b""

    def piece(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; control tokens add none."""
        if not 0 <= token_id < self.n_vocab:
            raise RequestError(f"token {token_id} is outside the vocabulary of {self.n_vocab}")
        return self._spelled(token_id, special=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids, with U+FFFD where the bytes are not UTF-8."""
        return b"".join(self.piece(token_id) for token_id in token_ids).decode("utf-8", errors="replace")

    def is_end(self, token_id: int) -> bool:
        """Return whether the token ends a generation."""
        return bool(self._api.llama_vocab_is_eog(self._handle(), token_id))

    def _spelled(self, token_id: int, *, special: bool = True) -> bytes:
        """Return the bytes of a token; a control token has bytes only where `special` is True."""
        buffer: Any = ctypes.create_string_buffer(_PIECE_BYTES)
        n = self._api.llama_token_to_piece(self._handle(), token_id, buffer, _PIECE_BYTES, 0, special)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = self._api.llama_token_to_piece(self._handle(), token_id, buffer, -n, 0, special)
        return bytes(buffer.raw[: max(n, 0)])

    def _text(self, token_id: int) -> str:
        if token_id < 0:
            return ""
        text: bytes | None = self._api.llama_vocab_get_text(self._handle(), token_id)
        return (text or b"").decode("utf-8", errors="replace")
