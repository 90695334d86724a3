"""Suggestions for a name that no model has."""

from collections.abc import Iterable
from difflib import get_close_matches

_LEAST_PART = 3  # characters of a name that is looked for in others


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a clause with the known names most like `name` in any case, at most three; "" where none is like it.

    First come the names that begin with `name`, or that `name` begins with, in the order of `known`: so it has those
    first that a person is likely to mean. Names that hold `name` elsewhere come after those like it as a whole.

    >>> did_you_mean("SmolLM-135m", ["smollm2-135m", "gemma3-270m"])
    '; did you mean smollm2-135m?'
    >>> did_you_mean("smollm", ["smollm2-135m", "smollm3-3b", "smolvlm-256m"])
    '; did you mean smollm2-135m or smollm3-3b or smolvlm-256m?'
    >>> did_you_mean("coder", ["qwen2.5-coder-0.5b", "gemma3-270m"])
    '; did you mean qwen2.5-coder-0.5b?'
    """
    lower = name.lower()
    by_lower: dict[str, str] = {}
    for each in known:
        by_lower.setdefault(each.lower(), each)
    holding = [each for each in by_lower if len(name) >= _LEAST_PART and lower in each]
    begun = [each for each in by_lower if lower.startswith(each) or (each in holding and each.startswith(lower))]
    like = get_close_matches(lower, by_lower, n=3, cutoff=0.6)
    found = [by_lower[each] for each in dict.fromkeys([*begun, *like, *holding])][:3]
    return f"; did you mean {' or '.join(found)}?" if found else ""
