"""SentencePiece's unigram model (Kudo 2018, arXiv:1804.10959): of all ways to cut a text into tokens, the likeliest.

A text's characters are replaced first, by a table that the file has (mostly those of Unicode's NFKC). The ids are those
of llama.cpp and of SentencePiece itself; Hugging Face's tokenizers cut a text at combined characters before they
replace any, so that they may replace fewer.
"""

from collections.abc import Iterator
from math import inf

import numpy as np

from edgedec.gguf.file import GGUF, ValueType
from edgedec.gguf.metadata import get_array
from edgedec_runtimes.shared.vocabulary_consistency import check_replacements
from edgedec_runtimes.tokenizer.metadata import Vocabulary, damaged, flag, named_token, read_scores
from edgedec_runtimes.tokenizer.special import Kind
from edgedec_runtimes.tokenizer.spm import SPACE, SpacedTokens

_UNKNOWN_PENALTY = 10.0  # how much less likely an unknown character is than the least likely token
_CUT = frozenset({Kind.NORMAL, Kind.USER_DEFINED, Kind.UNUSED})  # tokens that a text is cut into
_BYTES = frozenset({ValueType.INT8, ValueType.UINT8})


class Replacements:
    """What characters of a text are replaced by: a double array of 32-bit nodes, then texts that end in NUL.

    From node i a step with byte c goes to node (i ^ offset of i) ^ c, which holds c. From a node that is marked as an
    end, node i ^ offset of i has the place of the text that replaces the bytes so far.
    """

    def __init__(self, gguf: GGUF) -> None:
        """Read the table of a file (ModelFormatError where its steps lead outside); without one nothing is replaced."""
        check_replacements(gguf)
        array = get_array(gguf, "tokenizer.ggml.precompiled_charsmap", _BYTES)
        data = b"" if array is None else array.data
        n_bytes = int.from_bytes(data[:4], "little")
        self._nodes = np.frombuffer(data[4 : 4 + n_bytes // 4 * 4], "<u4").data
        self._texts = data[4 + n_bytes :]

    def replaced(self, text: str) -> Iterator[str]:
        """Yield the replacements of a text's characters: the longest ones first, from left to right."""
        data, at = text.encode(), 0
        while at < len(data):
            length, place = self._longest(data, at)
            if length:
                yield self._texts[place : self._texts.index(0, place)].decode(errors="replace")
            else:
                length = 1 if data[at] < 0xC0 else 2 if data[at] < 0xE0 else 3 if data[at] < 0xF0 else 4
                yield data[at : at + length].decode(errors="replace")
            at += length

    def _longest(self, data: bytes, begin: int) -> tuple[int, int]:
        """Return how many bytes from `begin` on are replaced together, 0 for none, and where their replacement is.

        No step leads outside of the nodes, and no end outside of the texts: check_replacements has looked at all.
        """
        nodes, length, place = self._nodes, 0, 0
        node = _offset(nodes[0]) if len(nodes) else 0
        for i in range(begin, len(data) if len(nodes) else begin):
            node ^= data[i]
            value = nodes[node]
            if value & 0x800000FF != data[i] or not data[i]:
                break
            node ^= _offset(value)
            if value & 0x100:
                length, place = i + 1 - begin, nodes[node] & 0x7FFFFFFF
        return length, place


def _offset(node: int) -> int:
    return (node >> 10) << ((node & 0x200) >> 6)


class UnigramPieces(SpacedTokens):
    """Encodes the text between special tokens by the unigram model.

    Args:
        gguf: The model, for the rules that its metadata names.
        vocabulary: The model's tokens: those that begin a word have a U+2581 in front.
    """

    def __init__(self, gguf: GGUF, vocabulary: Vocabulary) -> None:
        self._tokens, kinds = vocabulary.tokens, vocabulary.kinds
        unknown = named_token(gguf, "unknown", self._tokens.n, default=2)
        if unknown is None:
            raise damaged(gguf, "it has no token for characters that are not in its vocabulary")
        self._unknown, scores = unknown, read_scores(gguf, self._tokens.n).astype(np.float64)
        normal = np.frombuffer(kinds, np.uint8) == Kind.NORMAL
        self._unknown_score = float(scores[normal].min(initial=0.0)) - _UNKNOWN_PENALTY
        scores[np.frombuffer(kinds, np.uint8) == Kind.USER_DEFINED] = 0.0
        self._scores, self._longest = scores.data, dict[str, int]()
        self._is_cut = bytes(kind in _CUT for kind in kinds)
        crosses = False  # whether a token goes on behind a space
        for token in range(self._tokens.n):
            text = self._tokens[token].decode(errors="replace")
            if self._is_cut[token] and text:
                self._longest[text[0]] = max(self._longest.get(text[0], 0), len(text))
                crosses = crosses or SPACE in text[1:]
        space = self._tokens.find(SPACE.encode())
        self._cuts_words = not crosses and space >= 0 and bool(self._is_cut[space])
        self._space_first = flag(gguf, "add_space_prefix", default=False)
        self._merges_spaces = flag(gguf, "remove_extra_whitespaces", default=False)
        self._replacements = Replacements(gguf)

    def words(self, text: str, *, after_special: bool) -> Iterator[str]:
        """Yield the parts of a text that can be encoded each by itself, with its characters replaced.

        They are its words where no token goes on behind a space, and the space is a token: no way leads across then.
        Every text between two special tokens begins a word, whatever `after_special` says.
        """
        word: list[str] = []
        for character in self._spaced(text):
            if character == SPACE and word and self._cuts_words:
                yield "".join(word)
                word.clear()
            word.append(character)
        if word:
            yield "".join(word)

    def _spaced(self, text: str) -> Iterator[str]:
        """Yield the characters of a text as the vocabulary spells them: U+2581 in the place of spaces."""
        is_first, in_word = self._space_first, False
        for replacement in self._replacements.replaced(text):
            for character in replacement:
                if character == " ":
                    if not self._merges_spaces:
                        yield SPACE
                elif not in_word and (is_first or self._merges_spaces):
                    yield SPACE
                    is_first = False
                    yield character
                else:
                    yield character
                in_word = character != " "

    def encode_word(self, word: str) -> tuple[int, ...]:
        """Return the token ids of a word; unknown characters that follow one another are one token.

        For each place in the word the best way to get there is kept: the sum of the scores of its tokens, the last of
        them, and where that begins. Of equal sums the first one found stays, as in llama.cpp. A character that is no
        token by itself may always be unknown, so that there is a way to every place (Viterbi 1967).
        """
        n = len(word)
        best, came_from = [0.0] + [-inf] * n, [(0, self._unknown)] * (n + 1)
        for begin in range(n):
            is_alone = False
            for end in range(begin + 1, min(n, begin + self._longest.get(word[begin], 0)) + 1):
                token = self._tokens.find(word[begin:end].encode())
                if token < 0 or not self._is_cut[token]:
                    continue
                is_alone = is_alone or end == begin + 1
                if (score := best[begin] + self._scores[token]) > best[end]:
                    best[end], came_from[end] = score, (begin, token)
            if not is_alone and (score := best[begin] + self._unknown_score) > best[begin + 1]:
                best[begin + 1], came_from[begin + 1] = score, (begin, self._unknown)
        ids: list[int] = []
        while n:
            n, token = came_from[n]
            if not (ids and ids[-1] == token == self._unknown):
                ids.append(token)
        return tuple(reversed(ids))

    def dropped_bytes(self) -> None:
        """Return None, as any character of a text may be replaced, or be one of several that are unknown together."""
        return
