"""The options of `edgedec tune-skip`, apart from the search, which takes long to import."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from edgedec_apps.cli.options import AsJson, JsonOut, ModelName, Offline, Quiet, RuntimeName, Threads, option
from edgedec_apps.cli.sampling_options import sampling_option

_TUNING = "Search"


@dataclass(frozen=True, kw_only=True)
class TuneJob:
    """The arguments and options of `edgedec tune-skip`."""

    model: ModelName
    text: Annotated[
        Path | None,
        option(
            "--text",
            help="A text in UTF-8 like those that the model is to write (default: edgedec's own, answers and code).",
            metavar="FILE",
            panel=_TUNING,
        ),
    ] = None
    seconds: Annotated[
        float, option("--seconds", help="End the search after X seconds at the latest.", metavar="X", panel=_TUNING)
    ] = 60.0
    least: Annotated[
        float, option("--least", help="Leave out at least this share of a token's bytes.", metavar="X", panel=_TUNING)
    ] = 0.2
    positions: Annotated[
        int, option("--positions", help="Compare on N positions of held-out text.", metavar="N", panel=_TUNING)
    ] = 512
    lossy: Annotated[
        bool,
        option("--lossy", help="Search for --method layer-skip instead, where no draft is verified.", panel=_TUNING),
    ] = False
    seed: Annotated[int, sampling_option("--seed", help="Same seed, same text.", metavar="N")] = 0
    runtime: RuntimeName = "cpu"
    threads: Threads = None
    offline: Offline = False
    as_json: AsJson = False
    json_out: JsonOut = None
    quiet: Quiet = False
