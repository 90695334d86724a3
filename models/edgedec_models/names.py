"""Suggestions for a name that no model has."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a clause with the known names most like `name` in any case, at most three; "" where none is like it.

    >>> did_you_mean("SmolLM-135m", ["smollm2-135m", "gemma3-270m"])
    '; did you mean smollm2-135m?'
    """
    by_lower = {each.lower(): each for each in known}
    found = [by_lower[each] for each in get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)]
    return f"; did you mean {' or '.join(found)}?" if found else ""
