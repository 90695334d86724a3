"""The options of `edgedec tune-skip`, apart from the search, which takes long to import."""

from dataclasses import dataclass
from pathlib import Path

from edgedec_apps.cli.declared import sampling_flag, tuning_flag
from edgedec_apps.cli.options import AsJson, JsonOut, ModelName, Offline, Quiet, RuntimeName, Threads


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
