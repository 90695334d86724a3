"""The options of `edgedec eval`, apart from the evaluation, which takes long to import."""

from dataclasses import dataclass
from pathlib import Path

from edgedec_apps.cli.declared import eval_flag, sampling_flag, tuning_flag
from edgedec_apps.cli.options import AsJson, JsonOut, ModelName, Offline, Quiet, RuntimeName, Threads


@dataclass(frozen=True, kw_only=True)
class EvalJob:
    """The arguments and options of `edgedec eval`."""

    model: ModelName
    text: Path | None = eval_flag("--text FILE", "A text in UTF-8 (default: edgedec's own, 2,200 tokens).")
    window: int = eval_flag("--window N", "Cut the text into windows of at most N tokens.", 512)
    max_tokens: int | None = eval_flag("--max-tokens -n N", "Only the first N tokens of the text.")
    kv_type: list[str] | None = eval_flag("--kv-type T", "Element type of the KV cache (default: f16). Repeatable.")
    layers: list[str] | None = eval_flag("--layers R", "Layers to run, such as 0-11,14-29, or all. Repeatable.")
    layer_skip: list[float] | None = eval_flag(
        "--layer-skip X",
        "LOSSY: the layers that edgedec run --method layer-skip:X would run, without its limit. Repeatable.",
    )
    against: str = eval_flag(
        "--against MODEL",
        "The model of the baseline: another file with the same vocabulary, or same.",
        "same",
    )
    against_runtime: str | None = eval_flag(
        "--against-runtime NAME", "The runtime of the baseline (default: the same)."
    )
    plot: Path | None = eval_flag(
        "--plot FILE",
        "Also draw quality against speed, with error bars, as an SVG or a PNG (needs matplotlib).",
    )
    plot_text: bool = eval_flag("--plot-text", "Also draw quality against speed, in plain text.", False)
    runtime: RuntimeName = "auto"
    threads: Threads = None
    offline: Offline = False
    as_json: AsJson = False
    json_out: JsonOut = None
    quiet: Quiet = False


@dataclass(frozen=True, kw_only=True)
class TuneJob:
    """The arguments and options of `edgedec tune-skip`."""

    model: ModelName
    text: Path | None = tuning_flag(
        "--text FILE",
        "A text in UTF-8 like those that the model is to write (default: edgedec's own, answers and code).",
    )
    seconds: float = tuning_flag("--seconds X", "End the search after X seconds at the latest.", 60.0)
    least: float = tuning_flag("--least X", "Leave out at least this share of a token's bytes.", 0.2)
    positions: int = tuning_flag("--positions N", "Compare on N positions of held-out text.", 512)
    lossy: bool = tuning_flag("--lossy", "Search for --method layer-skip instead, where no draft is verified.", False)
    seed: int = sampling_flag("--seed N", "Same seed, same text.", 0)
    runtime: RuntimeName = "cpu"
    threads: Threads = None
    offline: Offline = False
    as_json: AsJson = False
    json_out: JsonOut = None
    quiet: Quiet = False
