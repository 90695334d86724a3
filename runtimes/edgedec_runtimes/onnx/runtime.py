"""The onnx runtime: ONNX Runtime runs what `edgedec export --to onnx` made, directly or by way of optimum.

docs/export.md is the user's guide.
"""

import hashlib
from functools import lru_cache
from pathlib import Path

from edgedec.errors import EdgedecError, OptionError, RequestError, UnsupportedModelError, argument
from edgedec.gguf.file import DATA, GRAPH, read_header_of
from edgedec.gguf.model_info import describe
from edgedec.gguf.two_graphs import graphs_of, weights_of
from edgedec.load_options import LoadOptions, NoOptions, default_n_ctx, read_options
from edgedec.memory.system import resident_bytes
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Model
from edgedec.model_card import ModelCard
from edgedec.processor import cpu_name
from edgedec.progress import check_cancelled
from edgedec.runtime import RuntimeReport
from edgedec_runtimes.onnx.exported import OPTIMUM, TWO_GRAPHS, Export, FileFacts, read_export, verify_files
from edgedec_runtimes.onnx.feeds import CHUNK
from edgedec_runtimes.onnx.foreign.model import ForeignModel, check_n_ctx
from edgedec_runtimes.onnx.graph_model import Opened
from edgedec_runtimes.onnx.head import open_head, planned_head, require_head, takes_heads
from edgedec_runtimes.onnx.kv import token_bytes
from edgedec_runtimes.onnx.library import is_imported, load_library, open_graph, read_foreign
from edgedec_runtimes.onnx.memory import memory_terms
from edgedec_runtimes.onnx.model import OnnxModel
from edgedec_runtimes.onnx.providers import AUTO, CPU, choose_provider, devices
from edgedec_runtimes.onnx.source_model import files_of, load_sources
from edgedec_runtimes.shared.cards import model_card
from edgedec_runtimes.shared.cpu_count import usable_cores
from edgedec_runtimes.shared.hyperparameters import in_all_layers
from edgedec_runtimes.shared.load_checks import check_sizes, refuse_adapters, refuse_resident_bytes
from edgedec_runtimes.shared.mapped_files import MappedFiles
from edgedec_runtimes.shared.pages import with_mappings
from edgedec_runtimes.tokenizer import open_tokenizer, refusal
from edgedec_runtimes.trained_heads.kind import NAME as TRAINED

_OPENED, _LAYER_BYTES = {2: 2.1, 3: 1.6}, 8_000  # times the files of so many foreign graphs; of a layer's nodes
_KV_TYPES = {"f32": ("f16", "f32"), "int8": ("f16", "q8_0")}  # "f16" is the default, which takes what the export has


class Onnx:
    """Implements edgedec.runtime.Runtime."""

    name = "onnx"

    def accepts(self, path: Path) -> str | None:
        """Return None when the path is an export for this runtime, else the reason why it is not."""
        try:
            _require_covered_vocabulary(_read(path))
        except EdgedecError as error:
            return str(error)
        return None

    def draft_head_kinds(self, path: Path) -> tuple[str, ...]:
        """Return the kinds of heads that can follow the model's text; none where the graph is not our own."""
        return (TRAINED,) if takes_heads(_read(path)) else ()

    def plan(self, path: Path, options: LoadOptions) -> tuple[MemoryTerm, ...]:
        """Return the terms of the memory plan, from the manifest and the vocabulary's header."""
        export = _read(path)
        _check_options(export, options)
        n_ctx = options.n_ctx or default_n_ctx(export.n_ctx_train)
        base = resident_bytes() or 0
        terms = copying_memory_terms if export.kind else memory_terms
        planned = terms(export, options, n_ctx, options.max_rows, base, with_library=not is_imported())
        return (*planned, *planned_head(export, options)(n_ctx))

    def load(self, path: Path, options: LoadOptions) -> Model:
        """Check the files, open the graph, and read the vocabulary."""
        export = _read(path)
        _check_options(export, options)
        before, with_library = resident_bytes() or 0, not is_imported()
        of_head = planned_head(export, options)  # before the weights, as the tokenizer: both may refuse
        ort = load_library()
        chosen = choose_provider(ort, options.device)
        tokenizer = open_tokenizer(export.gguf)
        n_threads = options.n_threads or usable_cores()
        card = _card(export, f"{ort.__version__} {chosen.provider.device} {cpu_name()}")
        planned = copying_memory_terms if export.kind else memory_terms

        @lru_cache(maxsize=8)
        def terms(n_ctx: int, n_rows: int) -> tuple[MemoryTerm, ...]:
            terms = planned(export, options, n_ctx, n_rows, before, with_library=with_library)
            return (*terms, *of_head(n_ctx))

        if export.kind == TWO_GRAPHS:
            return load_sources(ort, export, options, n_threads, tokenizer, card, terms)
        verify_files(export.folder, export.files, options)
        check_cancelled(options.cancel, f"loading {path.name}")
        graph, mapped = with_mappings([export.folder / DATA], lambda: open_graph(ort, export, chosen, n_threads))
        check_cancelled(options.cancel, f"loading {path.name}")
        memory = None if export.kind == OPTIMUM else chosen.provider.memory
        files = MappedFiles([export.folder / DATA] if DATA in export.files else [], mapped)
        opened = Opened(ort, graph, export, mapped, files, open_head(export, options, n_threads), memory)
        if export.kind == OPTIMUM:
            contract = read_foreign(graph, export)
            return ForeignModel(opened, contract, tokenizer, card, terms, options.cache_dir)
        return OnnxModel(opened, tokenizer, card, terms, options.max_rows, options.cache_dir)

    def report(self) -> RuntimeReport:
        """Return onnxruntime's version, the devices that work here, and why others do not."""
        ort = load_library()
        works, refusals = devices(ort)
        return RuntimeReport(f"onnxruntime {ort.__version__}", works, refusals)


def _read(path: Path) -> Export:
    """Return what is said of an export, or of a folder of an encoder and a decoder: of files, what they take opened."""
    if not (graphs := graphs_of(path)):
        return read_export(path)
    gguf = read_header_of(path)
    info, states = describe(gguf), [(file.name, file.stat()) for file in files_of(graphs)]
    times = _OPENED[len(graphs)] * (2 if weights_of(graphs).endswith("16") else 1)  # float16 is multiplied in float32
    n_bytes = int(times * sum(state.st_size for _, state in states))
    changes = [(name, state.st_size, state.st_mtime_ns) for name, state in states]
    return Export(
        folder=path,
        gguf=gguf,
        architecture=info.architecture,
        quant=weights_of(graphs),
        kv="f32",
        n_layer=info.n_layer,
        n_vocab=info.n_vocab,
        n_embd=info.n_embd,
        n_head_kv=info.n_head_kv[0],
        head_dim=info.key_length,
        n_ff=(info.n_ff or (0,))[0],
        n_ctx_train=info.n_ctx_train or 0,
        local_layers=(),
        window=0,
        files={DATA: FileFacts(n_bytes, ""), GRAPH: FileFacts(_LAYER_BYTES * info.n_layer * len(graphs), "")},
        sha256=hashlib.sha256(f"{gguf.header_hash} {changes}".encode()).hexdigest(),
        kind=TWO_GRAPHS,
    )


def _require_covered_vocabulary(export: Export) -> None:
    reason = refusal(export.gguf)
    if reason is not None:
        raise UnsupportedModelError(f"{export.folder}: {reason}; use the GGUF and the llamacpp runtime")


def _check_options(export: Export, options: LoadOptions) -> None:
    """Raise RequestError for options that the runtime can't honour."""
    if options.kv_type not in _KV_TYPES[export.kv]:
        raise OptionError(
            "kv_type",
            options.kv_type,
            f"this export keeps keys and values as {export.kv}: leave it out, or export the model again with --kv",
        )
    if options.n_gpu_layers not in (None, 0, -1):
        raise RequestError(
            f"the onnx runtime has no layers on a GPU; leave {argument('n_gpu_layers')} out, and choose a device"
        )
    if options.device is not None and options.device.lower() == "gpu":
        raise RequestError(
            f"the onnx runtime wants a device's own name; the webgpu runtime takes {argument('device')} gpu"
        )
    read_options(NoOptions, options.runtime_options, "the onnx runtime")
    require_head(export, options)
    refuse_adapters(options, "onnx runtime")
    refuse_resident_bytes(options, "onnx")
    check_sizes(options)
    if export.kind == TWO_GRAPHS and options.device not in (None, CPU, AUTO):
        raise OptionError("device", options.device, "an encoder and a decoder run on the CPU here; leave it out")
    if export.kind:
        check_n_ctx(options.n_ctx or 1, export.n_ctx_train)


def _card(export: Export, numerics: str) -> ModelCard:
    identity = f"onnx 1 {export.sha256} {numerics}"
    return model_card(Onnx.name, export.gguf, export, hashlib.sha256(identity.encode()).hexdigest())


_SCORES = 3  # about how many arrays of all heads' scores are held at the same time


def copying_memory_terms(
    export: Export, options: LoadOptions, n_ctx: int, n_rows: int, base_bytes: int, *, with_library: bool
) -> tuple[MemoryTerm, ...]:
    """Return the terms of `memory_terms`, and a term for a second KV cache, attention scores and all logits."""
    terms = memory_terms(export, options, n_ctx, n_rows, base_bytes, with_library=with_library)
    n_head = in_all_layers(export.gguf, "attention.head_count", describe(export.gguf).n_head)
    scores = _SCORES * n_head * CHUNK * n_ctx * 4
    copies = (n_ctx + 1) * token_bytes(export) + scores + CHUNK * export.n_vocab * 4
    if export.kind == TWO_GRAPHS:  # the encoder reads a source of up to half of the context at once
        n = min(n_ctx, export.n_ctx_train // 2)
        copies += 4 * n * (2 * _SCORES * n_head * n + 8 * export.n_embd + 3 * export.n_ff)
    return (*terms, MemoryTerm("copies", copies, "the KV cache as it grows, attention scores, logits of all rows"))
