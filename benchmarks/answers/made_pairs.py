"""What better_answers.py compares task by task: pairs of ways, and intervals.

Accuracies of few tasks have wide intervals, but two ways that ran on the same tasks can be compared by the tasks on
which they differ.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import comb
from statistics import fmean
from typing import Any

import numpy as np
from made_table import choices, interval, lockstep, spent_by

Row = Mapping[str, Any]
_SAMPLES = 1000


def _chosen(line: Row, way: str, n: int) -> Row:
    rows = line["rows"][:n]
    found: Row = rows[choices(rows)[way]]
    return found


def rights_of(lines: Sequence[Row], way: str, n: int) -> dict[str, bool]:
    """Return by task whether a way of choosing among its first n texts is right."""
    return {line["task"]: _chosen(line, way, n)["right"] for line in lines}


def compared(ours: Mapping[str, bool], theirs: Mapping[str, bool]) -> dict[str, Any]:
    """Return how many tasks only one of two ways gets right, and the exact p of as uneven a split by chance.

    McNemar's test (1947) in its exact, two-sided form, on the tasks that both have.

    >>> compared({"a": True, "b": True, "c": False}, {"a": False, "b": True, "c": False})
    {'tasks': 3, 'right': 2, 'other right': 1, 'only ours': 1, 'only theirs': 0, 'p': 1.0}
    """
    both = [task for task in ours if task in theirs]
    won, lost = (sum(a[task] and not b[task] for task in both) for a, b in ((ours, theirs), (theirs, ours)))
    n, k = won + lost, min(won, lost)
    p = min(1.0, 2 * sum(comb(n, i) for i in range(k + 1)) / 2**n) if n else 1.0
    counts = {"tasks": len(both), "right": sum(ours[t] for t in both), "other right": sum(theirs[t] for t in both)}
    return counts | {"only ours": won, "only theirs": lost, "p": round(p, 4)}


def at_budget(searched: Sequence[Row], lines: Sequence[Row], way: str) -> dict[str, Any]:
    """Return how a search compares with a way of choosing among as many texts as its mean cost pays for.

    The numbers of texts are 1 to all; with "n" texts the way costs no more than the search, unless one text does.
    """
    mine = {line["task"]: line for line in searched}
    both = [line for line in lines if line["task"] in mine]
    if not both:
        return {}
    spent = fmean(spent_by(mine[line["task"]]) for line in both)
    costs = [
        fmean(lockstep([row["tokens"] for row in line["rows"][: n + 1]]) for line in both)
        for n in range(min(len(line["rows"]) for line in both))
    ]
    n = max([1, *(i + 1 for i, each in enumerate(costs) if each <= spent)])
    facts = {"n": n, "steps": round(spent, 1), "other steps": round(costs[n - 1], 1)}
    return facts | compared({task: line["right"] for task, line in mine.items()}, rights_of(both, way, n))


def passing(lines: Sequence[Row]) -> dict[str, int]:
    """Return what bounds the choice by tests: texts that pass the public ones, and how many of them fail hidden ones.

    Of tasks: in how many some text is right, and in how many the choice passes the public tests and is wrong.
    """
    texts = [row for line in lines for row in line["rows"] if row["public"] == 1]
    chosen = [_chosen(line, "public tests", len(line["rows"])) for line in lines]
    found = {"texts": sum(len(line["rows"]) for line in lines), "pass public": len(texts)}
    found |= {"of these wrong": sum(not row["right"] for row in texts), "tasks": len(lines)}
    found |= {"some text right": sum(any(row["right"] for row in line["rows"]) for line in lines)}
    return found | {"chosen passes, wrong": sum(row["public"] == 1 and not row["right"] for row in chosen)}


def rows_of_ways(lines: Iterable[Row], means: Sequence[str], against: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each way of lines with "way", "task" and "right", on the tasks that every way has.

    A row has the right answers with Wilson's interval, the means of the named figures (None where a figure is None),
    and what `compared` says of the way beside those of `against`.
    """
    by_way = dict[str, dict[str, Row]]()
    for line in lines:
        by_way.setdefault(line["way"], {})[line["task"]] = line
    tasks = sorted(set.intersection(*map(set, by_way.values()))) if by_way else []
    rights = {way: {task: bool(found[task]["right"]) for task in tasks} for way, found in by_way.items()}
    rows = []
    for way, found in by_way.items() if tasks else ():
        low, high = interval(sum(rights[way].values()), len(tasks))
        row: dict[str, Any] = {"way": way, "tasks": len(tasks), "right": sum(rights[way].values())}
        row |= {"low": round(max(0.0, low), 5), "high": round(high, 5)}
        for name in means:
            values = [found[task][name] for task in tasks]
            row[name] = None if None in values else round(fmean(values), 3)
        others = [other for other in against if other in by_way and other != way]
        rows.append(row | {f"against {other}": compared(rights[way], rights[other]) for other in others})
    return rows


def auroc_of(groups: Sequence[Sequence[tuple[float, bool]]]) -> dict[str, float | None]:
    """Return the AUROC of scores over all texts and within tasks, with 95 % intervals.

    The intervals are a bootstrap over tasks (Efron 1979), as texts of one task are alike.

    Args:
        groups: By task, its texts' scores and whether each is right.
    """
    rng, found = random.Random(0), dict[str, float | None]()
    measures: dict[str, Callable[[Sequence[Sequence[tuple[float, bool]]]], float | None]] = {
        "all texts": pooled,
        "within tasks": _within,
    }
    for name, measure in measures.items():
        drawn = [measure(rng.choices(groups, k=len(groups))) for _ in range(_SAMPLES)]
        known = sorted(value for value in drawn if value is not None)
        found[name] = measure(groups)
        if known:
            found[f"{name}, low"] = known[int(0.025 * len(known))]
            found[f"{name}, high"] = known[int(0.975 * len(known))]
    return found


def pooled(groups: Sequence[Sequence[tuple[float, bool]]]) -> float | None:
    """Return the chance that a right text scores higher than a wrong one, equal ones half; None without a pair."""
    right, wrong = (np.sort([score for group in groups for score, yes in group if yes == wanted]) for wanted in (1, 0))
    if not len(right) or not len(wrong):
        return None
    wins = np.searchsorted(wrong, right, "left").sum() + np.searchsorted(wrong, right, "right").sum()
    return float(wins / (2 * len(right) * len(wrong)))


def _within(groups: Sequence[Sequence[tuple[float, bool]]]) -> float | None:
    inside = [value for group in groups if (value := pooled([group])) is not None]
    return fmean(inside) if inside else None
