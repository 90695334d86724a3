"""The default verification rule: a node is accepted when it is the token that plain decoding would draw there.

The rule couples draft and target through the noise: the token at each position is drawn from p exactly as plain
decoding would draw it. So the text is a function of the target alone, for any draft (Daliri, Musco and Suresh 2024,
arXiv:2408.07978; greedy decoding is the case of temperature 0).
"""

from collections.abc import Callable

from edgedec.draft import Draft, Verification
from edgedec.errors import RequestError

ChooseToken = Callable[[int, tuple[int, ...]], int]


def verify_coupled(draft: Draft, choose_token: ChooseToken) -> Verification:
    """Accept the path of the draft that holds the tokens that the target draws, and add the token after it.

    Where no token can be drawn behind an accepted one (RequestError), the accepted one is the last: the next step says
    so, unless the text ends before.

    Args:
        draft: What was proposed.
        choose_token: `(row, accepted tokens)` -> the target's token after that row: row 0 is the last token before
            the draft, row i + 1 is node i. It is called only for rows on the path, once each, in order.

    Of a root 5 with the children 6 and 7, where the target says 5, 7, 9:

    >>> tree = Draft.tree([5, 6, 7], [-1, 0, 0], [1.0, 1.0, 1.0])
    >>> verify_coupled(tree, lambda row, accepted: {0: 5, 1: 7, 3: 9}[row])
    Verification(path=(0, 2), token_ids=(5, 7, 9), candidates=None)
    """
    if not draft.tokens:
        return Verification((), (choose_token(0, ()),))
    children: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True)):
        children.setdefault((parent, token), node)
    path: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    node = -1
    while True:
        try:
            token = choose_token(node + 1, token_ids)
        except RequestError:
            if not token_ids:
                raise
            return Verification(path[:-1], token_ids)
        token_ids += (token,)
        child = children.get((node, token))
        if child is None:
            return Verification(path, token_ids)
        path += (child,)
        node = child
