"""edgedec export: a model as a folder for onnxruntime, and a report on what that cost; or as another GGUF."""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from edgedec.errors import RequestError, RuntimeUnavailableError
from edgedec.loading.resolve import resolve
from edgedec.memory.system import peak_resident_bytes
from edgedec.memory_plan import format_bytes
from edgedec.progress import CancelToken, stage
from edgedec.resolver import ResolveOptions
from edgedec_apps.bench.table import columns
from edgedec_apps.cli.export_gguf import GGUFOptions, default_file, make_gguf, say_gguf
from edgedec_apps.cli.export_optimum import make_via_optimum
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.log import warnings_of
from edgedec_apps.cli.progress import ProgressLine
from edgedec_apps.cli.terminal import one_line, say, write_json
from edgedec_apps.cli.wording import in_options
from edgedec_apps.evaluation.export_measure import measured_apart
from edgedec_export.folder import read_manifest
from edgedec_export.npu.export import export_npu
from edgedec_export.report import rows, write_report
from edgedec_export.to_onnx import export_onnx
from edgedec_models.folders import cache_folder

FORMATS = ("onnx", "gguf")
TARGETS = ("cpu", "npu")
WAYS = ("optimum",)


@dataclass(frozen=True, slots=True)
class ExportJob:
    """What `edgedec export` was asked for."""

    model: str
    to: str
    via: str | None
    target: str
    out: Path | None
    quant: str
    kv: str
    report: bool
    gguf: GGUFOptions
    force: bool
    offline: bool
    as_json: bool
    quiet: bool


def run_export(job: ExportJob) -> None:
    """Export and say what was made.

    Raises:
        RequestError: An option has no such value, or something is in the way.
        EdgedecError: As export_onnx, export_npu or export_gguf of edgedec_export.
    """
    for name, value, known in (("to", job.to, FORMATS), ("target", job.target, TARGETS)):
        if value not in known:
            raise RequestError(f"--{name} is {value!r}; it must be {' or '.join(known)}")
    to_gguf = job.to == "gguf"
    if job.via is not None:
        if job.via not in WAYS:
            raise RequestError(f"--via is {job.via!r}; it must be {' or '.join(WAYS)}")
        if to_gguf or (job.quant, job.kv, job.target) != ("exact", "f32", "cpu"):
            raise RequestError("--via optimum makes one kind of export; leave out --to, --quant, --kv and --target")
    if to_gguf and (job.quant, job.kv, job.target) != ("exact", "f32", "cpu"):
        raise RequestError("--quant, --kv and --target are of --to onnx; a GGUF has a --type")
    if job.target == "npu" and (job.quant, job.kv) != ("exact", "f32"):
        raise RequestError("--quant and --kv are of --target cpu; what an NPU gets has one form")
    if not to_gguf and job.gguf != GGUFOptions():
        raise RequestError("--type, --layers and --allow-requantize are of --to gguf; leave them out, or add that")
    work = _work_optimum if job.via else _work_gguf if to_gguf else _work
    with warnings_of("edgedec.export") as warnings:
        document = interruptible(lambda cancel: work(job, cancel))
    for warning in [] if job.quiet else warnings:
        say(one_line(f"edgedec: {warning}"))
    if job.as_json:
        write_json(document)
    elif not job.quiet:
        (say_gguf if to_gguf else _say)(document)


def _say(document: dict[str, Any]) -> None:
    folder, size = document["folder"], format_bytes(document["bytes"])
    report = document["report"]
    kind = document["target"] if document["target"] == "npu" else document["quant"]
    if report is not None:
        for line in columns(rows(report)):
            say(one_line(line))
    say(one_line(f"{folder}: {size}, {kind}; run it with: edgedec run {folder}"))


def _work(job: ExportJob, cancel: CancelToken) -> dict[str, Any]:
    with ProgressLine(quiet=job.quiet) as on_progress:
        source = resolve(job.model, ResolveOptions(cache_folder(), job.offline, on_progress, cancel))
        started = perf_counter()
        kind = "onnx" if job.target == "cpu" else job.target
        out = job.out or default_folder(job.model, source, kind)
        make = partial(export_onnx, quant=job.quant, kv=job.kv) if job.target == "cpu" else export_npu
        folder = make(source, out, force=job.force, on_progress=on_progress, cancel=cancel)
        export_s = perf_counter() - started
    facts = read_manifest(folder) or {}
    n_bytes = sum(entry["bytes"] for entry in facts["files"].values())
    document = {"model": job.model, "folder": str(folder), "bytes": n_bytes, **facts, "report": None}
    if job.report and job.target == "cpu":
        document["report"] = _report(job, source, folder, document, export_s, cancel)
    return document


def _work_gguf(job: ExportJob, cancel: CancelToken) -> dict[str, Any]:
    with ProgressLine(quiet=job.quiet) as on_progress:
        source = resolve(job.model, ResolveOptions(cache_folder(), job.offline, on_progress, cancel))
        out = job.out or default_file(default_name(job.model, source), job.gguf)
        return {"model": job.model, **make_gguf(source, out, job.gguf, job.force, on_progress, cancel)}


def _work_optimum(job: ExportJob, cancel: CancelToken) -> dict[str, Any]:
    with ProgressLine(quiet=job.quiet) as on_progress:
        return make_via_optimum(
            job.model,
            job.out or default_folder(job.model, Path(job.model)),
            offline=job.offline,
            force=job.force,
            quiet=job.quiet,
            on_progress=on_progress,
            cancel=cancel,
        )


def default_folder(model: str, source: Path, kind: str = "onnx") -> Path:
    """Return the folder that a model is exported to where none is given: named after the file, or the model.

    >>> default_folder("hf:someone/Some-Model-GGUF:Q4_0", Path("/cache/0a1b2c.gguf")).name
    'Some-Model-GGUF-Q4_0-onnx'
    """
    return Path(f"{default_name(model, source)}-{kind}")


def default_name(model: str, source: Path) -> str:
    """Return what an export is called where no name is given, without an ending."""
    own = source.resolve().name if source.is_dir() else source.stem
    name = own if Path(model).exists() else model.rpartition("/")[2]
    plain = re.sub(r"-\d{5}-of-\d{5}$", "", name)
    return re.sub(r"[^\w.+-]+", "-", plain).strip(".-")


def _report(
    job: ExportJob, source: Path, folder: Path, document: dict[str, Any], export_s: float, cancel: CancelToken
) -> dict[str, Any] | None:
    """Measure the export and write its report; None where that fails, which is said, as the export is complete."""
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
        with (
            ProgressLine(quiet=job.quiet) as on_progress,
            stage(on_progress, "measuring the export (--no-report leaves that out)"),
        ):
            report = cost | measured_apart(source, folder, cancel)
    except RuntimeUnavailableError as error:
        say(one_line(f"edgedec: {in_options(str(error))}"))
        return None
    write_report(folder, report)
    return report
