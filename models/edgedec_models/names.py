"""Suggestions for a name that no model has."""

from collections.abc import Iterable
from difflib import get_close_matches

_LEAST_PART = 3  # characters of a name that is looked for in others


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a clause with the known names most like `name` in any case, at most three; "" where none is like it.

    Names that hold all of `name` come after those that are like it as a whole.

    >>> did_you_mean("SmolLM-135m", ["smollm2-135m", "gemma3-270m"])
    '; did you mean smollm2-135m?'
    >>> did_you_mean("coder", ["qwen2.5-coder-0.5b", "gemma3-270m"])
    '; did you mean qwen2.5-coder-0.5b?'
    """
    by_lower = {each.lower(): each for each in sorted(known)}
    like = get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    holding = [each for each in by_lower if len(name) >= _LEAST_PART and name.lower() in each]
    found = [by_lower[each] for each in dict.fromkeys([*like, *holding])][:3]
    return f"; did you mean {' or '.join(found)}?" if found else ""
