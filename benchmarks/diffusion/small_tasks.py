"""Made tasks for a small diffusion model: a prompt, and the one right answer to it, from a seed."""

import json
from collections.abc import Callable
from random import Random

NAMES = ("ana", "ben", "eva", "ivo", "kim", "leo", "mia", "tom")


def _letters(rng: Random, least: int, most: int) -> str:
    return "".join(rng.choice("abcdefghij") for _ in range(rng.randint(least, most)))


def _copied(rng: Random) -> tuple[str, str]:
    text = _letters(rng, 3, 8)
    return f"copy {text} = ", text


def _sorted(rng: Random) -> tuple[str, str]:
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(3, 6)))
    return f"sort {digits} = ", "".join(sorted(digits))


def _sum(rng: Random) -> tuple[str, str]:
    first, second = rng.randint(0, 99), rng.randint(0, 99)
    return f"sum {first}+{second} = ", str(first + second)


def _object(rng: Random) -> tuple[str, str]:
    name, age = rng.choice(NAMES), rng.randint(1, 99)
    return f"json {name} {age} = ", json.dumps({"name": name, "age": age}, separators=(",", ":"))


TASKS: dict[str, Callable[[Random], tuple[str, str]]] = {
    "copy": _copied,
    "sort": _sorted,
    "sum": _sum,
    "json": _object,
}


def made(kind: str, n: int, seed: int) -> list[tuple[str, str]]:
    """Return `n` prompts of a kind with their answers."""
    rng = Random(f"{kind} {seed}")
    return [TASKS[kind](rng) for _ in range(n)]
