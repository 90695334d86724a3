"""edgedec simulate: its options; edgedec_apps.bench.simulate replays."""

from pathlib import Path
from typing import Annotated

import typer

from edgedec.load_options import N_DRAFT_MAX
from edgedec_apps.cli.options import AsJson, option

_BENCH = "Benchmark"


def command(
    rows: Annotated[
        list[Path],
        typer.Argument(metavar="ROWS...", help="Files of edgedec bench --rows; several are compared."),
    ],
    *,
    curve: Annotated[
        str | None,
        option(
            "--curve",
            help="A file of edgedec bench --curve-out, or a modelled device (default: all of these).",
            metavar="FILE",
            panel=_BENCH,
        ),
    ] = None,
    draft_max: Annotated[
        int, option("--draft-max", help="Most tokens of a draft.", metavar="N", panel=_BENCH)
    ] = N_DRAFT_MAX,
    delay_ms: Annotated[
        float,
        option(
            "--delay-ms",
            help="What each forward waits for another machine (rpc), on top of the curve.",
            metavar="MS",
            panel=_BENCH,
        ),
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Replay recorded drafts with the forward times of another device: would speculation be faster there?

    For several recordings of the same texts, a table for each device says which way to draft is the fastest there. The
    time of drafting counts: a forward through some of the layers by their bytes, a draft model's by its own bytes. With
    --delay-ms each forward of the target waits for another machine, and a draft model's does not: drafts pay more.
    """
    from edgedec_apps.bench.simulate import simulate

    simulate(rows, curve, n_max=draft_max, delay_s=delay_ms / 1000, as_json=as_json)
