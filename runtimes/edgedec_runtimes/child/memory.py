"""What a model in a child takes on this machine beside the model itself: another interpreter, and what both hold."""

from edgedec.errors import counted
from edgedec.memory_plan import MemoryTerm
from edgedec_runtimes.child.rows import n_shared_rows

_INTERPRETER_BYTES = 50_000_000  # of Python, numpy and llama.cpp: 49 MB; with the reference runtime 38 MB
_TOKEN_BYTES = 64  # that ChildTokenizer keeps of a token: its bytes, and where they and the flag are listed


def process_term() -> MemoryTerm:
    """Return the term of the memory plan that is the child's own."""
    return MemoryTerm("process of the model", _INTERPRETER_BYTES, "another interpreter with its libraries")


def shared_terms(n_vocab: int, n_rows: int) -> tuple[MemoryTerm, ...]:
    """Return the terms of what both processes hold once a model is loaded in a child.

    Pages that both processes map count twice, as the system counts them for each of the two.

    Args:
        n_vocab: Length of a row of logits.
        n_rows: Rows of logits that a forward may return.
    """
    n_shared = n_shared_rows(n_rows, n_vocab)
    return (
        MemoryTerm("shared logits", 2 * 4 * n_shared * n_vocab, f"{counted(n_shared, 'row')}, in both processes"),
        MemoryTerm("copied vocabulary", _TOKEN_BYTES * n_vocab, "in the process that writes the text"),
    )
