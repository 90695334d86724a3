"""How much of the end of a text may become a tag, for texts that arrive in pieces."""


def n_overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `tag`, but not all of it.

    >>> n_overlap("so far </th", "</think>")
    4
    """
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)
