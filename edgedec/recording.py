"""What drafters proposed at every position of a text, for replaying it under another machine's costs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgedec.draft_tree import best_part


@dataclass(frozen=True, slots=True)
class Proposals:
    """The merged proposals at one position.

    Attributes:
        tokens: Token of each node.
        parents: Index of its parent, -1 for the text before.
        paths: P(path to the node accepted) as it was known then.
        draft_s: Seconds that drafting took.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    paths: tuple[float, ...]
    draft_s: float

    def as_dict(self) -> dict[str, object]:
        """Return plain types for JSON."""
        return {
            "tokens": list(self.tokens),
            "parents": list(self.parents),
            "paths": [round(path, 4) for path in self.paths],
            "draft_s": round(self.draft_s, 6),
        }


_NOTHING = Proposals((), (), (), 0.0)


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay found.

    Attributes:
        n_tokens: Tokens of the text after the first.
        n_steps: Forwards it took.
        seconds: Their time; plain_s that of plain decoding.
    """

    n_tokens: int
    n_steps: int
    seconds: float
    plain_s: float


def replay(
    token_ids: Sequence[int], proposals: Sequence[Proposals], cost: Callable[[int], float], n_max: int
) -> Replay:
    """Decode a text again, taking the drafts that pay where a forward over n rows takes `cost(n)` seconds.

    `proposals[i]` was made when `token_ids[: i + 1]` was known. Drafting time is left out: it is another machine's.

    >>> rows = [Proposals((6, 7), (-1, 0), (0.9, 0.8), 0.0)] * 3
    >>> replay([5, 6, 7, 8], rows, lambda n: 1.0, 8)
    Replay(n_tokens=3, n_steps=1, seconds=1.0, plain_s=3.0)
    """
    position, n_steps, seconds = 0, 0, 0.0
    last = len(token_ids) - 1
    while position < last:
        row = proposals[position] if position < len(proposals) else _NOTHING
        room = min(n_max, last - position - 1)
        nodes, _ = best_part(row.paths, range(len(row.paths)), lambda n: cost(n + 1), room, 0.0)
        seconds += cost(len(nodes) + 1)
        n_steps += 1
        position += 1 + _n_accepted(row, set(nodes), token_ids[position + 1 :])
    return Replay(max(0, last), n_steps, seconds, max(0, last) * cost(1))


def _n_accepted(row: Proposals, nodes: set[int], text: Sequence[int]) -> int:
    """Return how far the chosen nodes go along the text."""
    children: Mapping[tuple[int, int], int] = {
        (row.parents[node], row.tokens[node]): node for node in sorted(nodes, reverse=True)
    }
    node, depth = -1, 0
    while depth < len(text):
        found = children.get((node, text[depth]))
        if found is None:
            break
        node, depth = found, depth + 1
    return depth
