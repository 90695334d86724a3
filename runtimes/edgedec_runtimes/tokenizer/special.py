"""Special tokens: their kinds, which of them end a generation, and finding them where a text spells them out."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from enum import IntEnum

from edgedec_runtimes.tokenizer.string_table import StringTable


class Kind(IntEnum):
    """The kind of a token, as bits. A token whose role follows from its text keeps its kind and gets CONTROL, too."""

    UNUSED = 0  # unused or undefined: it adds nothing to a text
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 4
    USER_DEFINED = 8
    BYTE = 16


# By its number in tokenizer.ggml.token_type.
KIND_OF_TYPE = {
    1: Kind.NORMAL,
    2: Kind.UNKNOWN,
    3: Kind.CONTROL,
    4: Kind.USER_DEFINED,
    6: Kind.BYTE,
}

# Tokens with these texts end a generation, whatever the metadata says.
_ENDS = tuple(
    """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>
    <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜>
    [e~[
    """.split()
)
# Roles in code infilling: the metadata keys that name the token (the last one counts), and the texts that it may have.
_INFILL_ROLES = {
    "pre": (
        ("fim_pre_token_id", "prefix_token_id"),
        tuple(
            """
            <|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>
            """.split()
        ),
    ),
    "suf": (
        ("fim_suf_token_id", "suffix_token_id"),
        tuple(
            """
            <|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>
            """.split()
        ),
    ),
    "mid": (
        ("fim_mid_token_id", "middle_token_id"),
        tuple("<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>".split()),
    ),
    "pad": (("fim_pad_token_id",), ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    "rep": (("fim_rep_token_id",), ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    "sep": (("fim_sep_token_id",), ("<|file_sep|>",)),
}
_INFILL_ENDS = ("pad", "rep", "sep")  # tokens of these roles end a generation
ROLE_KEYS = tuple(key for keys, _ in _INFILL_ROLES.values() for key in keys)
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
SHOWN_CONTROLS = frozenset((*_ALWAYS_SHOWN, "<|end|>"))
"""Control tokens of gpt-oss; where the kind is USER_DEFINED, replies show them."""
_OVERLAP_BUDGET = 2**22
WHITE_SPACE = " \t\n\v\f\r"
"""What some special tokens swallow."""


class AmbiguousError(Exception):
    """The ids that llama.cpp returns would depend on the order of a hash table or of an unstable sort."""


def assign_roles(
    table: StringTable, kinds: bytearray, roles: Mapping[str, int], ends: Iterable[int]
) -> tuple[frozenset[int], dict[str, int]]:
    """Return the ids of the tokens that end a generation, and those for infilling by their role.

    `kinds` is corrected where texts contradict types.

    Args:
        table: The tokens.
        kinds: Kind of each token, or the bits of two kinds; changed in place.
        roles: Id of the token that the metadata names for a role, by the role's key (ROLE_KEYS).
        ends: Ids that the metadata names as the end of a text, turn or message.

    Raises:
        AmbiguousError: Two tokens could both have a role.
    """
    ends_seen: set[int] = set()
    infill: dict[str, int] = {}
    for role, (keys, texts) in _INFILL_ROLES.items():
        ids = [roles[key] for key in keys if key in roles][-1:]
        if not ids:
            ids = _ids(table, texts)
            plain = [i for i in ids if not kinds[i] & Kind.CONTROL]
            if len(ids) > 1 and (plain or role in _INFILL_ENDS):
                shown = " and ".join(repr(table[i].decode(errors="replace")) for i in ids[:2])
                raise AmbiguousError(f"{shown} could both be its token for code infilling")
            for i in plain:
                kinds[i] |= Kind.CONTROL
        if len(ids) == 1:
            infill[role] = ids[0]
        if role in _INFILL_ENDS:
            ends_seen.update(ids)
    by_text = _ids(table, _ENDS)
    for i in by_text:
        kinds[i] |= Kind.CONTROL
    for i in _ids(table, _ALWAYS_SHOWN):
        kinds[i] = Kind.USER_DEFINED
    ends_seen.update(by_text, ends)
    _correct_ends(table, kinds, ends_seen)
    return frozenset(ends_seen), infill


def _correct_ends(table: StringTable, kinds: bytearray, ends: set[int]) -> None:
    """Take tokens out of `ends` that end no generation in vocabularies with certain other tokens."""
    texts = {table[i]: i for i in ends}
    calls = b"<|call|>" in texts or b"<|calls|>" in texts
    if b"<|end|>" in texts and calls and (b"<|return|>" in texts or b"<|flush|>" in texts):
        ends.discard(texts[b"<|end|>"])
        kinds[texts[b"<|end|>"]] = Kind.USER_DEFINED
    if b"</s>" in texts and (b"<|tool_response>" in texts or b"<|plamo:eos|>" in texts):
        ends.discard(texts[b"</s>"])
        kinds[texts[b"</s>"]] = Kind.NORMAL


def _ids(table: StringTable, texts: Iterable[str]) -> list[int]:
    return [i for i in (table.find(text.encode()) for text in texts) if i >= 0]


class SpecialTokens:
    """Cuts a text at the special tokens that it spells out: longer tokens first, each from left to right.

    Args:
        texts: Text of each token by id; none is empty.
        strips: Ids of the tokens that swallow the white space behind them.
    """

    def __init__(self, texts: Mapping[int, str], strips: frozenset[int] = frozenset()) -> None:
        self._strips = strips
        # A text that lacks the first two characters of a token lacks the token.
        self._by_start: dict[str, list[tuple[int, str, int]]] = defaultdict(list)
        for token_id, text in texts.items():
            self._by_start[text[:2]].append((-len(text.encode()), text, token_id))

    def cut(self, text: str) -> list[str | int]:
        """Return the ids of the tokens found and the texts between them, in order; no text is empty."""
        there: list[tuple[int, str, int]] = []
        for start, tokens in self._by_start.items():
            if start in text:
                there += [token for token in tokens if token[1] in text]
        fragments: list[str | int] = [text] if text else []
        for _, token, token_id in sorted(there):
            cut_one = _cut_and_strip if token_id in self._strips else _cut_one
            fragments = [part for fragment in fragments for part in cut_one(fragment, token, token_id)]
        return fragments


def _cut_one(fragment: str | int, token: str, token_id: int) -> list[str | int]:
    if isinstance(fragment, int) or token not in fragment:
        return [fragment]
    parts: list[str | int] = []
    for text in fragment.split(token):
        parts += [token_id, text] if text else [token_id]
    return parts[1:]


def _cut_and_strip(fragment: str | int, token: str, token_id: int) -> list[str | int]:
    """Cut at a token that swallows the white space behind it; white space may be part of the next token, too."""
    if isinstance(fragment, int):
        return [fragment]
    parts: list[str | int] = []
    begin, place = 0, fragment.find(token)
    while place >= 0:
        parts += [fragment[begin:place], token_id] if place > begin else [token_id]
        begin = place + len(token)
        while begin < len(fragment) and fragment[begin] in WHITE_SPACE:
            begin += 1
        place = fragment.find(token, begin)
    return [*parts, fragment[begin:]] if begin < len(fragment) else parts


def require_order(texts: Iterable[str]) -> None:
    """Raise AmbiguousError if cutting at these tokens depends on the order of equally long tokens.

    It does where a token ends as another one of the same length begins.
    """
    by_length: dict[int, list[str]] = defaultdict(list)
    for text in texts:
        by_length[len(text.encode())].append(text)
    budget = _OVERLAP_BUDGET
    for group in by_length.values():
        inside = set("".join(text[1:] for text in group)) if len(group) > 1 else set()
        # A token can begin as another one ends only if its first letter is inside of a token; and a token can end as
        # another one begins only if such a first letter is inside of it.
        beginning = [text for text in group if text[0] in inside]
        letters = {text[0] for text in beginning}
        ending = [text for text in group if any(letter in text[1:] for letter in letters)]
        budget -= sum(len(text) ** 2 for text in beginning + ending)
        if budget < 0:
            raise AmbiguousError("its special tokens are too many and too long to tell whether they overlap")
        starts = _beginnings(beginning)
        for text in ending:
            for n in range(1, len(text)):
                if starts.get(text[-n:], text) != text:
                    raise AmbiguousError(f"its special tokens overlap: one ends with {text[-n:]!r}, another begins so")


def _beginnings(texts: Iterable[str]) -> dict[str, str]:
    """Return the proper beginnings of texts, each with the text that begins so; "" where several texts do."""
    starts: dict[str, str] = {}
    for text in texts:
        for n in range(1, len(text)):
            starts[text[:n]] = text if starts.get(text[:n], text) == text else ""
    return starts
