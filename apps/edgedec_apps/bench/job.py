"""The options of `edgedec bench`, apart from the measuring, which takes long to import."""

from dataclasses import dataclass
from pathlib import Path

from edgedec_apps.cli.declared import bench_flag, sampling_flag
from edgedec_apps.cli.options import LoadFlags, ModelName, OutputFlags


@dataclass(frozen=True, kw_only=True)
class BenchJob:
    """The arguments and options of `edgedec bench`."""

    model: ModelName
    prompts: Path | None = bench_flag(
        "--prompts FILE",
        "One JSON object a line: id, task, turns (default: edgedec's own, 4 of each of 5 tasks).",
    )
    per_task: int | None = bench_flag("--per-task N", "Only the first N prompts of every task.")
    against: str | None = bench_flag(
        "--against NAME", "Also measure llamacpp, or our cpu runtime beside a GPU, in turns."
    )
    warm_store: bool = bench_flag("--warm-store", "Let drafters keep what they learned in earlier runs.", False)
    rows: Path | None = bench_flag("--rows FILE", "Record drafts, for benchmarks/speed/draft_yields.py.")
    curve_out: Path | None = bench_flag("--curve-out FILE", "Write the measured cost curve to this file.")
    plot: Path | None = bench_flag(
        "--plot FILE",
        "Also draw tokens/s by task, with the noise, as an SVG or a PNG (needs matplotlib).",
    )
    max_tokens: int = sampling_flag("--max-tokens -n N", "Most tokens to generate.", 160)
    temperature: float = sampling_flag("--temperature -t X", "0 takes the most probable token.", 0.0)
    top_p: float | None = sampling_flag("--top-p X", "Keep this much probability; 1 is off.")
    load: LoadFlags
    output: OutputFlags
