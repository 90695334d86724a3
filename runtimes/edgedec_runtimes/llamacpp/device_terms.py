"""What llama.cpp holds on the host and on each device where layers are split among them, from header and dry run.

Sources, in llama.cpp's files: which layer goes where, and that the embedding stays on the host,
`llama_model_base::load_tensors` in src/llama-model.cpp; a tied embedding that is copied to the output's device,
`create_tensor` in src/llama-model-loader.cpp; copies of inputs where several devices have all layers,
`pipeline_parallel` in src/llama-context.cpp and GGML_SCHED_MAX_COPIES in ggml/src/ggml-backend.cpp.

The compute buffers follow from the one of a dry run on the host: the allocator lays out the same graph. They were
compared with llama.cpp's own figures for devices of RPC servers: never below them, at most 4 MB above on one device.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from edgedec.gguf.file import GGUF
from edgedec.gguf.model_info import describe
from edgedec.memory_plan import HOST, Device, MemoryTerm, Split, n_split

N_UBATCH = 512
_INPUTS = ("token_embd", "position_embd", "token_types", "per_layer_token_embd", "rope_")
_ALIGNMENT = 128  # bytes, of a tensor in a CUDA buffer; other back ends have the same or less
_N_COPIES = 4  # GGML_SCHED_MAX_COPIES
_SMALL_INPUTS, _INPUTS_PER_CELL = 65_536, 32
_STAGING_BYTES = 4 << 20
_REMOTE, _SERVER_BYTES = "RPC", 15_000_000
# Back ends with pinned host memory: layers that stay on the host are not rearranged, and files are read by pieces.
_PINNING = ("CUDA", "ROCm", "MUSA", "Vulkan", "SYCL")


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """The bytes of a model's tensors by layer, as a device's buffer holds them.

    Attributes:
        embedding: What the host always keeps.
        layers: Of each layer, the output matrix with its norm as the last.
        tied: What the output's device holds in addition, as the embedding is the output matrix too; else 0.
        largest: The largest tensor that may go to a device.
        largest_in_layers: The same without the output matrix.
    """

    embedding: int
    layers: tuple[int, ...]
    tied: int
    largest: int
    largest_in_layers: int

    def of(self, first: int, n_layers: int) -> int:
        """Return the bytes of `n_layers` layers on a device, from the layer `first` on."""
        has_output = n_layers > 0 and first + n_layers == len(self.layers)
        return sum(self.layers[first : first + n_layers]) + (self.tied if has_output else 0)


@dataclass(frozen=True, slots=True)
class HostRun:
    """What a dry run with all layers on the host says, in bytes, and what it was for.

    Attributes:
        kv_bytes: The KV cache.
        compute_bytes: The compute buffer.
        n_cells: Tokens of the KV cache, over all sequences.
        n_embd: Width of a hidden state.
    """

    kv_bytes: int
    compute_bytes: int
    n_cells: int
    n_embd: int


def layer_bytes(gguf: GGUF) -> LayerBytes:
    """Return the bytes of a model's tensors by layer."""
    n_layer = describe(gguf).n_layer
    layers, embedding, largest = [0] * (n_layer + 1), 0, [0, 0]
    for name, tensor in gguf.tensors.items():
        n_bytes = -(-tensor.n_bytes // _ALIGNMENT) * _ALIGNMENT
        if name.startswith(_INPUTS):
            embedding += n_bytes
            continue
        layer = layer_of(name, n_layer)
        layers[layer] += n_bytes
        largest[layer < n_layer] = max(largest[layer < n_layer], n_bytes)
    shared = gguf.tensors.get("token_embd.weight")
    is_tied = "output.weight" not in gguf.tensors and shared is not None
    tied = -(-shared.n_bytes // _ALIGNMENT) * _ALIGNMENT if is_tied and shared is not None else 0
    return LayerBytes(embedding, tuple(layers), tied, max(*largest, tied), largest[True])


def layer_of(name: str, n_layer: int) -> int:
    """Return the layer that a tensor belongs to; the output matrix and what goes with it are the layer `n_layer`.

    >>> layer_of("blk.7.attn_q.weight", 30), layer_of("output_norm.weight", 30)
    (7, 30)
    """
    block = name.split(".")[1] if name.startswith("blk.") else ""
    return min(int(block), n_layer - 1) if block.isdigit() else n_layer


def default_split(devices: Iterable[Device], n_gpu_layers: int | None, n_layers: int) -> Split:
    """Return the split that llama.cpp makes by itself: shares of the layers by what each device has free.

    Args:
        n_gpu_layers: Layers that are not the host's; None and -1 for all.
        n_layers: All layers, the output matrix included.
    """
    split = tuple(devices)
    n_wanted = n_layers if n_gpu_layers in (None, -1) else min(n_gpu_layers or 0, n_layers)
    free = sum(max(1, device.free_bytes) for device in split)
    counts, share, done = [], 0, 0
    for device in split:
        share += max(1, device.free_bytes)
        last = -(-n_wanted * share // free)  # layer i is here while i / n_wanted is below the share
        counts.append((device.name, last - done))
        done = last
    return tuple(counts) if n_wanted else ()


def weight_terms(gguf: GGUF, split: Split, later: Sequence[MemoryTerm], *, mmap: bool) -> Iterator[MemoryTerm]:
    """Yield the terms of the weights, on the host and on each device.

    `later` are the terms of what is taken once the weights are in place, such as a KV cache.
    """
    sizes = layer_bytes(gguf)
    n_layers = len(sizes.layers)
    first = n_layers - n_split(split)
    n_bytes = sizes.embedding + sum(sizes.layers[:first])
    if not split or not n_split(split):
        yield MemoryTerm(f"weights ({'mapped' if mmap else 'private'})", gguf.n_bytes, "the whole file")
        return
    if mmap:
        detail = "the whole file, while it is copied to the devices"
        yield MemoryTerm("weights (mapped)", gguf.n_bytes, detail)
    else:
        yield MemoryTerm("weights (private)", n_bytes, f"the embedding and {first} of {n_layers} layers")
    n_later = Counter[str]()
    for term in later:
        n_later[term.device] += term.n_bytes
    n_copied = _copied_bytes(sizes, split, n_later[HOST] + (0 if mmap else n_bytes), mmap=mmap)
    yield MemoryTerm("weights (being copied)", n_copied, "for a while, to the devices")
    for name, n in split:
        if n:
            detail = f"{n} of {n_layers} layers"
            yield MemoryTerm("weights", sizes.of(first, n), detail, device=name)
            if name.startswith(_REMOTE):
                n_copied = _received_bytes(sizes, first, n, n_later[name])
                yield MemoryTerm("weights (being copied)", n_copied, "from a message", device=name)
        first += n


def _copied_bytes(sizes: LayerBytes, split: Split, n_later: int, *, mmap: bool) -> int:
    """Return what the largest tensor takes on its way to a device, beyond the `n_later` bytes that are taken later.

    Weights for a server are copied once more, into a message (ggml_backend_rpc_buffer_set_tensor in ggml-rpc.cpp), and
    before the host's own are read.
    """
    if any(name.startswith(_REMOTE) for name, n in split if n):
        return max(0, (1 if mmap else 2) * sizes.largest - n_later)
    if mmap:
        return 0
    return _STAGING_BYTES if all(name.startswith(_PINNING) for name, _ in split) else sizes.largest


def _received_bytes(sizes: LayerBytes, first: int, n_layers: int, n_later: int) -> int:
    """Return what a server holds for a while beside the weights of its layers, beyond what is taken later.

    It receives a message with each tensor, the output matrix first.
    """
    n_output = sizes.of(len(sizes.layers) - 1, 1) if first + n_layers == len(sizes.layers) else 0
    return max(0, max(2 * n_output - sizes.of(first, n_layers), sizes.largest_in_layers) - n_later)


def server_terms(split: Split) -> Iterator[MemoryTerm]:
    """Yield the terms of what servers keep beside a model's tensors: graph, messages, working memory.

    Measured: 2 MB where all prompts are short, 15 MB with one of 440 tokens.
    """
    for name, n in split:
        if n and name.startswith(_REMOTE):
            yield MemoryTerm("activations", _SERVER_BYTES, "graph and messages", device=name)


def n_rearranged(gguf: GGUF, split: Split) -> int:
    """Return how many of the first layers the host keeps and may rearrange; none where llama.cpp pins host memory."""
    pins = any(name.startswith(_PINNING) for name, n in split if n)
    return 0 if pins else describe(gguf).n_layer + 1 - n_split(split)


def kv_terms(run: HostRun, split: Split, n_layer: int, detail: str) -> Iterator[MemoryTerm]:
    """Yield the terms of the KV cache: each layer's part lies where the layer is; layers are taken to be alike."""
    first, n_here = n_layer + 1 - n_split(split), 0
    shares = []
    for name, n in split:
        n_with_kv = max(0, min(first + n, n_layer) - first)  # the output matrix has none
        shares.append((name, n_with_kv))
        n_here += n_with_kv
        first += n
    n_host = run.kv_bytes - sum(run.kv_bytes * n // n_layer for _, n in shares)
    if n_here < n_layer:
        yield MemoryTerm("KV cache", n_host, detail)
    for name, n in shares:
        if n:
            yield MemoryTerm("KV cache", run.kv_bytes * n // n_layer, detail, device=name)


def compute_bytes(run: HostRun, split: Split, n_layer: int) -> dict[str, int]:
    """Return the compute buffers by device, under HOST that of the host.

    Where several devices have all layers, llama.cpp keeps copies of the inputs, and each device but the first copies of
    the hidden states that it is handed.
    """
    n_rows = min(N_UBATCH, run.n_cells)
    states = n_rows * run.n_embd * 4
    inputs = 2 * states + run.n_cells * (2 * n_rows + _INPUTS_PER_CELL) + _SMALL_INPUTS
    used = [name for name, n in split if n]
    is_whole = n_split(split) == n_layer + 1
    n_more = _N_COPIES - 1 if is_whole and len(split) > 1 else 0
    by_device = {HOST: min(run.compute_bytes, inputs) * (1 + n_more) if is_whole else run.compute_bytes}
    for index, name in enumerate(used):
        copies = n_more * (inputs + (states if index else 0))
        by_device[name] = max(run.compute_bytes - states, 0) + copies
    return by_device
