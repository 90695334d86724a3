"""Prompts for the benchmarks: one JSON object a line with "task" and "turns", the first turn being used."""

import json
from itertools import zip_longest
from pathlib import Path


def load_prompts(path: Path, count: int) -> list[str]:
    """Return the first turns of `count` prompts, taking one of every task in turn."""
    by_task: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        by_task.setdefault(entry["task"], []).append(entry["turns"][0])
    in_turn = [prompt for group in zip_longest(*by_task.values()) for prompt in group if prompt is not None]
    return in_turn[:count]
