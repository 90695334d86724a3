"""The spans of a passage that may answer a question, as a trie of their tokens."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from edgedec.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Start:
    """A place where spans begin.

    Attributes:
        at: The byte of the passage.
        token_ids: The tokens of the longest span.
        ends: By token, the byte behind it; -1 where that is within a character, so that no span ends there.
    """

    at: int
    token_ids: Sequence[int]
    ends: Sequence[int]


def starts_of(tokenizer: Tokenizer, passage: str, lead: str, most: int, base: int = 0) -> list[Start]:
    """Return the places of a passage where spans begin: wherever a token begins, behind white space.

    A span's tokens are the first ones of the tokens that the passage has from there on, so that its text has the
    tokens that a model writes. Places are left out where the tokenizer changes the text.

    Args:
        tokenizer: The model's.
        passage: The text.
        lead: What stands before a span in the model's text: a space, or nothing.
        most: Most tokens of a span.
        base: Bytes before the passage, where the places count from an earlier one.
    """
    data = passage.encode()
    at, places = 0, set[int]()
    for token_id in tokenizer.encode(passage, add_special=False):
        places.add(len(data) - len(data[at:].lstrip()))
        at += len(tokenizer.piece(token_id))
    found = []
    for place in sorted(places):
        if place < len(data) and _is_whole(data, place):
            start = _start(tokenizer, data, place, lead, most, base)
            if start is not None:
                found.append(start)
    return found


def _start(tokenizer: Tokenizer, data: bytes, place: int, lead: str, most: int, base: int) -> Start | None:
    """Return the spans that begin at a place; None where their tokens don't spell the passage."""
    ids = tokenizer.encode(lead + data[place:].decode(), add_special=False, most=most)[:most]
    spelled = b"".join(tokenizer.piece(i) for i in ids)
    n_before = len(spelled) - len(spelled.lstrip()) if spelled[:1].isspace() else 0
    if not ids or not spelled.strip() or data[place : place + len(spelled) - n_before] != spelled[n_before:]:
        return None
    ends, at = [], place - n_before
    for token_id in ids:
        at += len(tokenizer.piece(token_id))
        ends.append(base + at if at > place and _is_whole(data, at) else -1)
    return Start(base + place, array("i", ids), array("i", ends))


def _is_whole(data: bytes, place: int) -> bool:
    """Return whether a place of UTF-8 text is not within a character."""
    return place >= len(data) or data[place] & 0xC0 != 0x80


@dataclass(slots=True)
class Node:
    """A token of one span or several: spans that begin with the same tokens share their nodes.

    Attributes:
        parent: The node of the token before; None for the root, which has no token.
        token: The token; -1 for the root.
        depth: Tokens of the span up to this one.
        starts: The places where spans of these tokens begin.
        logprob: Of the tokens up to this one, as far as it is known; of the root 0.
        evaluated: Whether a forward has given the logits behind it.
        children: Made by grow().
    """

    parent: "Node | None"
    token: int
    depth: int
    starts: Sequence[Start]
    logprob: float = 0.0
    evaluated: bool = False
    children: "list[Node]" = field(default_factory=list)

    def grow(self) -> "list[Node]":
        """Make the nodes of the tokens that follow in the passage, unless they are made already, and return them."""
        if not self.children:
            by_token: dict[int, list[Start]] = {}
            for start in self.starts:
                if self.depth < len(start.token_ids):
                    by_token.setdefault(start.token_ids[self.depth], []).append(start)
            self.children = [Node(self, token, self.depth + 1, starts) for token, starts in by_token.items()]
        return self.children

    def path(self) -> "list[Node]":
        """Return the nodes from the first token to this one."""
        found: list[Node] = []
        node = self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    @property
    def end(self) -> int:
        """The byte of the passage behind the span that ends here, at its first place; -1 where none may end."""
        return self.starts[0].ends[self.depth - 1]
