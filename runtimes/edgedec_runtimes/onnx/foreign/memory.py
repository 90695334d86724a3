"""The memory plan of a graph that copies its KV cache in each run, as optimum's graphs do."""

from edgedec.gguf.model_info import describe
from edgedec.load_options import LoadOptions
from edgedec.memory_plan import MemoryTerm
from edgedec_runtimes.onnx.exported import Export
from edgedec_runtimes.onnx.feeds import CHUNK
from edgedec_runtimes.onnx.kv import token_bytes
from edgedec_runtimes.onnx.memory import memory_terms
from edgedec_runtimes.shared.hyperparameters import in_all_layers

_SCORES = 3  # about how many arrays of all heads' scores are held at the same time


def copying_memory_terms(
    export: Export, options: LoadOptions, n_ctx: int, n_rows: int, base_bytes: int, *, with_library: bool
) -> tuple[MemoryTerm, ...]:
    """Return the terms of `memory_terms`, and a term for a second KV cache, attention scores and all logits."""
    terms = memory_terms(export, options, n_ctx, n_rows, base_bytes, with_library=with_library)
    n_head = in_all_layers(export.gguf, "attention.head_count", describe(export.gguf).n_head)
    scores = _SCORES * n_head * CHUNK * n_ctx * 4
    copies = (n_ctx + 1) * token_bytes(export) + scores + CHUNK * export.n_vocab * 4
    return (*terms, MemoryTerm("copies", copies, "the KV cache as it grows, attention scores, logits of all rows"))
