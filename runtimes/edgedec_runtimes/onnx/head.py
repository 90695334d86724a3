"""A trained draft head beside an export: whether it can be, what it takes, and what it borrows from the graph."""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import MemoryCapError, RequestError, UnsupportedModelError, argument
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec.memory.system import return_free_memory
from edgedec.memory_plan import MemoryTerm
from edgedec_runtimes.cpu.draft_head.beside import Borrowed, HeadBeside, tapped_layers
from edgedec_runtimes.cpu.draft_head.memory import head_facts, head_terms
from edgedec_runtimes.cpu.draft_head.weights import output_bytes
from edgedec_runtimes.onnx.exported import Export
from edgedec_runtimes.onnx.graph_parts import GraphParts, Tensor, read_parts
from edgedec_runtimes.onnx.matrix_rows import EMBEDDING, OUTPUT, open_matrix
from edgedec_runtimes.trained_heads.head import HeadTensor
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.target import fit, fit_card

_SCALE = "embedding_scale"


def takes_heads(export: Export) -> bool:
    """Return whether an export's graph returns the hidden states that a head reads: ours do, and optimum's do not."""
    return not export.kind


def require_head(export: Export, options: LoadOptions) -> None:
    """Raise RequestError where the options name a draft head and the graph does not return what a head reads."""
    if options.draft_head is not None and not takes_heads(export):
        raise RequestError(
            f"{export.folder}: a graph that optimum made does not return the hidden states that a draft head reads; "
            f"export the model from a GGUF without --via, or leave {argument('draft_head')} out"
        )


def planned_head(export: Export, options: LoadOptions) -> Callable[[int], tuple[MemoryTerm, ...]]:
    """Return the terms of the draft head by the tokens of a session; none where the options name no head.

    Raises:
        EdgedecError: The head can't be read, does not fit the model, or can't run.
    """
    if options.draft_head is None:
        return lambda n_ctx: ()
    facts = head_facts(options.draft_head)
    tapped_layers(fit_card(facts.card, export.gguf))
    n_output = output_bytes(facts.card, GGMLType.F32)
    return lambda n_ctx: head_terms(facts, n_output, n_ctx, options.n_parallel)


def open_head(export: Export, options: LoadOptions, n_threads: int) -> HeadBeside | None:
    """Return the head that the options name, with what it borrows from the graph; None where they name none.

    Raises:
        EdgedecError: The head can't be read, does not fit the model, or the graph lacks what it borrows.
    """
    if options.draft_head is None:
        return None
    fitted = fit(load_head(options.draft_head), export.gguf)
    parts = read_parts(export, (EMBEDDING, OUTPUT, _SCALE))
    card = fitted.head.card
    matrix = None if card.own_embedding else open_matrix(export, parts, EMBEDDING)
    target = Borrowed(
        n_vocab=export.n_vocab,
        n_embd=export.n_embd,
        n_layer=export.n_layer,
        embedding_scale=_scale(export, parts),
        embeddings=_no_rows if matrix is None else matrix.read,
        output_rows=partial(_output_rows, export, parts),
        token_bytes=export.data_bytes,
        close=_nothing if matrix is None else matrix.close,
    )
    try:
        head = HeadBeside(fitted, target, n_threads)
    except MemoryError as error:
        raise MemoryCapError(f"no memory for the draft head {card.name}; leave {argument('draft_head')} out") from error
    del fitted
    return_free_memory()
    return head


def _output_rows(export: Export, parts: GraphParts, token_ids: NDArray[np.int32]) -> HeadTensor:
    """Return rows of the output matrix, which is the embedding where the graph has no other."""
    is_tied = not any(name.startswith(f"{OUTPUT}.") for name in parts.tensors)
    matrix = open_matrix(export, parts, EMBEDDING if is_tied else OUTPUT)
    try:
        return HeadTensor.of(matrix.read(token_ids))
    finally:
        matrix.close()


def _scale(export: Export, parts: GraphParts) -> float:
    """Return what the graph multiplies embeddings by."""
    tensor = parts.tensors.get(_SCALE)
    if tensor is None:
        return 1.0
    value = _number(tensor)
    if value is None:
        raise UnsupportedModelError(f"{export.graph}: its {_SCALE} is no number; export the model again")
    return value


def _number(tensor: Tensor) -> float | None:
    if tensor.inside is None or tensor.n_bytes != 4 or tensor.dtype != np.dtype("<f4"):
        return None
    value = float(tensor.inside.view(tensor.dtype)[0])
    return value if 0 < value < float("inf") else None


def _nothing() -> None:
    pass


def _no_rows(tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    raise AssertionError(f"a head with embeddings of its own looks up {len(tokens)} elsewhere")
