"""Made tasks for a small diffusion model: prompts, answers to them, and whether an answer is right.

The lists are those of ParallelBench made anew (Kang et al. 2025, arXiv:2510.04767): a waiting line, whose people are
letters here. Where an answer may be one of many, as in `shuffle`, `swap` and `latin`, its tokens depend on each other,
so several can't be chosen at once unless one says what the others are.
"""

import json
from collections.abc import Callable
from random import Random

NAMES, LETTERS = ("ana", "ben", "eva", "ivo", "kim", "leo", "mia", "tom"), "abcdefghijklmnop"
Question = tuple[str, str]
"""A prompt, and an answer that is right."""


def _line(rng: Random, most: int = 9) -> str:
    return "".join(rng.sample(LETTERS, rng.randint(5, most)))


def _copied(rng: Random) -> Question:
    text = _line(rng)
    return f"copy:{text}=", text


def _reversed(rng: Random) -> Question:
    text = _line(rng)
    return f"reverse:{text}=", text[::-1]


def _sorted(rng: Random) -> Question:
    text = _line(rng)
    return f"sort:{text}=", "".join(sorted(text))


def _shuffled(rng: Random) -> Question:
    text = _line(rng)
    return f"shuffle:{text}=", "".join(rng.sample(text, len(text)))


def _replaced(rng: Random) -> Question:
    text = _line(rng)
    at, new = rng.randrange(len(text)), rng.choice(LETTERS)
    return f"replace:{at + 1}{new} {text}=", text[:at] + new + text[at + 1 :]


def _swapped(rng: Random) -> Question:
    text = _line(rng)
    at, new = rng.randrange(len(text)), rng.choice([letter for letter in LETTERS if letter not in text])
    return f"swap:{new} {text}=", text[:at] + new + text[at + 1 :]


def _inserted(rng: Random) -> Question:
    text = _line(rng, 8)
    at, new = rng.randrange(len(text)), rng.choice(LETTERS)
    return f"insert:{at + 1}{new} {text}=", text[:at] + new + text[at:]


def _removed(rng: Random) -> Question:
    text = _line(rng)
    at = rng.randrange(len(text))
    return f"remove:{at + 1} {text}=", text[:at] + text[at + 1 :]


def _latin(rng: Random) -> Question:
    letters = "".join(rng.sample(LETTERS, 3))
    rows = [letters[1:] + letters[:1], letters[2:] + letters[:2]]
    return f"latin:{letters}=", "/".join(rng.sample(rows, 2))


def _sum(rng: Random) -> Question:
    first, second = rng.randint(10, 49), rng.randint(10, 49)  # so that the result has two digits, too
    return f"sum:{first}+{second}=", str(first + second)


def _object(rng: Random) -> Question:
    name, age = rng.choice(NAMES), rng.randint(1, 99)
    return f"json:{name} {age}=", json.dumps({"name": name, "age": age}, separators=(",", ":"))


TASKS: dict[str, Callable[[Random], Question]] = {
    "copy": _copied,
    "reverse": _reversed,
    "sort": _sorted,
    "shuffle": _shuffled,
    "replace": _replaced,
    "swap": _swapped,
    "insert": _inserted,
    "remove": _removed,
    "latin": _latin,
    "sum": _sum,
    "json": _object,
}


def _lined(kind: str, order: Callable[[Random, list[str]], list[str]]) -> Callable[[Random], Question]:
    def make(rng: Random) -> Question:
        letters = rng.sample(LETTERS, rng.choice((4, 6, 8)))
        pairs = [a + b for a, b in zip(letters[::2], letters[1::2], strict=True)]
        return f"{kind}:{''.join(letters)}=", "\n".join(order(rng, pairs))

    return make


LINED: dict[str, Callable[[Random], Question]] = {
    "turn": _lined("turn", lambda rng, pairs: [pair[::-1] for pair in pairs]),
    "lines": _lined("lines", lambda rng, pairs: sorted(pairs)),
    "mix": _lined("mix", lambda rng, pairs: rng.sample(pairs, len(pairs))),
}
"""Tasks whose answers have lines, for a model of their own: pairs of letters turned, sorted, and in any order."""


def is_right(prompt: str, answer: str, found: str) -> bool:
    """Return whether `found` answers a prompt; `answer` is an answer that is right.

    >>> is_right("shuffle:abcde=", "bcdea", "abced"), is_right("shuffle:abcde=", "bcdea", "abcdd")
    (True, False)
    >>> is_right("swap:x abcde=", "xbcde", "abcxe"), is_right("swap:x abcde=", "xbcde", "xbcdx")
    (True, False)
    >>> is_right("latin:abc=", "bca/cab", "cab/bca"), is_right("latin:abc=", "bca/cab", "bca/bca")
    (True, False)
    """
    kind, *words = prompt.rstrip("=").replace(":", " ").split()
    if kind == "shuffle":
        return sorted(found) == sorted(words[0])
    if kind == "swap":
        return found in {words[1].replace(letter, words[0]) for letter in words[1]}
    if kind == "latin":
        rows = [words[0], *found.split("/")]
        return len(rows) == 3 and all(
            {*part} == {*words[0]} for part in (*rows, *map("".join, zip(*rows, strict=False)))
        )
    if kind == "mix":
        return sorted(found.split("\n")) == sorted(answer.split("\n"))
    return found == answer


def made(kind: str, n: int, seed: int) -> list[Question]:
    """Return `n` prompts of a kind with their answers."""
    rng = Random(f"{kind} {seed}")
    return [(TASKS | LINED)[kind](rng) for _ in range(n)]
