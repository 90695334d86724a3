"""The table and the picture of benchmarks/answers/better_answers.py: accuracy with intervals, and what each way costs.

Costs are in plain steps: the time of a forward over one row is 1. They are computed from the rows of the forwards that
a way makes and the measured curve T(n) of docs/figures.md, so that they don't depend on what else the machine did.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from edgedec.choosing.choosers import most_likely
from edgedec.choosing.sample_count import another_is_wanted, n_agreeing
from edgedec.choosing.vote import voted
from edgedec_apps.plots import COLORS, picture
from edgedec_methods.bag_of_tricks import combined
from edgedec_methods.first_finish import first_finished

Row = Mapping[str, Any]
# T(n) / T(1) of the 1.5B, one thread, from the figures in docs/figures.md; 32 rows and more as a prompt is read.
CURVE = {1: 1.0, 4: 1.03, 8: 1.49, 16: 2.82, 32: 4.73}
SIZES = (1, 4, 8, 16)
MARKS = ("o", "s", "^", "v")


def cost(n_rows: float) -> float:
    """Return the time of a forward in plain steps; linear between the measured counts, and beyond them.

    >>> cost(1), round(cost(6), 2), cost(64)
    (1.0, 1.26, 9.46)
    """
    counts = list(CURVE)
    if n_rows > counts[-1]:
        return CURVE[counts[-1]] * n_rows / counts[-1]
    return float(np.interp(n_rows, counts, list(CURVE.values())))


def lockstep(lengths: Sequence[int]) -> float:
    """Return the cost of texts of these lengths that are written side by side.

    >>> lockstep([2, 2]) == 2 * cost(2), lockstep([3, 1]) == cost(2) + 2
    (True, True)
    """
    return sum(cost(sum(length > t for length in lengths)) for t in range(max(lengths)))


def interval(n_right: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share (Wilson 1927).

    >>> [round(end, 3) for end in interval(5, 10)]
    [0.237, 0.763]
    """
    z, p = 1.96, n_right / n
    middle, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (middle - spread) / (1 + z * z / n), (middle + spread) / (1 + z * z / n)


def choices(rows: Sequence[Row]) -> dict[str, int]:
    """Return the place that each way of choosing takes among texts."""
    answers = [row["answer"] for row in rows]
    means, chances = [row["mean_logprob"] for row in rows], [row["chance"] for row in rows]
    found = {
        "likely": most_likely(means),
        "judge": most_likely(chances),
        "first": first_finished([row["ended"] for row in rows], [row["tokens"] for row in rows]),
        "bag": combined(answers, means, chances),
    }
    if "public" not in rows[0]:
        found["vote"] = voted(answers)
    else:
        found["public tests"] = max(range(len(rows)), key=lambda i: rows[i]["public"])
    return found


def _auto(rows: Sequence[Row]) -> int:
    """Return how many texts n="auto" writes, in rounds of four."""
    n = 4
    while n < len(rows) and another_is_wanted(n_agreeing([row["answer"] for row in rows[:n]]), n, 0.02, len(rows)):
        n += 4
    return n


def of_texts(lines: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows of the table that choose among the texts of the same tasks."""
    found: dict[tuple[str, int | str], list[tuple[bool, float, int, int]]] = {}

    def note(name: str, n: int | str, rows: Sequence[Row], place: int, extra: float = 0.0) -> None:
        lengths = [row["tokens"] for row in rows]
        spent = lockstep(lengths) if name != "first" else min(lengths) * cost(len(lengths))
        entry = rows[place]["right"], spent + extra, rows[place]["tokens"], sum(lengths)
        found.setdefault((name, n), []).append(entry)

    for line in lines:
        for n in (n for n in SIZES if n <= len(line["rows"])):
            rows = line["rows"][:n]
            if n == 1:
                note("one text", 1, rows, 0)
                continue
            for name, place in choices(rows).items():
                judging = cost(n * line["judge_rows"]) if name in ("judge", "bag") else 0.0
                note(name, n, rows, place, judging)
            note("oracle", n, rows, max(range(n), key=lambda i: rows[i]["right"]))
        if "public" not in line["rows"][0]:
            rows = line["rows"][: _auto(line["rows"])]
            note("vote", "auto", rows, choices(rows)["vote"])
    return [summed(name, n, entries) for (name, n), entries in found.items()]


def of_search(name: str, lines: Sequence[Row], lengths: Callable[[str], int]) -> dict[str, Any]:
    """Return the row of the table of a search, from a line a task."""
    entries = []
    for line in lines:
        n_tokens = sum(int(n) * count for n, count in line["forwards"].items())
        entries.append((line["right"], spent_by(line), lengths(line["text"]), n_tokens))
    way, n = sized(name.partition(" by ")[0])
    return summed(way + name[len(name.partition(" by ")[0]) :], n, entries)


def spent_by(line: Row) -> float:
    """Return what a search of a task cost in plain steps, every row of its forwards counted."""
    spent: float = sum(cost(int(n)) * count for n, count in line["forwards"].items())
    small: float = sum(cost(int(n)) * count for n, count in line.get("small_forwards", {}).items())
    return spent + 0.41 * small  # of the 0.5B: docs/figures.md


def sized(name: str) -> tuple[str, int]:
    """Return the way and the size of a search; the number of specreason is the least grade that keeps a step.

    >>> sized("particles8"), sized("specreason5"), sized("greedy")
    (('particles', 8), ('specreason5', 1), ('greedy', 1))
    """
    way = name.rstrip("0123456789")
    return (name, 1) if way in ("specreason", name) else (way, int(name[len(way) :]))


def summed(name: str, n: int | str, entries: Sequence[tuple[bool, float, int, int]]) -> dict[str, Any]:
    """Return a row of the table: accuracy, its interval, cost, and tokens."""
    right = sum(entry[0] for entry in entries)
    low, high = interval(right, len(entries))
    steps, chosen = fmean(entry[1] for entry in entries), fmean(entry[2] for entry in entries)
    row = {"way": name, "n": n, "tasks": len(entries), "accuracy": right / len(entries), "low": low, "high": high}
    return row | {"tokens": fmean(entry[3] for entry in entries), "steps": steps, "speed": chosen / steps}


def measures_of(lines: Sequence[Row]) -> dict[str, list[list[tuple[float, bool]]]]:
    """Return by measure (the judge, likelihood, brevity) and by task its value of each text, and who is right."""
    measures: dict[str, Callable[[Row], float]] = {
        "judge": lambda row: float(row["chance"]),
        "likely": lambda row: float(row["mean_logprob"]),
        "short": lambda row: -float(row["tokens"]),
    }
    return {
        name: [[(measure(row), row["right"]) for row in line["rows"]] for line in lines]
        for name, measure in measures.items()
    }


def draw(path: Path, tables: Mapping[str, Sequence[Row]]) -> None:
    """Draw accuracy against speed, a plot for each kind of task; the bars are 95 % intervals.

    A way looks the same in every plot; its points are its sizes, the fewest texts at the right.
    """
    ways = list(dict.fromkeys(row["way"] for rows in tables.values() for row in rows if row["way"] != "oracle"))
    with picture(path, (12.0, 6.2), "Accuracy against the chosen text's tokens per plain step") as figure:
        all_axes = figure.subplots(1, len(tables), squeeze=False)[0]
        for axes, (kind, rows) in zip(all_axes, tables.items(), strict=True):
            for i, way in enumerate(ways):
                mine = [row for row in rows if row["way"] == way and row["n"] != "auto"]
                if not mine:
                    continue
                shares = [100 * row["accuracy"] for row in mine]
                bars = [
                    [100 * (r["accuracy"] - r["low"]) for r in mine],
                    [100 * (r["high"] - r["accuracy"]) for r in mine],
                ]
                axes.errorbar(
                    [row["speed"] for row in mine],
                    shares,
                    yerr=bars,
                    fmt=f"{MARKS[i // len(COLORS) % len(MARKS)]}-",
                    color=COLORS[i % len(COLORS)],
                    elinewidth=0.6,
                    markersize=4,
                    label=way,
                )
            axes.set_title(kind, fontsize="medium")
            axes.set_xlabel("tokens of the answer per plain step (1: plain decoding)")
            axes.set_ylabel("right answers, %")
            axes.set_xlim(left=0)
            axes.set_ylim(0, 100)
            axes.grid(visible=True, alpha=0.3)
            axes.legend(fontsize="x-small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14))
