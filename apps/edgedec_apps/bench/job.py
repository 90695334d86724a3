"""The options of `edgedec bench`, apart from the measuring, which takes long to import."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from edgedec_apps.cli.options import LoadFlags, ModelName, OutputFlags, option
from edgedec_apps.cli.sampling_options import sampling_option

_BENCH = "Benchmark"


@dataclass(frozen=True, kw_only=True)
class BenchJob:
    """The arguments and options of `edgedec bench`."""

    model: ModelName
    prompts: Annotated[
        Path | None,
        option(
            "--prompts",
            help="One JSON object a line: id, task, turns (default: edgedec's own, 4 of each of 5 tasks).",
            metavar="FILE",
            panel=_BENCH,
        ),
    ] = None
    per_task: Annotated[
        int | None, option("--per-task", help="Only the first N prompts of every task.", metavar="N", panel=_BENCH)
    ] = None
    against: Annotated[
        str | None,
        option(
            "--against",
            help="Also measure llamacpp, or our cpu runtime beside a GPU, in turns.",
            metavar="NAME",
            panel=_BENCH,
        ),
    ] = None
    warm_store: Annotated[
        bool, option("--warm-store", help="Let drafters keep what they learned in earlier runs.", panel=_BENCH)
    ] = False
    rows: Annotated[
        Path | None,
        option("--rows", help="Record drafts, for benchmarks/speed/draft_yields.py.", metavar="FILE", panel=_BENCH),
    ] = None
    curve_out: Annotated[
        Path | None,
        option("--curve-out", help="Write the measured cost curve to this file.", metavar="FILE", panel=_BENCH),
    ] = None
    plot: Annotated[
        Path | None,
        option(
            "--plot",
            help="Also draw tokens/s by task, with the noise, as an SVG or a PNG (needs matplotlib).",
            metavar="FILE",
            panel=_BENCH,
        ),
    ] = None
    max_tokens: Annotated[int, sampling_option("--max-tokens", "-n", help="Most tokens to generate.", metavar="N")] = (
        160
    )
    temperature: Annotated[
        float, sampling_option("--temperature", "-t", help="0 takes the most probable token.", metavar="X")
    ] = 0.0
    top_p: Annotated[
        float | None, sampling_option("--top-p", help="Keep this much probability; 1 is off.", metavar="X")
    ] = None
    load: LoadFlags
    output: OutputFlags
