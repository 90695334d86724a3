"""edgedec export: a model as a folder for onnxruntime, with a report on what the export costs; or as another GGUF."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from edgedec.errors import RequestError, RuntimeUnavailableError
from edgedec.load_options import ResolveOptions
from edgedec.memory.system import peak_resident_bytes
from edgedec.memory_plan import format_bytes
from edgedec.progress import CancelToken, OnProgress, stage
from edgedec.storage.cache_files import cache_folder
from edgedec_apps.cli import completion
from edgedec_apps.cli.declared import export_flag
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.options import AsJson, ModelName, Offline, Quiet
from edgedec_apps.cli.output_files import default_name
from edgedec_apps.cli.shown.log import warnings_of
from edgedec_apps.cli.shown.progress import ProgressLine
from edgedec_apps.cli.shown.terminal import one_line, say, write_json
from edgedec_apps.cli.wording import in_options
from edgedec_apps.texts import adapter
from edgedec_models.fetching.offline import offline_reason

_VALUES = {"to": ("onnx", "gguf"), "target": ("cpu", "npu"), "via": ("optimum", None)}


@dataclass(frozen=True, kw_only=True)
class ExportJob:
    """The arguments and options of `edgedec export`."""

    model: ModelName
    to: str = export_flag(
        "--to FORMAT", "What to make: onnx, or gguf.", "onnx", complete=completion.one_of("onnx", "gguf")
    )
    via: str | None = export_flag(
        "--via TOOL",
        "onnx: optimum, for a Hugging Face checkpoint (a folder, or hf:OWNER/REPO) of another architecture.",
        complete=completion.one_of("optimum"),
    )
    target: str = export_flag(
        "--target DEVICE",
        "onnx: cpu, or npu for static graphs in 16 and 8 bits.",
        "cpu",
        complete=completion.one_of("cpu", "npu"),
    )
    out: Path | None = export_flag("--out -o PATH", "Folder or GGUF to make (default: here, NAME-onnx).")
    quant: str = export_flag(
        "--quant Q",
        "onnx: exact keeps every weight; balanced and small round weights where that costs little.",
        "exact",
        complete=completion.one_of("exact", "balanced", "small"),
    )
    kv: str = export_flag(
        "--kv T",
        "onnx: element type of the KV cache, f32 or int8.",
        "f32",
        complete=completion.one_of("f32", "int8"),
    )
    report: bool = export_flag("--report/--no-report", "Measure the export against its source (default: yes).", True)
    type_name: str | None = export_flag(
        "--type TYPE",
        "gguf: type of the weights, such as Q4_K_M, Q8_0, F16; of a draft head also by tensor (Q4_0,fc=Q8_0).",
        complete=completion.one_of(*completion.EXPORTED_TYPES.split()),
    )
    draft_for: str | None = export_flag(
        "--for MODEL",
        "gguf of a draft head: the model that it belongs to.",
        complete=completion.any_model,
    )
    own_output: bool = export_flag(
        "--own-output",
        "gguf of a draft head: copy the output rows that it borrows, so that llama.cpp uses its short list.",
        False,
    )
    vocabulary: int | None = export_flag(
        "--vocabulary N", "gguf of a draft head: keep only the first N tokens of its list."
    )
    layers: str | None = export_flag("--layers LIST", "gguf: keep so many layers, or a list (0-13,20-27).")
    lora: list[str] | None = export_flag(
        "--lora FILE[=SCALE]",
        "gguf: a LoRA adapter to merge into the weights, perhaps with its scale. Repeatable.",
    )
    allow_requantize: bool = export_flag("--allow-requantize", "gguf: also quantize weights that are quantized.", False)
    force: bool = export_flag("--force", "Replace an earlier export.", False)
    offline: Offline = False
    as_json: AsJson = False
    quiet: Quiet = False


def command(job: ExportJob) -> None:
    """Export a model to a folder that onnxruntime runs, here or on another device; or to another GGUF.

    MODEL is a GGUF, which is read tensor by tensor. For --to gguf it may also be a folder with a Hugging Face
    checkpoint, or a trained draft head (with --for); for --via optimum it is such a checkpoint. An export that does not
    finish leaves no files.
    """
    _check(job)
    make: Callable[[ExportJob, OnProgress, CancelToken], dict[str, Any]] = (
        _make_via_optimum if job.via else _make_gguf if job.to == "gguf" else _make_onnx
    )

    def work(cancel: CancelToken) -> dict[str, Any]:
        with ProgressLine(f"exporting {job.model}", quiet=job.quiet) as on_progress:
            return make(job, on_progress, cancel)

    with warnings_of("edgedec.export") as warnings:
        document = interruptible(work)
    for warning in [] if job.quiet else warnings:
        say(one_line(f"edgedec: {warning}"))
    if job.as_json:
        write_json(document)
    elif not job.quiet:
        (_say_gguf if job.to == "gguf" else _say_folder)(document)


def _check(job: ExportJob) -> None:
    """Raise RequestError where an option has a value that it can't have, or does not go with another option."""
    for name, values in _VALUES.items():
        if (value := getattr(job, name)) not in values:
            raise RequestError(f"--{name} is {value!r}; it must be {' or '.join(filter(None, values))}")
    to_gguf, as_default = job.to == "gguf", (job.quant, job.kv) == ("exact", "f32")
    if job.via and (to_gguf or not as_default or job.target != "cpu"):
        raise RequestError("--via optimum makes one kind of export; leave out --to, --quant, --kv and --target")
    if to_gguf and (not as_default or job.target != "cpu"):
        raise RequestError("--quant, --kv and --target are for --to onnx; give the type of a GGUF with --type")
    if job.target == "npu" and not as_default:
        raise RequestError("--quant and --kv are for --target cpu; an export for an NPU has one form, leave them out")
    if not to_gguf and (job.type_name or job.layers or job.lora or job.allow_requantize or job.draft_for):
        raise RequestError(
            "--type, --layers, --lora, --allow-requantize and --for are for --to gguf: add it, or leave them out"
        )
    if (job.own_output or job.vocabulary is not None) and not job.draft_for:
        raise RequestError("--own-output and --vocabulary are for a draft head; name its model with --for")
    if job.vocabulary is not None and job.vocabulary < 1:
        raise RequestError(f"--vocabulary is {job.vocabulary}; it must be 1 or more")
    if job.draft_for and (job.layers or job.lora or job.allow_requantize):
        raise RequestError("--layers, --lora and --allow-requantize are for models; leave them out for a draft head")


def _resolve(job: ExportJob, on_progress: OnProgress, cancel: CancelToken) -> Path:
    """Return the path of the model, which is downloaded where need be."""
    from edgedec.loading.resolve import resolve

    return resolve(job.model, _resolving(job, on_progress, cancel, draft_head=job.draft_for is not None))


def _resolving(
    job: ExportJob, on_progress: OnProgress, cancel: CancelToken, *, draft_head: bool = False
) -> ResolveOptions:
    return ResolveOptions(cache_folder(), job.offline, on_progress, cancel, draft_head=draft_head)


def _make_onnx(job: ExportJob, on_progress: OnProgress, cancel: CancelToken) -> dict[str, Any]:
    """Export to a folder for onnxruntime, measure the export, and return the JSON object about it."""
    from edgedec_export.npu.export import export_npu
    from edgedec_export.to_onnx import export_onnx

    source = _resolve(job, on_progress, cancel)
    started = perf_counter()
    out = job.out or Path(f"{default_name(job.model, source)}-{'onnx' if job.target == 'cpu' else job.target}")
    make = partial(export_onnx, quant=job.quant, kv=job.kv) if job.target == "cpu" else export_npu
    folder = make(source, out, force=job.force, on_progress=on_progress, cancel=cancel)
    export_s = perf_counter() - started
    document = _folder_document(job, folder)
    if job.report and job.target == "cpu":
        document["report"] = _report(job, source, folder, document, export_s, on_progress, cancel)
    return document


def _make_via_optimum(job: ExportJob, on_progress: OnProgress, cancel: CancelToken) -> dict[str, Any]:
    """Export a Hugging Face checkpoint with optimum, and return the JSON object about the export."""
    from edgedec_export.optimum.environment import NEEDED_BYTES, environment_folder, is_ready
    from edgedec_export.optimum.export import export_via_optimum, find_checkpoint

    find_checkpoint(job.model)  # so that nothing is installed for a model that is none
    environment = environment_folder(cache_folder())
    offline = offline_reason(ResolveOptions(offline=job.offline)) is not None
    if not job.quiet and not offline and not is_ready(environment):
        room = format_bytes(NEEDED_BYTES)
        say(one_line(f"installing optimum and torch into {environment}, once; up to {room}, some minutes"))
    folder = export_via_optimum(
        job.model,
        job.out or Path(f"{default_name(job.model, Path(job.model))}-onnx"),
        environment=environment,
        offline=offline,
        force=job.force,
        on_progress=on_progress,
        cancel=cancel,
    )
    return _folder_document(job, folder)


def _folder_document(job: ExportJob, folder: Path) -> dict[str, Any]:
    """Return the JSON object about an exported folder, without a report."""
    from edgedec_export.folder import read_manifest

    facts = read_manifest(folder) or {}
    n_bytes = sum(entry["bytes"] for entry in facts["files"].values())
    return {"model": job.model, "folder": str(folder), "bytes": n_bytes, **facts, "report": None}


def _make_gguf(job: ExportJob, on_progress: OnProgress, cancel: CancelToken) -> dict[str, Any]:
    """Export to another GGUF, and return the JSON object about it."""
    from edgedec.gguf.file import read_gguf
    from edgedec.gguf.model_kinds import is_embedder
    from edgedec.gguf.tensor_types import FILE_TYPE_NAMES
    from edgedec.loading.resolve import resolve
    from edgedec_export.to_gguf import export_gguf
    from edgedec_runtimes.trained_heads.load import is_head_path

    source, resolving = _resolve(job, on_progress, cancel), _resolving(job, on_progress, cancel)
    if job.draft_for is not None or is_head_path(source):
        return _make_head(job, source, on_progress, cancel)
    path = export_gguf(
        source,
        job.out or _default_gguf(default_name(job.model, source), job.layers, job.type_name),
        type_name=job.type_name,
        layers=job.layers,
        lora=[(resolve(name, resolving), scale) for name, scale in map(adapter, job.lora or [])],
        allow_requantize=job.allow_requantize,
        force=job.force,
        on_progress=on_progress,
        cancel=cancel,
    )
    made = read_gguf(path)
    number = made.metadata.get("general.file_type")
    return {
        "model": job.model,
        "file": str(path),
        "bytes": made.n_bytes,
        "type": FILE_TYPE_NAMES.get(number) if isinstance(number, int) else None,
        "n_layer": made.metadata.get(f"{made.metadata.get('general.architecture')}.block_count"),
        "embeds": is_embedder(made),
    }


def _make_head(job: ExportJob, source: Path, on_progress: OnProgress, cancel: CancelToken) -> dict[str, Any]:
    """Write a draft head as a GGUF, and return the JSON object about it."""
    from edgedec.gguf.file import read_gguf
    from edgedec.loading.resolve import resolve
    from edgedec_export.head_to_gguf import DEFAULT_TYPES, write_head_gguf
    from edgedec_runtimes.trained_heads.load import load_head

    if job.draft_for is None:
        raise RequestError(f"{job.model} is a draft head; name the model that it belongs to with --for")
    target = resolve(job.draft_for, _resolving(job, on_progress, cancel))
    folder = source.parent if source.name == "config.json" else source
    head = load_head(source)
    path = write_head_gguf(
        head if job.vocabulary is None else head.shortened(job.vocabulary),
        read_gguf(target),
        job.out or Path(f"{default_name(job.model, folder)}.head.gguf"),
        types=job.type_name or DEFAULT_TYPES,
        own_output=job.own_output,
        force=job.force,
        on_progress=on_progress,
        cancel=cancel,
    )
    document = {"model": job.model, "file": str(path), "bytes": path.stat().st_size}
    return document | {"type": job.type_name or DEFAULT_TYPES, "n_layer": 1, "draft_for": job.draft_for}


def _default_gguf(name: str, layers: str | None, type_name: str | None) -> Path:
    """Return the file that a model is exported to where --out is not given.

    >>> _default_gguf("tiny-f16", "0-3,8", "q4_k_m").name
    'tiny-f16-layers-0-3,8-Q4_K_M.gguf'
    """
    suffix = f"-layers-{''.join(layers.split())}" if layers else ""
    kind = f"-{type_name.upper()}" if type_name else ""
    return Path(f"{name}{suffix}{kind}.gguf")


def _report(
    job: ExportJob,
    source: Path,
    folder: Path,
    document: dict[str, Any],
    export_s: float,
    on_progress: OnProgress,
    cancel: CancelToken,
) -> dict[str, Any] | None:
    """Measure the export, write its report and return it; None, and a message, where the measurement fails."""
    from edgedec_apps.evaluation.export_measure import measured_apart
    from edgedec_export.report import write_report

    cost = {
        "source": document["source"]["name"],
        "source_bytes": document["source"]["bytes"],
        "bytes": document["bytes"],
        "quant": job.quant,
        "kv": job.kv,
        "export_s": export_s,
        "peak_bytes": peak_resident_bytes(),
    }
    try:
        with stage(on_progress, "measuring the export (--no-report skips this)"):
            report = cost | measured_apart(source, folder, cancel)
    except RuntimeUnavailableError as error:
        say(one_line(f"edgedec: {in_options(error)}"))
        return None
    write_report(folder, report)
    return report


def _say_folder(document: dict[str, Any]) -> None:
    from edgedec_apps.bench.table import columns
    from edgedec_export.report import rows

    folder, report = document["folder"], document["report"]
    kind = document["target"] if document["target"] == "npu" else document["quant"]
    for line in [] if report is None else columns(rows(report)):
        say(one_line(line))
    say(one_line(f"{folder}: {format_bytes(document['bytes'])}, {kind}; run it with: edgedec run {folder}"))


def _say_gguf(document: dict[str, Any]) -> None:
    size = format_bytes(document["bytes"])
    if "draft_for" in document:
        used = f"edgedec run {document['draft_for']} --draft-option head={document['file']}"
        say(one_line(f"{document['file']}: {size}, a draft head in {document['type']}; use it with: {used}"))
        return
    facts = ", ".join(str(fact) for fact in (size, document["type"], f"{document['n_layer']} layers") if fact)
    use = "embed texts with it: edgedec embed" if document["embeds"] else "run it with: edgedec run"
    say(one_line(f"{document['file']}: {facts}; {use} {document['file']}"))
