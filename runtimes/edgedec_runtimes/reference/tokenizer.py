"""A tokenizer for vocabularies with byte tokens: a character becomes its own token, or else the tokens of its bytes."""

from collections.abc import Mapping, Sequence

from edgedec.errors import RequestError, UnsupportedModelError
from edgedec.gguf.file import GGUF, ValueType
from edgedec.gguf.metadata import WHOLE, get_array, get_bool, get_int

_UNKNOWN, _CONTROL, _BYTE = 2, 3, 6
_SPACE = "\u2581"  # SentencePiece writes a space as this
_END_KEYS = ("eos", "eot", "eom")


class ReferenceTokenizer:
    """Implements edgedec.tokenizer.Tokenizer. Nothing is merged, so texts take many tokens, all of them valid."""

    def __init__(self, gguf: GGUF, n_vocab: int) -> None:
        tokens = get_array(gguf, "tokenizer.ggml.tokens", frozenset({ValueType.STRING}))
        kinds = get_array(gguf, "tokenizer.ggml.token_type", WHOLE)
        self._texts: list[str] = tokens.tolist() if tokens is not None else []
        self._kinds: list[int] = kinds.tolist() if kinds is not None else [1] * len(self._texts)
        self.n_vocab = n_vocab
        if not len(self._texts) == len(self._kinds) <= n_vocab:
            raise UnsupportedModelError(
                f"{gguf.paths[0]}: {len(self._texts)} tokens of {len(self._kinds)} kinds for {n_vocab} embeddings: "
                "use the llamacpp runtime"
            )
        self._pieces = [_piece(text, kind) for text, kind in zip(self._texts, self._kinds, strict=True)]
        self._bytes = {self._pieces[i]: i for i, kind in enumerate(self._kinds) if kind == _BYTE}
        # The token of a character is a normal token; byte tokens stand only for characters without one.
        normal = {text: i for i, text in enumerate(self._texts) if self._kinds[i] == 1 and len(text) == 1}
        self._characters = normal
        self._controls = {text: i for i, text in enumerate(self._texts) if self._kinds[i] == _CONTROL}
        self.control_texts = tuple(self._controls)
        ids = {name: get_int(gguf, f"tokenizer.ggml.{name}_token_id", at_most=n_vocab - 1) for name in _END_KEYS}
        self.infill_ids: Mapping[str, int] = {}
        self._ends = frozenset(i for i in ids.values() if i is not None)
        self._bos = get_int(gguf, "tokenizer.ggml.bos_token_id", at_most=n_vocab - 1)
        self._add_bos = bool(get_bool(gguf, "tokenizer.ggml.add_bos_token"))
        by_id: dict[int | None, str] = dict(enumerate(self._texts))  # an id may be beyond the list
        self.bos_token, self.eos_token = by_id.get(self._bos, ""), by_id.get(ids["eos"], "")

    def least_tokens(self, text: str) -> int:
        """Return how many tokens `text` takes at the least, without tokenizing it."""
        longest = max(map(len, self._controls), default=1)
        return -(-len(text) // max(1, longest))

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False, most: int | None = None
    ) -> list[int]:
        """Return the token ids of `text`; after more than `most` ids the rest of the text is left out.

        Raises:
            RequestError: The text has a lone surrogate, which no Unicode text holds.
            UnsupportedModelError: The vocabulary has no byte tokens.
        """
        if len(self._bytes) != 256:
            raise UnsupportedModelError(
                f"the reference tokenizer needs 256 byte tokens, the vocabulary has {len(self._bytes)}; pass token "
                "ids, or use the llamacpp runtime"
            )
        ids = [self._bos] if add_special and self._add_bos and self._bos is not None else []
        position = 0
        while position < len(text) and (most is None or len(ids) <= most):
            control = self._control_at(text, position) if parse_special else ""
            if control:
                ids.append(self._controls[control])
            else:
                ids += self._character(text[position])
            position += len(control) or 1
        return ids

    def _control_at(self, text: str, position: int) -> str:
        return max((token for token in self._controls if text.startswith(token, position)), key=len, default="")

    def _character(self, character: str) -> list[int]:
        spelled = _SPACE if character == " " else character
        if spelled in self._characters:
            return [self._characters[spelled]]
        try:
            return [self._bytes[bytes([byte])] for byte in character.encode()]
        except UnicodeEncodeError as error:
            raise RequestError("the text has a lone surrogate; decode the input as UTF-8 first") from error

    def piece(self, token_id: int) -> bytes:
        """Return the bytes a token adds to the text; control tokens add none."""
        if not 0 <= token_id < self.n_vocab:
            raise RequestError(f"token {token_id} is outside the vocabulary of {self.n_vocab}")
        return self._pieces[token_id] if token_id < len(self._pieces) else b""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids, with U+FFFD where the bytes are not UTF-8."""
        return b"".join(map(self.piece, token_ids)).decode("utf-8", errors="replace")

    def is_end(self, token_id: int) -> bool:
        """Return whether the token ends a generation."""
        return token_id in self._ends


def _piece(text: str, kind: int) -> bytes:
    if kind in (_UNKNOWN, _CONTROL):
        return b""
    if kind == _BYTE:
        return bytes([int(text[1:-1], 16)])  # "<0x41>"
    return text.replace(_SPACE, " ").encode()
