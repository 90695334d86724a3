"""The npu runtime: runs what `edgedec export --target npu` made, on an NPU."""

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import (
    EdgedecError,
    ModelFormatError,
    OptionError,
    RequestError,
    RuntimeUnavailableError,
    UnsupportedModelError,
    argument,
    counted,
)
from edgedec.gguf.file import DATA, GGUF, VOCABULARY, read_gguf, reading
from edgedec.gguf.metadata import get_text
from edgedec.load_options import LoadOptions, read_options
from edgedec.memory.system import resident_bytes
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Model
from edgedec.model_card import ModelCard
from edgedec.progress import check_cancelled
from edgedec.runtime import RuntimeReport
from edgedec_runtimes.npu.facts import EMBEDDING, PARTS, ROWS, Facts, folder_of, read_facts
from edgedec_runtimes.npu.graphs import CPU, NPU, Graphs, compiled_folder, device_of, npu_devices
from edgedec_runtimes.npu.model import PREFILL_ROWS, NpuModel
from edgedec_runtimes.onnx.exported import verify_files
from edgedec_runtimes.onnx.library import load_library
from edgedec_runtimes.shared.cards import model_card
from edgedec_runtimes.shared.cpu_count import usable_cores
from edgedec_runtimes.shared.load_checks import check_sizes, refuse_adapters, refuse_draft_head, refuse_resident_bytes
from edgedec_runtimes.shared.mapped_files import MappedFiles
from edgedec_runtimes.tokenizer import open_tokenizer, refusal


@dataclass(frozen=True, slots=True)
class NpuOptions:
    """The npu runtime's own options (edgedec.load_options).

    Attributes:
        tile_cache: Keep compiled graphs on the disk, in edgedec's cache; nothing is kept without a cache.
    """

    tile_cache: bool = True


def _own(options: LoadOptions) -> NpuOptions:
    return read_options(NpuOptions, options.runtime_options, "the npu runtime")


class Npu:
    """Implements edgedec.runtime.Runtime."""

    name = "npu"
    own_options = NpuOptions

    def accepts(self, path: Path) -> str | None:
        """Return None when the path is an export for NPUs, else the reason why it is not."""
        try:
            read_facts(path)
            gguf = read_gguf(folder_of(path) / VOCABULARY)
        except EdgedecError as error:
            return str(error)
        return refusal(gguf)

    def plan(self, path: Path, options: LoadOptions) -> tuple[MemoryTerm, ...]:
        """Return the terms of the memory plan, from the manifest and the files' sizes."""
        facts = read_facts(path)
        _check_options(facts, options)
        n_ctx = options.n_ctx or _default_n_ctx(facts)
        return memory_terms(facts, n_ctx, options.max_rows, resident_bytes() or 0, options.n_parallel)

    def load(self, path: Path, options: LoadOptions) -> Model:
        """Check the files, find the device, and open the graph of single steps; other graphs are opened when needed."""
        facts, folder = read_facts(path), folder_of(path)
        _check_options(facts, options)
        before = resident_bytes() or 0
        gguf = read_gguf(folder / VOCABULARY)
        _check_vocabulary(gguf, facts)
        tokenizer = open_tokenizer(gguf)
        verify_files(folder, facts.files, options)
        ort, device = load_library(), device_of(options.device)
        compiled = None
        if device == NPU and _own(options).tile_cache and options.cache_dir is not None:
            compiled = compiled_folder(options.cache_dir, facts, ort)
        graphs = Graphs(ort, folder, facts, device, options.n_threads or usable_cores(), compiled)
        check_cancelled(options.cancel, f"loading {path.name}")
        graphs.session(ROWS[0], facts.contexts[0])

        @lru_cache(maxsize=8)
        def terms(n_ctx: int, n_rows: int) -> tuple[MemoryTerm, ...]:
            return memory_terms(facts, n_ctx, n_rows, before)

        card = _card(gguf, facts, f"{ort.__version__} {device}")
        embedding = _embedding(folder, facts)
        files = MappedFiles([folder / EMBEDDING], [(embedding.ctypes.data, embedding.nbytes)])
        return NpuModel(graphs, embedding, files, tokenizer, card, terms)

    def report(self) -> RuntimeReport:
        """Return onnxruntime's version and the devices; where there is no NPU, the reason."""
        ort = load_library()
        try:
            npu_devices(ort)
        except RuntimeUnavailableError as error:
            return RuntimeReport(f"onnxruntime {ort.__version__}", (CPU,), (str(error),))
        return RuntimeReport(f"onnxruntime {ort.__version__}", (NPU, CPU), ("runs what --target npu exported",))


def _check_options(facts: Facts, options: LoadOptions) -> None:
    """Raise RequestError for options that the runtime can't honour."""
    device_of(options.device)
    if options.kv_type != "f16":  # the default, which stands for what the export has
        raise OptionError(
            "kv_type", options.kv_type, "an export for NPUs keeps keys and values in twice 8 bits: leave it out"
        )
    if options.n_gpu_layers not in (None, 0, -1):
        raise RequestError(f"the npu runtime has no layers on a GPU; leave {argument('n_gpu_layers')} out")
    _own(options)
    refuse_draft_head(options, "npu")
    refuse_adapters(options, "npu runtime")
    refuse_resident_bytes(options, "npu")
    check_sizes(options, n_ctx=facts.contexts[-1])


def _default_n_ctx(facts: Facts) -> int:
    return min(facts.n_ctx_train, facts.contexts[-1])


def _check_vocabulary(gguf: GGUF, facts: Facts) -> None:
    architecture, reason = get_text(gguf, "general.architecture"), refusal(gguf)
    if reason is not None:
        raise UnsupportedModelError(f"{gguf.paths[0]}: {reason}; use the GGUF and the llamacpp runtime")
    if architecture != facts.architecture:
        raise ModelFormatError(
            f"{gguf.paths[0]}: the architecture is {architecture!r}, in the manifest it is {facts.architecture!r}; "
            "export the model again"
        )


def _embedding(folder: Path, facts: Facts) -> NDArray[np.float16]:
    path = folder / EMBEDDING
    if facts.files[EMBEDDING].n_bytes != 2 * facts.n_vocab * facts.n_embd:
        raise ModelFormatError(
            f"{path}: {facts.files[EMBEDDING].n_bytes} bytes, expected {facts.n_vocab} rows of {facts.n_embd} numbers; "
            "export the model again"
        )
    with reading(path):
        return np.memmap(path, "<f2", "r", shape=(facts.n_vocab, facts.n_embd))


def _card(gguf: GGUF, facts: Facts, numerics: str) -> ModelCard:
    identity = f"npu 1 {facts.sha256} {numerics}"
    card = model_card(Npu.name, gguf, facts, hashlib.sha256(identity.encode()).hexdigest())
    return replace(card, n_ctx_train=_default_n_ctx(facts))


_VOCABULARY_BYTES_PER_TOKEN = 250


def memory_terms(facts: Facts, n_ctx: int, n_rows: int, base_bytes: int, n_parallel: int = 1) -> tuple[MemoryTerm, ...]:
    """Return the terms for n_parallel sessions of n_ctx tokens, with all graphs open that such sessions need.

    Args:
        facts: The facts of the manifest.
        n_ctx: Tokens of a session.
        n_rows: Rows of logits.
        base_bytes: What the process held before loading.
        n_parallel: Number of sessions.
    """
    context = facts.context_of(min(-(-n_ctx // PREFILL_ROWS) * PREFILL_ROWS, facts.contexts[-1]))
    n_graphs = len(ROWS) * (facts.contexts.index(context) + 1)
    n_data = facts.files[DATA].n_bytes if DATA in facts.files else 0
    kv_bytes = 2 * len(PARTS) * facts.n_layer * facts.n_head_kv * facts.head_dim * context * n_parallel
    return (
        MemoryTerm("interpreter and libraries", base_bytes, "measured", base=True),
        MemoryTerm("graphs", n_graphs * n_data, f"weights of {n_graphs} graphs"),
        MemoryTerm("embedding (mapped)", facts.files[EMBEDDING].n_bytes, "float16"),
        MemoryTerm("vocabulary", facts.n_vocab * _VOCABULARY_BYTES_PER_TOKEN, f"{facts.n_vocab} tokens"),
        MemoryTerm("KV cache", kv_bytes, f"{counted(context, 'token')} × {n_parallel}, twice 8 bits"),
        MemoryTerm("logits", n_rows * facts.n_vocab * 4, counted(n_rows, "row")),
    )
