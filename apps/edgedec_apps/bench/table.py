"""The report of a benchmark for a person, and tables in general."""

from collections.abc import Sequence
from typing import Any

from edgedec.errors import counted
from edgedec_apps.bench.summary import Figures

_HEADINGS = ("task", "tok/s", "plain", "speedup", "same text", "accepted/step", "first token", "rounds")


def lines(document: Figures) -> list[str]:
    """Return the report of a benchmark's JSON object: a heading, a table of tasks, and notes."""
    return [heading(document), "", *table(document), "", *_notes(document)]


def table(document: Figures) -> list[str]:
    """Return the lines of the table of tasks, with what the figures are of."""
    rows = [_HEADINGS, *(_row(task, figures) for task, figures in document["tasks"].items())]
    return columns([*rows, _row("all", document["all"])])


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines of aligned columns, the first flush left and the others flush right.

    >>> columns([("task", "tok/s"), ("chat", "9.0")])
    ['task  tok/s', 'chat    9.0']
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]


def shown(value: float | None, form: str = ".2f", unit: str = "") -> str:
    """Return a figure as text; a dash for None.

    >>> shown(1.234), shown(None), shown(12.34, ".1f", " tok/s")
    ('1.23', '-', '12.3 tok/s')
    """
    return "-" if value is None else f"{value:{form}}{unit}"


def heading(document: Figures) -> str:
    """Return what was measured, in one line."""
    sampling = "greedy" if not document["temperature"] else f"temperature {document['temperature']:g}"
    if document["temperature"] and document["top_p"] is not None:
        sampling += f", top-p {document['top_p']:g}"
    parts = [
        str(document["model"]),
        str(document["runtime"]),
        f"draft {document['draft']}",
        counted(document["threads"], "thread"),
        sampling,
        f"at most {document['max_tokens']} tokens",
    ]
    if document["warm_store"]:
        parts.append("WARM STORES: drafters have learned from earlier runs")
    if document["interrupted"]:
        parts.append("INTERRUPTED")
    return " · ".join(parts)


def _row(name: str, figures: Figures) -> tuple[str, ...]:
    return (
        name.replace("\n", " ").replace("\r", " "),
        shown(figures["tok_s"], ".1f"),
        shown(figures["plain_tok_s"], ".1f"),
        shown(figures["speedup"]),
        "yes" if figures["identical"] else "NO",
        shown(figures["accepted_per_step"]),
        shown(figures["first_token_s"], ".2f", " s"),
        str(figures["n_rounds"]),
    )


def _notes(document: Figures) -> list[str]:
    noise = document["noise"]
    notes = [
        f"plain against plain: {shown(noise['ratio'], '.3f')}, in a round of a task {shown(noise['lowest'])} to "
        f"{shown(noise['highest'])}; a difference within that range is noise",
        f"least speedup of a prompt: {shown(document['worst_prompt_speedup'])} ({document['worst_prompt'] or '-'})",
    ]
    notes += [_against(name, figures) for name, figures in document["against"].items()]
    if document["curve"]:
        points = ", ".join(f"T({n}) {ms:.1f}" for n, ms in document["curve"].items())
        notes.append(f"a forward of n tokens in ms: {points}")
    bandwidth, peak = document["bandwidth_gb_s"], document["peak_rss_bytes"]
    sizes = [] if bandwidth is None else [f"memory is read at {bandwidth:.1f} GB/s"]
    sizes += [] if peak is None else [f"the process held at most {peak / 1e6:.0f} MB"]
    notes += ["; ".join(sizes)] if sizes else []
    notes += document["reasons"]
    if document["differing_prompts"]:
        advice = "please report this" if document["draft_numerics"] != "loose" else "loose numerics allow this"
        notes.append(f"OTHER TEXT than plain decoding: {', '.join(document['differing_prompts'])}; {advice}")
    return notes


def _against(name: str, figures: dict[str, Any]) -> str:
    lookup = "" if figures["lookup_tok_s"] is None else f"{figures['lookup_tok_s']:.1f} tok/s"
    if figures["lookup_reason"]:
        lookup = f"not measured: {figures['lookup_reason']}"
    return f"{name}: {shown(figures['tok_s'], '.1f', ' tok/s')}" + (
        f"; with its prompt lookup {lookup}" if lookup else ""
    )
