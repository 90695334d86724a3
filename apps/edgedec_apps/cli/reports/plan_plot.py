"""A memory plan as a picture: a bar for each term, beginning where the one before it ends, the sum, and the cap."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgedec.memory_plan import format_bytes
from edgedec_apps.pictures import COLORS, label, picture

_MB = 1e6
_MOST_TIMES = 3  # a cap of more times the total would make all bars small
_BAR_INCHES, _HEAD_INCHES, _WIDTH_INCHES = 0.32, 1.6, 9.0


def write_plot(path: Path, document: Mapping[str, Any]) -> None:
    """Draw the JSON object of `edgedec plan`: megabytes (10^6 bytes) by term, from zero.

    Terms that grow with a text are hatched, as they are held only with a full context.

    Raises:
        StorageError: The file can't be written; an earlier file is unchanged.
    """
    terms, total, cap = document["terms"], document["total_bytes"] / _MB, document["cap_bytes"]
    inches = (_WIDTH_INCHES, _HEAD_INCHES + _BAR_INCHES * (len(terms) + 1))
    with picture(path, inches, f"{document['model']} · {document['setting']['context']} tokens of context") as figure:
        axes = figure.subplots()
        before = 0.0
        for row, term in enumerate(terms):
            width = term["n_bytes"] / _MB
            hatch = "///" if term["grows"] else None
            bar = axes.barh(row, width, left=before, color=COLORS[0], hatch=hatch, edgecolor="white", linewidth=0)
            bar[0].set_gid(f"term-{row}")
            before += width
            axes.annotate(format_bytes(term["n_bytes"]), (before, row), (4, 0), textcoords="offset points", va="center")
        bar = axes.barh(len(terms), total, color=COLORS[1])
        bar[0].set_gid("total")
        size = format_bytes(document["total_bytes"]) + (" and more" if document["partial"] else "")
        axes.annotate(size, (total, len(terms)), (4, 0), textcoords="offset points", va="center")
        shown = None if cap is None else min(cap / _MB, _MOST_TIMES * total)
        if shown is not None:
            told = f"{document['cap_name']}: {format_bytes(cap)}"
            if shown == cap / _MB:
                axes.axvline(shown, color=COLORS[5], linestyle="--").set_gid("cap")
            else:
                told += ", beyond the axis →"
            axes.annotate(told, (shown, -0.6), (-3, 2), textcoords="offset points", ha="right", color=COLORS[5])
        names = [term["name"] + (" (grows)" if term["grows"] else "") for term in terms]
        axes.set_yticks(range(len(terms) + 1), [label(name) for name in [*names, "total"]])
        axes.set_ylim(len(terms) + 0.6, -1.1)
        axes.set_xlim(0, 1.15 * max(total, shown or 0.0))
        axes.set_xlabel("MB; hatched: held only as texts fill it")
        axes.grid(visible=True, axis="x", alpha=0.3)
        axes.set_axisbelow(True)
