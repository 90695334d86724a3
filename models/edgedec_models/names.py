"""What to say when nothing answers to a name."""

from collections.abc import Iterable
from difflib import get_close_matches


def near(name: str, known: Iterable[str], n_most: int = 3) -> list[str]:
    """Return the known names most like `name`, whatever their case.

    >>> near("SmolLM-135m", ["smollm2-135m", "gemma3-270m"])
    ['smollm2-135m']
    """
    by_lower = {each.lower(): each for each in known}
    return [by_lower[each] for each in get_close_matches(name.lower(), by_lower, n_most, 0.6)]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a clause that offers near names; empty when there are none."""
    found = near(name, known)
    return f"; did you mean {' or '.join(found)}?" if found else ""
