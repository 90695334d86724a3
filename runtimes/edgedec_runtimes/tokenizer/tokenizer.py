"""The tokenizer of a GGUF's vocabulary: special tokens, BOS and EOS; BPE, SentencePiece or WordPiece for the rest."""

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain

from edgedec.errors import RequestError
from edgedec.gguf.file import GGUF
from edgedec_runtimes.tokenizer.bpe import BytePairs
from edgedec_runtimes.tokenizer.character_pairs import CharacterPairs
from edgedec_runtimes.tokenizer.metadata import (
    BERT,
    BPE,
    CHARACTERS,
    DEFAULT_IDS,
    SPM,
    UNIGRAM,
    UncoveredError,
    Vocabulary,
    damaged,
    flag,
    named_token,
    read_vocabulary,
    source_end,
)
from edgedec_runtimes.tokenizer.pretokenizers import pre_tokenizer
from edgedec_runtimes.tokenizer.special import SHOWN_CONTROLS, WHITE_SPACE, Kind, SpecialTokens
from edgedec_runtimes.tokenizer.spm import SentencePieces
from edgedec_runtimes.tokenizer.token_bound import TokenBound
from edgedec_runtimes.tokenizer.unigram import UnigramPieces
from edgedec_runtimes.tokenizer.wordpiece import WordPieces

_N_REMEMBERED_WORDS = 2**14
_MAX_REMEMBERED_CHARACTERS = 32
_METHODS: Mapping[str, type[CharacterPairs | SentencePieces | UnigramPieces | WordPieces]] = {
    CHARACTERS: CharacterPairs,
    SPM: SentencePieces,
    BERT: WordPieces,
    UNIGRAM: UnigramPieces,
}


class VocabularyTokenizer:
    """Implements edgedec.tokenizer.Tokenizer; `open_tokenizer` makes one."""

    def __init__(self, gguf: GGUF, vocabulary: Vocabulary) -> None:
        self._tokens, self.n_vocab = vocabulary.tokens, vocabulary.tokens.n
        self._kinds = vocabulary.kinds
        self._ends = vocabulary.ends
        self.infill_ids: Mapping[str, int] = vocabulary.infill
        defaults = dict(DEFAULT_IDS[vocabulary.model])
        adds_bos = vocabulary.model != UNIGRAM
        self._method: BytePairs | CharacterPairs | SentencePieces | UnigramPieces | WordPieces
        if vocabulary.model == BPE:
            cuts = pre_tokenizer(vocabulary.pre)
            adds_bos = cuts.add_bos
            defaults["bos"] = defaults["bos"] if cuts.has_bos else None
            self._method = BytePairs(gguf, vocabulary, cuts)
        else:
            self._method = _METHODS[vocabulary.model](gguf, vocabulary)
        self._encode_word = lru_cache(_N_REMEMBERED_WORDS)(self._method.encode_word)
        bos, eos = (named_token(gguf, role, self.n_vocab, default=defaults[role]) for role in ("bos", "eos"))
        self.bos_token, self.eos_token = (
            "" if i is None else self._tokens[i].decode(errors="replace") for i in (bos, eos)
        )
        always = vocabulary.model in (CHARACTERS, BERT)  # llama.cpp does not ask the metadata there
        self._first = _added(gguf, "bos", bos, default=adds_bos, asks=not always)
        if vocabulary.model == BERT:
            last = named_token(gguf, "seperator", self.n_vocab, default=102)  # as GGUF spells it
            self._last = _added(gguf, "seperator", last, default=True, asks=False)
        else:
            self._last = _added(gguf, "eos", eos, default=vocabulary.model == UNIGRAM)
            self._last += source_end(gguf, self.n_vocab)
        shown = {i: text for i, text in vocabulary.special.items() if not self._kinds[i] & _HIDDEN}
        self.control_texts = tuple(
            text for i, text in vocabulary.special.items() if i not in shown or text in SHOWN_CONTROLS
        )
        self._special = vocabulary.special
        self._spelled = SpecialTokens(vocabulary.special, vocabulary.strips)
        self._always_spelled = SpecialTokens(shown, vocabulary.strips)
        self._swallowed = WHITE_SPACE.encode() if vocabulary.strips else b""

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False, most: int | None = None
    ) -> list[int]:
        """Return the token ids of `text` (RequestError for a lone surrogate, which no Unicode text holds).

        After more than `most` ids the rest of the text is left out: the ids are those of its beginning.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has a lone surrogate at character {error.start}, which is no Unicode text; "
                f"decode the input as UTF-8 first"
            ) from error
        ids = list(self._first) if add_special else []
        after_special = True  # the beginning of a text counts as such
        for fragment in (self._spelled if parse_special else self._always_spelled).cut(text):
            if isinstance(fragment, int):
                ids.append(fragment)
            else:
                for word in self._method.words(fragment, after_special=after_special):
                    short = len(word) <= _MAX_REMEMBERED_CHARACTERS
                    ids += self._encode_word(word) if short else self._method.encode_word(word)
                    if most is not None and len(ids) > most:
                        return ids
            after_special = isinstance(fragment, int)
        return ids + list(self._last) if add_special else ids

    def least_tokens(self, text: str) -> int:
        """Return how many tokens `text` takes at the least, without tokenizing it; 0 where that is not known."""
        return 0 if self._bound is None else self._bound.least_tokens(text)

    @cached_property
    def _bound(self) -> TokenBound | None:
        dropped_bytes = self._method.dropped_bytes()
        if dropped_bytes is None:
            return None
        special = (text.encode() for text in self._special.values())
        return TokenBound(chain(self._method.token_bytes(), special), dropped_bytes + self._swallowed)

    def piece(self, token_id: int) -> bytes:
        """Return the bytes a token adds to the text; control tokens add none."""
        if not 0 <= token_id < self.n_vocab:
            raise RequestError(f"token {token_id} is outside the vocabulary of {self.n_vocab}")
        kind, token = self._kinds[token_id], self._tokens[token_id]
        if kind & _HIDDEN:
            return b""
        if kind & Kind.USER_DEFINED:
            return token
        if kind & Kind.NORMAL:
            return self._method.piece(token)
        return bytes([int(token[3:5], 16)]) if kind & Kind.BYTE else b""  # of "<0x0A>", as read_vocabulary has checked

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids, with U+FFFD where the bytes are not UTF-8."""
        return b"".join(map(self.piece, token_ids)).decode("utf-8", errors="replace")

    def is_end(self, token_id: int) -> bool:
        """Return whether the token ends a generation."""
        return token_id in self._ends


_HIDDEN = Kind.CONTROL | Kind.UNKNOWN


def open_tokenizer(gguf: GGUF) -> VocabularyTokenizer:
    """Return the tokenizer of a model, built from its metadata.

    Raises:
        ModelFormatError: The vocabulary is missing, damaged or contradicts itself.
        UnsupportedModelError: The vocabulary is not covered, which `refusal` says beforehand.
    """
    return VocabularyTokenizer(gguf, read_vocabulary(gguf))


def refusal(gguf: GGUF) -> str | None:
    """Return why the vocabulary of a model is not covered; None where `open_tokenizer` covers it.

    Raises:
        ModelFormatError: The vocabulary is missing, damaged or contradicts itself.
    """
    try:
        read_vocabulary(gguf)
    except UncoveredError as error:
        return error.reason
    return None


def _added(gguf: GGUF, role: str, token_id: int | None, *, default: bool, asks: bool = True) -> tuple[int, ...]:
    """Return the id that is added to every text at its beginning ("bos") or end, in a tuple; () for none.

    Unless `asks`, the default holds whatever the metadata says.
    """
    if not (flag(gguf, f"add_{role}_token", default=default) if asks else default):
        return ()
    if token_id is None:
        raise damaged(gguf, f"texts are to have the {role.upper()} token, but there is none")
    return (token_id,)
