"""The options of `edgedec eval`, apart from the evaluation, which takes long to import."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from edgedec_apps.cli.options import AsJson, JsonOut, ModelName, Offline, Quiet, RuntimeName, Threads, option

_EVAL = "Evaluation"


@dataclass(frozen=True, kw_only=True)
class EvalJob:
    """The arguments and options of `edgedec eval`."""

    model: ModelName
    text: Annotated[
        Path | None,
        option("--text", help="A text in UTF-8 (default: edgedec's own, 2,200 tokens).", metavar="FILE", panel=_EVAL),
    ] = None
    window: Annotated[
        int, option("--window", help="Cut the text into windows of at most N tokens.", metavar="N", panel=_EVAL)
    ] = 512
    max_tokens: Annotated[
        int | None, option("--max-tokens", "-n", help="Only the first N tokens of the text.", metavar="N", panel=_EVAL)
    ] = None
    kv_type: Annotated[
        list[str] | None,
        option("--kv-type", help="Element type of the KV cache (default: f16). Repeatable.", metavar="T", panel=_EVAL),
    ] = None
    layers: Annotated[
        list[str] | None,
        option("--layers", help="Layers to run, such as 0-11,14-29, or all. Repeatable.", metavar="R", panel=_EVAL),
    ] = None
    layer_skip: Annotated[
        list[float] | None,
        option(
            "--layer-skip",
            help="LOSSY: the layers that edgedec run --method layer-skip:X would run, without its limit. Repeatable.",
            metavar="X",
            panel=_EVAL,
        ),
    ] = None
    against: Annotated[
        str,
        option(
            "--against",
            help="The model of the baseline: another file with the same vocabulary, or same.",
            metavar="MODEL",
            panel=_EVAL,
        ),
    ] = "same"
    against_runtime: Annotated[
        str | None,
        option(
            "--against-runtime", help="The runtime of the baseline (default: the same).", metavar="NAME", panel=_EVAL
        ),
    ] = None
    plot: Annotated[
        Path | None,
        option(
            "--plot",
            help="Also draw quality against speed, with error bars, as an SVG or a PNG (needs matplotlib).",
            metavar="FILE",
            panel=_EVAL,
        ),
    ] = None
    plot_text: Annotated[
        bool, option("--plot-text", help="Also draw quality against speed, in plain text.", panel=_EVAL)
    ] = False
    runtime: RuntimeName = "auto"
    threads: Threads = None
    offline: Offline = False
    as_json: AsJson = False
    json_out: JsonOut = None
    quiet: Quiet = False
