"""The memory plan of the onnx runtime, made from an export's manifest."""

from edgedec.errors import counted
from edgedec.gguf.file import GRAPH
from edgedec.load_options import LoadOptions
from edgedec.memory_plan import MemoryTerm
from edgedec_runtimes.onnx.exported import Export
from edgedec_runtimes.onnx.feeds import CHUNK, SPARE_ROWS
from edgedec_runtimes.onnx.kv import SPARE_SLOTS, token_bytes

_LIBRARY_BYTES = 33_000_000
_WEIGHTS = 1.01  # times the weights' file: onnxruntime packs most matrices anew
_GRAPH = 75  # times the graph's file: nodes, their kernels, and the gaps between packed matrices
_VOCABULARY_BYTES_PER_TOKEN = 250
_STATES, _FEED_FORWARDS = 8, 3  # about how many arrays of a layer are held at the same time


def memory_terms(
    export: Export, options: LoadOptions, n_ctx: int, n_rows: int, base_bytes: int, *, with_library: bool
) -> tuple[MemoryTerm, ...]:
    """Return the terms for `options.n_parallel` sessions of `n_ctx` tokens.

    Args:
        export: The manifest.
        options: How the model is loaded.
        n_ctx: Tokens of a session.
        n_rows: Rows of logits.
        base_bytes: What the process held before loading.
        with_library: Whether ONNX Runtime has still to be imported.
    """
    e, n_vocab = export, export.n_vocab
    kv_bytes = (n_ctx + SPARE_SLOTS) * (token_bytes(e) + e.n_layer) * options.n_parallel
    activations = CHUNK * 4 * (_STATES * e.n_embd + _FEED_FORWARDS * e.n_ff) + CHUNK * n_ctx * 4
    return (
        MemoryTerm("interpreter and libraries", base_bytes, "measured", base=True),
        MemoryTerm("onnxruntime", _LIBRARY_BYTES if with_library else 0, "the library"),
        MemoryTerm("weights", int(_WEIGHTS * e.data_bytes), f"{e.quant}, packed by onnxruntime"),
        MemoryTerm("graph", _GRAPH * e.files[GRAPH].n_bytes, "nodes and kernels"),
        MemoryTerm("vocabulary", n_vocab * _VOCABULARY_BYTES_PER_TOKEN, f"{n_vocab} tokens"),
        MemoryTerm("KV cache", kv_bytes, f"{counted(n_ctx, 'token')} × {options.n_parallel}, {e.kv}", grows=True),
        MemoryTerm("logits", (n_rows + SPARE_ROWS) * n_vocab * 4, counted(n_rows, "row")),
        MemoryTerm("activations", activations, f"{CHUNK} rows"),
    )
