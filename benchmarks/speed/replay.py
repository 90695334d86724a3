"""Replays of recorded drafts at the costs of another machine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgedec.scheduler.draft_tree import best_part
from edgedec_apps.bench.recorder import Evaluated, Proposals

MOST_FORWARDS = 1 << 30
"""No limit to the forwards that drafting makes."""
_NOTHING = Proposals((), (), (), 0.0)


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay found.

    Attributes:
        n_tokens: Tokens of the text after the first.
        n_steps: Steps that these tokens took.
        seconds: Time of these steps and of drafting.
        plain_s: Time of plain decoding.
    """

    n_tokens: int
    n_steps: int
    seconds: float
    plain_s: float


def replay(
    token_ids: Sequence[int],
    proposals: Sequence[Proposals],
    cost: Callable[[int], float],
    n_max: int,
    price: Callable[[Evaluated], float] = lambda made: 0.0,
    n_forwards: int = MOST_FORWARDS,
    resume_s: float = 0.0,
) -> Replay:
    """Decode a recorded text again, with the drafts that pay where a forward over n rows takes `cost(n)` seconds.

    `proposals[i]` was made when `token_ids[: i + 1]` was known. Drafting is charged with its forwards only: its other
    time is that of another machine. Not charged is the row that a draft model evaluates in addition after its whole
    draft was accepted. Where drafters were recorded together, a node that several of them proposed has the highest of
    their estimates.

    Args:
        token_ids: The text.
        proposals: The recording.
        cost: Seconds of a forward by its number of rows.
        n_max: Most nodes of a draft.
        price: Seconds of a forward that drafting makes.
        n_forwards: Most forwards of drafting before a step. The first is made before every step; another one while
            the likeliest node of the one before is worth the other's price and one row more, in plain steps.
        resume_s: Seconds that the first plain step after a draft takes beyond `cost(1)`. The first draft after a plain
            step has to gain them as well.

    >>> rows = [Proposals((6, 7), (-1, 0), (0.9, 0.8), 0.0)] * 3
    >>> replay([5, 6, 7, 8], rows, lambda n: 1.0, 8)
    Replay(n_tokens=3, n_steps=1, seconds=1.0, plain_s=3.0)

    The same proposals, where each token of a draft takes a half of the weights:

    >>> half = Evaluated(1, 0.5)
    >>> rows = [Proposals((6, 7), (-1, 0), (0.9, 0.8), 0.0, (half, half), (1, 2))] * 3
    >>> replay([5, 6, 7, 8], rows, lambda n: 1.0, 8, lambda made: 0.5)
    Replay(n_tokens=3, n_steps=1, seconds=2.0, plain_s=3.0)
    """
    position, n_steps, seconds, resuming_s = 0, 0, 0.0, 0.0
    last = len(token_ids) - 1
    while position < last:
        row = proposals[position] if position < len(proposals) else _NOTHING
        room = min(n_max, last - position - 1)
        n_made = _n_made(row, cost, price, min(n_forwards, room))
        spent_s = sum(price(made) for made in row.evaluated[:n_made])
        known = [node for node in range(len(row.paths)) if not row.after or row.after[node] <= n_made]
        entering_s = 0.0 if resuming_s else resume_s

        def seconds_of(n: int, entering_s: float = entering_s) -> float:
            return cost(n + 1) + (entering_s if n else 0.0)

        nodes, _ = best_part(row.paths, known, seconds_of, room, spent_s)
        seconds += spent_s + cost(len(nodes) + 1) + (0.0 if nodes else resuming_s)
        resuming_s = resume_s if nodes else 0.0
        n_steps += 1
        position += 1 + n_accepted(row, set(nodes), token_ids[position + 1 :])
    return Replay(max(0, last), n_steps, seconds, max(0, last) * cost(1))


def _n_made(row: Proposals, cost: Callable[[int], float], price: Callable[[Evaluated], float], most: int) -> int:
    """Return how many of the forwards that were recorded at a position are made in the replay, at most `most`."""
    for n, made in enumerate(row.evaluated[:most]):
        newest = (path for path, after in zip(row.paths, row.after, strict=True) if after == n)
        if n and max(newest, default=1.0) * cost(1) < price(made) + cost(2) - cost(1):
            return n
    return min(most, len(row.evaluated))


def n_accepted(row: Proposals, nodes: set[int], text: Sequence[int]) -> int:
    """Return how many tokens of `text` the nodes that were chosen follow, from its beginning on."""
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
