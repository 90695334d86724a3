"""The memory plan of the npu runtime, made from the manifest."""

from edgedec.errors import counted
from edgedec.gguf.file import DATA
from edgedec.memory_plan import MemoryTerm
from edgedec_runtimes.npu.blocks import PREFILL_ROWS
from edgedec_runtimes.npu.facts import EMBEDDING, PARTS, ROWS, Facts

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
