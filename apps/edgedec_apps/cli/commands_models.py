"""The commands that deal with model files, and their options; see commands.py."""

from pathlib import Path
from typing import Annotated

import typer

from edgedec_apps.cli.options import (
    AsJson,
    JsonOut,
    ModelName,
    Offline,
    Quiet,
    RuntimeName,
    Threads,
    model_option,
    option,
    sampling_option,
    tiles_option,
)

_TUNING = "Search"
_EXPORT = "Export"


def export(
    model: ModelName,
    *,
    to: Annotated[str, option("--to", help="What to make: onnx, or gguf.", metavar="FORMAT", panel=_EXPORT)] = "onnx",
    via: Annotated[
        str | None,
        option(
            "--via",
            help="onnx: optimum, for a Hugging Face checkpoint (a folder, or hf:OWNER/REPO) of another architecture.",
            metavar="TOOL",
            panel=_EXPORT,
        ),
    ] = None,
    target: Annotated[
        str,
        option(
            "--target", help="onnx: cpu, or npu for static graphs in 16 and 8 bits.", metavar="DEVICE", panel=_EXPORT
        ),
    ] = "cpu",
    out: Annotated[
        Path | None,
        option("--out", "-o", help="Folder or GGUF to make (default: here, NAME-onnx).", metavar="PATH", panel=_EXPORT),
    ] = None,
    quant: Annotated[
        str,
        option(
            "--quant",
            help="Weights: exact keeps every value, balanced and small round where it costs little.",
            metavar="Q",
            panel=_EXPORT,
        ),
    ] = "exact",
    kv: Annotated[
        str, option("--kv", help="Element type of the KV cache: f32, or int8.", metavar="T", panel=_EXPORT)
    ] = "f32",
    report: Annotated[
        bool,
        option("--report/--no-report", help="Measure the export against its source (default: yes).", panel=_EXPORT),
    ] = True,
    type_name: Annotated[
        str | None,
        option("--type", help="gguf: type of the weights, such as Q4_K_M, Q8_0, F16.", metavar="TYPE", panel=_EXPORT),
    ] = None,
    layers: Annotated[
        str | None,
        option("--layers", help="gguf: keep so many layers, or a list (0-13,20-27).", metavar="LIST", panel=_EXPORT),
    ] = None,
    allow_requantize: Annotated[
        bool, option("--allow-requantize", help="gguf: quantize what is quantized already.", panel=_EXPORT)
    ] = False,
    force: Annotated[bool, option("--force", help="Replace an earlier export.", panel=_EXPORT)] = False,
    offline: Offline = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Export a model to a folder that onnxruntime runs, here or on another device; or to another GGUF.

    It is read from a GGUF tensor by tensor. For --to gguf, MODEL may also be a folder with a Hugging Face checkpoint;
    for --via optimum it is one.
    What was not finished leaves nothing behind.
    """
    from edgedec_apps.cli.export import ExportJob, run_export
    from edgedec_apps.cli.export_gguf import GGUFOptions

    run_export(
        ExportJob(
            model=model,
            to=to,
            via=via,
            target=target,
            out=out,
            quant=quant,
            kv=kv,
            report=report,
            gguf=GGUFOptions(type_name, layers, allow_requantize),
            force=force,
            offline=offline,
            as_json=as_json,
            quiet=quiet,
        )
    )


def tune_skip(
    model: ModelName,
    *,
    text: Annotated[
        Path | None,
        option(
            "--text",
            help="A text in UTF-8, best what the model is to write (default: our own, answers and code).",
            metavar="FILE",
            panel=_TUNING,
        ),
    ] = None,
    seconds: Annotated[
        float, option("--seconds", help="End the search after X seconds, if need be.", metavar="X", panel=_TUNING)
    ] = 60.0,
    least: Annotated[
        float, option("--least", help="Leave out at least this share of a token's bytes.", metavar="X", panel=_TUNING)
    ] = 0.2,
    positions: Annotated[
        int, option("--positions", help="Compare on N positions of the text held back.", metavar="N", panel=_TUNING)
    ] = 512,
    lossy: Annotated[
        bool, option("--lossy", help="Search for --layer-skip instead, where nothing verifies.", panel=_TUNING)
    ] = False,
    seed: Annotated[int, sampling_option("--seed", help="Same seed, same text.", metavar="N")] = 0,
    runtime: RuntimeName = "cpu",
    threads: Threads = None,
    offline: Offline = False,
    as_json: AsJson = False,
    json_out: JsonOut = None,
    quiet: Quiet = False,
) -> None:
    """Search for the half-layers that a model drafts best without, and keep the set for --draft skip.

    A draft follows what the whole model made of the text before it; without a verification (--lossy) every token goes
    through the set, which is another search. Attention and feed-forward blocks are left out apart. What was found is
    compared with evenly spaced layers, late layers and an early exit of as many bytes: how often each has the whole
    model's most probable token, and how far it is from it in nats. The same seed finds the same set, unless --seconds
    ends the search.
    """
    from edgedec_apps.cli.tune_skip import TuneJob, run_tune_skip

    run_tune_skip(
        TuneJob(
            model=model,
            text=text,
            seconds=seconds,
            seed=seed,
            least_saved=least,
            n_positions=positions,
            lossy=lossy,
            runtime=runtime,
            threads=threads,
            offline=offline,
            as_json=as_json,
            json_out=json_out,
            quiet=quiet,
        )
    )


def pull(
    model: ModelName,
    *,
    force: Annotated[bool, model_option("--force", help="Check the files again, and fetch what is damaged.")] = False,
    offline: Offline = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Fetch a model, or resume fetching it, and check it."""
    from edgedec_apps.cli.models import pull_model

    pull_model(model, force=force, offline=offline, quiet=quiet, as_json=as_json)


def list_models(*, as_json: AsJson = False) -> None:
    """List the models on this machine, and those that the catalogue can fetch."""
    from edgedec_apps.cli.models import print_models

    print_models(as_json=as_json)


def rm(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name that edgedec list shows.")],
) -> None:
    """Delete a model and its tiles from the cache; files elsewhere are never touched."""
    from edgedec_apps.cli.models import delete_model

    delete_model(model)


def info(model: ModelName, *, as_json: AsJson = False) -> None:
    """Show a model's architecture, quantization, context, memory, defaults and runtimes.

    Nothing is fetched, and only the file's header is read.
    """
    from edgedec_apps.cli.info import print_info

    print_info(model, as_json=as_json)


def doctor(*, as_json: AsJson = False) -> None:
    """Show CPU features, memory, runtimes, devices, plug-ins and versions."""
    from edgedec_apps.cli.doctor import print_report

    print_report(as_json=as_json)


def cache_list(*, as_json: AsJson = False) -> None:
    """List the tile files, what they take and whether their model is still there; and environments of optimum."""
    from edgedec_apps.cli.cache import print_tiles

    print_tiles(as_json=as_json)


def cache_prune(
    *,
    everything: Annotated[bool, tiles_option("--all", help="Delete all of them, the current ones, too.")] = False,
) -> None:
    """Delete tile files whose model is gone or has changed, old environments of optimum, and unfinished work."""
    from edgedec_apps.cli.cache import delete_tiles

    delete_tiles(everything=everything)


def cache_verify(*, quiet: Quiet = False) -> None:
    """Read all tile files, and delete those that are damaged: the next start writes them anew."""
    from edgedec_apps.cli.cache import verify_tiles

    verify_tiles(quiet=quiet)
