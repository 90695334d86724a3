"""The walk that rules share which decide token by token: draw the next token, go on where the draft holds it."""

from collections.abc import Callable, Sequence

from edgedec.draft import Draft, Verification

DrawToken = Callable[[int, tuple[int, ...], Sequence[int]], int]


def walk(draft: Draft, draw_token: DrawToken) -> Verification:
    """Accept nodes from the root on, for as long as some node holds the token that is drawn.

    Where several nodes have the same text, the children of all of them are the next candidates.

    Args:
        draft: What was proposed.
        draw_token: `(row, accepted tokens, candidates)` -> the next token, drawn from p at that row with the help of
            the nodes that propose one. It is called once for a row, in order.

    Of two chains, 5 6 and 5 7, the second is accepted:

    >>> draft = Draft.tree([5, 6, 5, 7], [-1, 0, -1, 2], [1, 1, 1, 1])
    >>> walk(draft, lambda row, accepted, candidates: (5, 7, 9)[len(accepted)])
    Verification(path=(2, 3), token_ids=(5, 7, 9), candidates=None)
    """
    children = children_of(draft)
    standing = [-1]
    token_ids: tuple[int, ...] = ()
    while True:
        candidates = [child for node in standing for child in children[node]]
        token_ids += (draw_token(standing[0] + 1, token_ids, candidates),)
        following = [node for node in candidates if draft.tokens[node] == token_ids[-1]]
        if not following:
            return Verification(path_to(draft, standing[0]), token_ids)
        standing = following


def children_of(draft: Draft) -> dict[int, list[int]]:
    """Return the children of each node and, under -1, the roots, in the order of the draft."""
    children: dict[int, list[int]] = {node: [] for node in range(-1, len(draft))}
    for node, parent in enumerate(draft.parents):
        children[parent].append(node)
    return children


def path_to(draft: Draft, node: int) -> tuple[int, ...]:
    """Return the nodes from the root to `node`, that one included; none for -1."""
    path: tuple[int, ...] = ()
    while node >= 0:
        path = (node, *path)
        node = int(draft.parents[node])
    return path
