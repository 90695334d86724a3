"""The search of edgedec_apps.extraction: the most probable verbatim spans of a passage, found exactly.

A span is the model's whole answer: its probability is that of its tokens, one after the other, and of an end behind
them. Over the tokens of a span log p only falls, so what the first tokens have bounds every span that begins with them.
The search evaluates the tokens with the highest bound as rows of a tree, and ends when no bound is above the n-th best
span that is known. So the result is that of scoring every span, for a small part of its rows.
"""

import heapq
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgedec.logit_ops import LogitOps
from edgedec.model import Forward, Session
from edgedec.progress import CancelToken
from edgedec.sampling import log_probs
from edgedec.tokenizer import Tokenizer

_ROWS = 16  # of one forward: on two cores 16 rows take about as long as 3 single ones
_ROWS_OF_ALL = 64  # where none can be spared
_LOOK_AHEAD = 0.5  # nats that a token not evaluated yet is expected to lose
_LEAST_SHARED = 4  # tokens in the KV cache for which a forward leaves spans with other beginnings out


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
        lead: What stands before a span in the model's text: a space, or nothing.
        most: Most tokens of a span.
        base: Bytes before the passage, where the places count from an earlier one.
    """
    data = passage.encode()
    at, places = 0, set[int]()
    for token_id in tokenizer.encode(passage, add_special=False):
        places.add(len(data) - len(data[at:].lstrip()))
        at += len(tokenizer.piece(token_id))
    starts = []
    for place in sorted(places):
        if place < len(data) and _is_whole(data, place):
            start = _start(tokenizer, data, place, lead, most, base)
            if start is not None:
                starts.append(start)
    return starts


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
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def end(self) -> int:
        """The byte of the passage behind the span that ends here, at its first place; -1 where none may end."""
        return self.starts[0].ends[self.depth - 1]


@dataclass(slots=True)
class SpanSearch:
    """Looks for the n most probable spans, after a prompt that the session's KV cache holds.

    Args:
        session: Its KV cache holds the prompt.
        n_prompt: Tokens of the prompt.
        end_ids: The tokens that end an answer.
        n: How many spans are wanted.
        most_rows: Most rows of a forward, where memory is planned; None for as many as pay.
        cancel: Stops the search between two forwards.
        wants_all: Whether there are n spans, so that bounds don't matter.

    Attributes:
        n_forwards: Forwards made after the prompt.
        n_rows: Their rows.
    """

    session: Session
    n_prompt: int
    end_ids: NDArray[np.int64]
    n: int
    most_rows: int | None = None
    cancel: CancelToken = field(default_factory=CancelToken)
    wants_all: bool = False
    n_forwards: int = 0
    n_rows: int = 0
    _n_ranked: int = 0
    _branched: bool = False

    def run(self, starts: Sequence[Start], row: NDArray[np.float32], ops: LogitOps) -> list[tuple[float, Node]]:
        """Return the log-probabilities and the last nodes of the best spans, the best first.

        Args:
            starts: The places where spans begin.
            row: f32[n_vocab], the logits after the prompt.
            ops: Of that forward.

        Raises:
            CancelledError: `cancel` stopped the search.
            What Session.forward raises.
        """
        root = Node(None, -1, 0, starts)
        best: list[_Ranked] = []
        open_nodes = self._taken(root, row, ops, best)
        held: list[Node] = []
        while open_nodes := _live(open_nodes, self._least(best)):
            base = _n_common(held, open_nodes[0].path()[:-1])
            base = base if base >= _LEAST_SHARED or not self.session.model.capabilities.rollback else 0
            chosen = self._chosen(open_nodes, held[:base], self._least(best))
            self.cancel.check("the search")
            forward = self._forward(chosen, base)
            for node, logits in zip([node for node in chosen if not node.evaluated], forward.logits, strict=True):
                open_nodes += self._taken(node, logits, forward.ops, best)
            open_nodes = [node for node in open_nodes if not node.evaluated]
            held = self._kept(chosen, held[:base], _live(open_nodes, self._least(best))[:1])
        return [(value, node) for value, _, node in sorted(best, key=lambda entry: (-entry[0], -entry[1]))]

    def _least(self, best: "list[_Ranked]") -> float:
        """Return the log-probability that a span must exceed to be among the n best of those known."""
        return best[0][0] if len(best) == self.n else -math.inf

    def _taken(self, node: Node, logits: NDArray[np.float32], ops: LogitOps, best: "list[_Ranked]") -> list[Node]:
        """Note what a node's logits say: its span's log-probability, and the bounds of its children, returned."""
        children = node.grow()
        tokens = np.array([*self.end_ids, *(child.token for child in children)], np.int64)
        logprobs = log_probs(logits, tokens, ops)
        n_ends = len(self.end_ids)
        for child, logprob in zip(children, logprobs[n_ends:].tolist(), strict=True):
            child.logprob = node.logprob + logprob
        node.evaluated = True
        if node.parent is not None and node.end >= 0:
            value = node.logprob + float(np.logaddexp.reduce(logprobs[:n_ends]))
            self._n_ranked += 1
            heapq.heappush(best, (value, -self._n_ranked, node))
            if len(best) > self.n:
                heapq.heappop(best)
        return children

    def _chosen(self, open_nodes: list[Node], base: list[Node], least: float) -> list[Node]:
        """Return the nodes of the next forward, each behind its parent: the highest bounds, and what may follow them.

        Args:
            open_nodes: The nodes that may be evaluated next, the highest bound first.
            base: The nodes that the KV cache holds behind the prompt; only what follows them is chosen.
            least: A bound must be above this.
        """
        capabilities = self.session.model.capabilities
        most = _ROWS_OF_ALL if self.wants_all else _ROWS
        room = min(most, capabilities.max_rows, self.most_rows or most)
        under = (node for node in open_nodes if _n_common(base, node.path()) == len(base))
        queue = [(-node.logprob, i, node) for i, node in enumerate(under)]
        n_queued, chosen = len(queue), list[Node]()
        while queue:
            cost, _, node = heapq.heappop(queue)
            missing = [each for each in node.path()[len(base) :] if not any(each is other for other in chosen)]
            is_branch = node.parent is not chosen[-1] if chosen else False
            is_too_much = len(chosen) + len(missing) > min(room, self.session.room(self.n_prompt + len(base)))
            if -cost <= least or (chosen and is_too_much):
                break
            if is_branch and not capabilities.trees:
                continue
            chosen += missing
            children = node.grow()
            for child in children:
                loss = 0.0 if self.wants_all else _LOOK_AHEAD + math.log(len(children))
                heapq.heappush(queue, (cost + loss, n_queued, child))
                n_queued += 1
        return chosen

    def _forward(self, chosen: list[Node], base: int) -> Forward:
        """Evaluate nodes behind the prompt and `base` nodes; the logits are those of the nodes not evaluated before."""
        row_of = {id(node): i for i, node in enumerate(chosen)}
        parents = np.array([row_of.get(id(node.parent), -1) for node in chosen], np.int32)
        self._branched = bool((parents != np.arange(-1, len(chosen) - 1)).any())
        self.n_forwards += 1
        self.n_rows += len(chosen)
        return self.session.forward(
            np.array([node.token for node in chosen], np.int32),
            n_past=self.n_prompt + base,
            parents=parents if self._branched else None,
            rows=np.array([i for i, node in enumerate(chosen) if not node.evaluated], np.int32),
        )

    def _kept(self, chosen: list[Node], base: list[Node], following: list[Node]) -> list[Node]:
        """Have the session keep the path that is likely to be gone on with, and return the nodes of what it holds."""
        if not self._branched:
            return [*base, *chosen]
        path = following[0].path()[:-1] if following else []
        rows = [i for i, node in enumerate(chosen) if any(node is each for each in path)]
        rows = rows or [0]
        self.session.keep(np.array(rows, np.int32))
        return [*base, *(chosen[i] for i in rows)]


_Ranked = tuple[float, int, Node]
"""The log-probability of a span, less the number of spans known before it, its last node."""


def _live(nodes: list[Node], least: float) -> list[Node]:
    """Return the nodes whose bound is above `least`, the highest first."""
    return sorted((node for node in nodes if node.logprob > least), key=lambda node: -node.logprob)


def _n_common(one: list[Node], other: list[Node]) -> int:
    """Return how many nodes two paths have in common from their start on."""
    n = 0
    while n < min(len(one), len(other)) and one[n] is other[n]:
        n += 1
    return n
