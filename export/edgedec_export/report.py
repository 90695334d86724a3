"""The report of an export: its cost and its quality, as report.json and report.md in its folder and as terminal lines.

All figures are measured on this machine. Quality compares the export with its source, which runs on the cpu runtime:
both predict every token of a text from the true tokens before it. Times are medians of forwards behind a prefix, run
as decoding runs them.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from edgedec.errors import as_storage_error
from edgedec.model import Model, Session
from edgedec.progress import CancelToken, check_cancelled

ROWS = (1, 2, 4, 8)
"""The numbers of rows for which a forward is timed."""

_N_PAST = 64
_ROUNDS = 7


def forward_times(models: Sequence[Model], cancel: CancelToken | None = None) -> list[dict[int, float]]:
    """Return for each model its forward times T(n) by number of rows n in ROWS, in seconds.

    Each time is the median of several rounds; every round times all models and all n once. A forward returns the logits
    of all its rows, and follows on 64 cached tokens.

    Raises:
        CancelledError: `cancel` was cancelled.
    """
    sessions = [model.session(_N_PAST + max(ROWS) + 1) for model in models]
    per_model: list[dict[int, list[float]]] = [{n: [] for n in ROWS} for _ in models]
    try:
        tokens = [np.arange(_N_PAST + max(ROWS), dtype=np.int32) % model.card.n_vocab for model in models]
        for session, ids in zip(sessions, tokens, strict=True):
            session.forward(ids[:_N_PAST], n_past=0)
        for _ in range(_ROUNDS):
            for session, ids, times in zip(sessions, tokens, per_model, strict=True):
                for n in ROWS:
                    check_cancelled(cancel, "timing forwards")
                    times[n].append(_seconds(session, ids[_N_PAST : _N_PAST + n]))
    finally:
        for session in sessions:
            session.close()
    return [{n: median(seconds) for n, seconds in times.items()} for times in per_model]


def write_report(folder: Path, document: Mapping[str, Any]) -> None:
    """Write report.json and report.md into the folder of an export.

    Raises:
        StorageError: A file cannot be written.
    """
    text = "\n".join(["# Report of an export", "", *markdown(document), ""])
    with as_storage_error(
        f"{folder}: the export is complete, its report cannot be written", "make room, or export again with --no-report"
    ):
        (folder / "report.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        (folder / "report.md").write_text(text, encoding="utf-8")


def rows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the figures of a report, a JSON object, as pairs of a label and a value with its unit.

    >>> document = {"source_bytes": 10**9, "bytes": 5 * 10**8, "export_s": 9.96, "peak_bytes": None}
    >>> rows(document)
    [('size of the source', '1000.0 MB'), ('size of the export', '500.0 MB (0.50 of the source)'), ('time', '10.0 s')]
    """
    source, size, peak = document["source_bytes"], document["bytes"], document["peak_bytes"]
    lines = [
        ("size of the source", _mb(source)),
        ("size of the export", f"{_mb(size)} ({size / source:.2f} of the source)"),
        ("time", f"{document['export_s']:.1f} s"),
    ]
    if peak is not None:
        lines.append(("peak of resident memory", _mb(peak)))
    quality = document.get("quality")
    if quality is not None:
        lines += [
            ("KL divergence from the source, mean", f"{quality['kl_mean']:.3g} nats"),
            ("its 99th percentile", f"{quality['kl_p99']:.3g} nats"),
            ("same most probable token", f"{100 * quality['top1']:.2f} % of {quality['n_positions']}"),
            ("perplexity; the source's", f"{quality['ppl']:.3f}; {quality['ppl_source']:.3f}"),
        ]
    for n, seconds in document.get("seconds", {}).items():
        plural = "" if n == "1" else "s"
        here, there = (f"{1000 * seconds[name]:.1f} ms" for name in ("export", "source"))
        lines.append((f"forward of {n} token{plural}; the source's", f"{here}; {there}"))
    return lines


def markdown(document: Mapping[str, Any]) -> list[str]:
    """Return a report, a JSON object, as lines of Markdown."""
    lines = [
        f"{document['source']}, `--quant {document['quant']} --kv {document['kv']}`, made by edgedec "
        f"{document['versions']['edgedec']}.",
        "",
        "| what | figure |",
        "|---|---|",
        *(f"| {what} | {figure} |" for what, figure in rows(document)),
    ]
    if document.get("quality") is not None:
        versions = ", ".join(f"{name} {value}" for name, value in document["versions"].items())
        lines += ["", f"Measured with {document['threads']} threads; {versions}. The source runs on the cpu runtime."]
    return lines


def _seconds(session: Session, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> float:
    started = perf_counter()
    session.forward(tokens, n_past=_N_PAST, rows="all")
    return perf_counter() - started


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f} MB"
