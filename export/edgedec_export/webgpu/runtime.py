"""The webgpu runtime: a GGUF as a graph on any GPU that Vulkan, Direct3D or Metal reaches, without a compiler.

The graph is exported once, into the cache. ONNX Runtime runs it by its WebGPU plug-in, in a process of its own: a
driver that dies ends that process and no other. docs/gpu.md is the user's guide.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from edgedec.errors import ModelError, ModelFormatError, OptionError, RequestError, argument
from edgedec.gguf.file import DATA, GRAPH, is_onnx, read_gguf
from edgedec.gguf.two_graphs import graphs_of
from edgedec.load_options import LoadOptions, default_n_ctx
from edgedec.memory.system import resident_bytes
from edgedec.memory_plan import Device, IsOver, MemoryPlan, MemoryTerm, Split, format_bytes
from edgedec.model import Model
from edgedec.runtime import RuntimeReport
from edgedec.storage.cache_files import delete_folder
from edgedec_export.cached import graph_bytes, graph_folder, make_graph, refusal
from edgedec_export.webgpu.finding import NAME, PROVIDER, as_device, gpu_report, look, require
from edgedec_runtimes.child.model import ChildModel, Hosting
from edgedec_runtimes.child.rows import process_term, shared_terms
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.onnx.exported import Export, FileFacts, read_export, verify_files
from edgedec_runtimes.onnx.memory import memory_terms
from edgedec_runtimes.onnx.runtime import Onnx
from edgedec_runtimes.shared.device_account import remember_drivers, with_account, with_measured_drivers
from edgedec_runtimes.shared.load_checks import check_sizes

_DEVICES = (None, "gpu", "auto", NAME.lower())
_ON_GPU = ("weights", "KV cache", "activations")
_GRAPH_BYTES = 13_000  # of the graph's file, for a layer
_PLUGIN_BYTES = 60_000_000  # of the plug-in and a driver in the process
_ADVICE = "ask again to load the model anew, update the card's driver, or use the cpu runtime"


class WebGpu:
    """Implements edgedec.runtime.Runtime, and edgedec.memory_plan.HasDevices with one device."""

    name = "webgpu"

    def accepts(self, path: Path) -> str | None:
        """Return None for an export of our own, and for a GGUF that can be exported; else the reason."""
        if is_onnx(path):
            return "an encoder and a decoder: take the onnx runtime" if graphs_of(path) else Onnx().accepts(path)
        return refusal(path)

    def plan(self, path: Path, options: LoadOptions) -> tuple[MemoryTerm, ...]:
        """Return the terms of the memory plan, from headers (RuntimeUnavailableError where there is no GPU)."""
        _check(path, options)
        require()
        export = _export(path, options)
        return _terms(export, options, options.n_ctx or default_n_ctx(export.n_ctx_train), resident_bytes() or 0)

    def load(self, path: Path, options: LoadOptions) -> Model:
        """Make the graph where there is none, and load it in a process of its own."""
        _check(path, options)
        report = require()
        folder = path if is_onnx(path) else make_graph(path, options)
        try:
            export, base = read_export(folder), resident_bytes() or 0
            verify_files(folder, export.files, options)
        except ModelError as error:
            if folder == path:
                raise
            with suppress(OSError):
                delete_folder(folder, "graphs")
            raise ModelFormatError(
                f"{error.marked}; it was deleted from the cache: ask again to make it anew"
            ) from error

        @lru_cache(maxsize=8)
        def terms(n_ctx: int, n_rows: int) -> tuple[MemoryTerm, ...]:
            return _terms(export, replace(options, max_rows=n_rows), n_ctx, base)

        def explain(how: str) -> str:
            name = report.devices[0].name if report.devices else "the GPU"
            return f"the process that ran the model on {name} was lost ({how})"

        plain = replace(options, device=PROVIDER.device, layer_split=None, n_gpu_layers=None, planning_bytes=None)
        target = f"{__name__}:{load_here.__name__}"
        return ChildModel(Hosting(target, folder, plain, terms, explain=explain, advice=_ADVICE))

    def devices(self, options: LoadOptions) -> tuple[Device, ...]:
        """Return the GPU; see edgedec.memory_plan.HasDevices. None where none can be used: plan() says why."""
        report = gpu_report()
        return () if report.refusal else with_measured_drivers([as_device(report)], self.name, options.cache_dir)

    def split(self, names: Sequence[str], n_layers: int, is_over: IsOver, *, whole: bool) -> Split:
        """Return a split with all layers on the GPU, or with none where they do not fit and need not be there."""
        split = ((names[0], n_layers),)
        return split if whole or not is_over(split, names[0]) else ()

    def account(self, plan: MemoryPlan, options: LoadOptions) -> MemoryPlan:
        """Return the plan with what the load took on the GPU by the driver's account, and keep what the driver took."""
        accounted = with_account(plan, [as_device(look())])
        remember_drivers(accounted, self.name, options.cache_dir)
        return accounted

    def report(self) -> RuntimeReport:
        """Return the versions, and which GPU was found (RuntimeUnavailableError says what to install)."""
        report = require()
        notes = [
            f"{gpu.name} ({gpu.kind}, {format_bytes(gpu.total_bytes)})"
            + (" is the GPU that is most likely taken" if gpu is report.devices[0] and len(report.devices) > 1 else "")
            for gpu in report.devices
        ]
        return RuntimeReport(report.version, (NAME,), tuple(notes))


def load_here(path: Path, options: LoadOptions) -> Model:
    """Load a graph on the GPU in this process, which its driver may end: so only in a child."""
    return Onnx().load(path, options)


def _check(path: Path, options: LoadOptions) -> None:
    """Raise RequestError for options that the runtime can't honour."""
    device = options.device if options.device is None else options.device.lower()
    if device not in _DEVICES:
        raise OptionError("device", options.device, f"the webgpu runtime's device is {NAME}, or gpu")
    if options.n_gpu_layers not in (None, -1) or options.layer_split == ():
        raise RequestError(
            f"the webgpu runtime has all layers on the GPU; leave {argument('n_gpu_layers')} out, or use the llamacpp "
            "runtime"
        )
    if options.draft_head is not None:
        raise RequestError(
            f"the webgpu runtime has no draft heads; leave {argument('draft_head')} out, or use the onnx runtime"
        )
    check_sizes(options)
    if not is_onnx(path) and options.kv_type not in ("f16", "f32"):
        raise OptionError("kv_type", options.kv_type, "the webgpu runtime takes f16")
    if device == "auto" and not is_onnx(path) and not graph_folder(path, options.cache_dir).is_dir():
        raise RequestError(f"no graph of {path.name} was made yet; {argument('device')} gpu makes it")


def _export(path: Path, options: LoadOptions) -> Export:
    """Return what the export of a model is, or what it will be where it is made at the first load."""
    if is_onnx(path):
        return read_export(path)
    folder = graph_folder(path, options.cache_dir)
    with suppress(ModelError):  # there is none, or a damaged one, which loading makes anew
        return read_export(folder)
    gguf = read_gguf(path)
    n, n_bytes = read_network(gguf), graph_bytes(path)
    files = {DATA: FileFacts(n_bytes, ""), GRAPH: FileFacts(_GRAPH_BYTES * n.n_layer, "")}
    sizes = (n.n_layer, n.n_vocab, n.n_embd, n.n_head_kv, n.head_dim, n.n_ff, n.n_ctx_train)
    return Export(folder, gguf, n.architecture, "exact", "f32", *sizes, (), 0, files, "")


def _terms(export: Export, options: LoadOptions, n_ctx: int, base: int) -> tuple[MemoryTerm, ...]:
    """Return the terms of the memory plan; `base` is what this process held before."""
    planned = memory_terms(export, options, n_ctx, options.max_rows, base, with_library=True)
    made = "in" if export.folder.exists() else "the first load makes it in"
    detail = f"exact, as a graph of {format_bytes(export.data_bytes)}: {made} the cache"
    terms = [replace(t, device=NAME, grows=False) if t.name in _ON_GPU else t for t in planned]
    return (
        *(replace(t, detail=detail) if t.name == "weights" else t for t in terms),
        replace(process_term(), n_bytes=process_term().n_bytes + _PLUGIN_BYTES),
        *shared_terms(export.n_vocab, options.max_rows),
    )
