"""What can be said of a model that is not on this machine: the least bytes of its weights, from its parameters."""

from edgedec.gguf.tensor_types import GGMLType
from edgedec_models.catalogue import Entry
from edgedec_models.hubs.hub_spec import parse_hub


def least_weight_bytes(entry: Entry) -> int | None:
    """Return the size of a model's file; of a reference the least that its weights take, or None where that is unknown.

    The least is for every parameter in the blocks that the quantization is named after. Files are larger, as some of
    their tensors have more bits.
    """
    if entry.size_bytes is not None:
        return entry.size_bytes
    return _least(entry.n_params, entry.reference)


def least_read_bytes(entry: Entry) -> int | None:
    """Return the bytes of weights that one token reads, or the least: of a mixture of experts a part, else all."""
    if entry.read_bytes is not None:
        return entry.read_bytes
    if entry.n_active_params is None:
        return least_weight_bytes(entry)
    return _least(entry.n_active_params, entry.reference)


def head_fetch_bytes(head: Entry) -> int | None:
    """Return about how many bytes of a model's draft head are fetched; None where its parameters are not known.

    A repository without a quantization holds a checkpoint, of two bytes a parameter.
    """
    if head.size_bytes is not None or head.n_params is None:
        return head.size_bytes
    quantization = parse_hub(str(head.reference)).what
    return bytes_of_params(head.n_params, quantization) if quantization else 2 * head.n_params


def head_share(entry: Entry) -> float | None:
    """Return what the model's draft head reads for a token, or for a block, of what a step reads; None if unknown.

    The head is counted in the type in which edgedec runs it, Q4_0, and the model with the least that its weights take.
    """
    head, n_step = entry.head, least_read_bytes(entry)
    n_params = None if head is None else head.n_active_params or head.n_params
    n_head = None if n_params is None else bytes_of_params(n_params, "Q4_0")
    return None if n_head is None or n_step is None else n_head / n_step


def bytes_of_params(n_params: int, quantization: str) -> int | None:
    """Return the least bytes of parameters in a quantization; None for one that is not known.

    >>> bytes_of_params(1_000_000_000, "Q4_K_M"), bytes_of_params(1_000_000_000, "q8_0"), bytes_of_params(1, "mine")
    (562500000, 1062500000, None)
    """
    name = quantization.upper()
    for ending in ("_S", "_M", "_L"):
        name = name.removesuffix(ending)
    if name not in GGMLType.__members__:
        return None
    kind = GGMLType[name]
    return n_params * kind.block_bytes // kind.block_size


def _least(n_params: int | None, reference: str | None) -> int | None:
    if n_params is None or reference is None:
        return None
    return bytes_of_params(n_params, parse_hub(reference).what)
