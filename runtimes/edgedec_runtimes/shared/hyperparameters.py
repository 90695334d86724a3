"""The hyperparameters of a llama-like decoder as single numbers, for the runtimes that run one themselves."""

from dataclasses import dataclass
from itertools import compress

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import GGUF
from edgedec.gguf.metadata import get_int, refuse_missing
from edgedec.gguf.model_info import ModelInfo

_KEYS = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "pooling_type",
        "rope.dimension_count",
        "rope.freq_base",
        "vocab_size",
    }
)

_MAX_WIDTH = 2**24
_MAX_LOOPS = 512


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The numbers that give a decoder its shape; those of heads hold for every layer that has attention.

    Attributes:
        n_vocab: Rows of the embedding matrix.
        head_dim: Length of a head, of keys as of values.
        n_rot: Elements of a head that are rotated to their position.
        n_expert: Experts of a layer with a mixture of experts; 0 where there are none.
        n_expert_used: Experts that a token goes through.
        n_ff_expert: Width of an expert.
        n_ff_shared: Width of the expert that all tokens go through; 0 where there is none.
        n_dense: Layers from the first on that have a feed-forward block instead of experts.
        has_attention: By layer: whether it has attention.
        n_loops: How many times the file's layers run, one pass after another. The passes' layers count as layers, whose
            weights are the same.
    """

    architecture: str
    n_vocab: int
    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_ctx_train: int
    n_rot: int
    rope_base: float
    rms_epsilon: float
    n_expert: int
    n_expert_used: int
    n_ff_expert: int
    n_ff_shared: int
    n_dense: int
    has_attention: tuple[bool, ...]
    n_loops: int

    @property
    def n_block(self) -> int:
        """How many layers the file has."""
        return self.n_layer // self.n_loops

    @property
    def n_attention(self) -> int:
        """How many layers have attention."""
        return sum(self.has_attention)

    @property
    def n_kv(self) -> int:
        """Elements of one token's keys (or values) in one layer."""
        return self.n_head_kv * self.head_dim

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has a mixture of experts."""
        return self.n_expert > 0 and layer >= self.n_dense


def read_hyperparameters(
    gguf: GGUF, info: ModelInfo, runtime: str, more_keys: frozenset[str] = frozenset(), *, is_hybrid: bool = False
) -> Hyperparameters:
    """Return the hyperparameters of a llama-like decoder.

    Args:
        gguf: The model.
        info: What describe said of it.
        runtime: The runtime's name, for messages.
        more_keys: Metadata keys that the runtime honours, below the architecture's name, beside those of every decoder.
        is_hybrid: Layers may have no attention, which their 0 key-value heads say.

    Raises:
        UnsupportedModelError: The file has a key that the runtime would ignore, or its layers or heads differ in size.
        ModelFormatError: The file contradicts itself, or a number is missing.
    """
    path, name = gguf.paths[0], info.architecture
    for key in gguf.metadata:
        prefix, _, rest = key.partition(".")
        if prefix == name and rest not in _KEYS | more_keys:
            raise UnsupportedModelError(
                f"{path}: the {runtime} runtime does not know {key!r}; use the llamacpp runtime"
            )
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFormatError(f"{path}: it has no matrix 'token_embd.weight'; download the file again")
    if info.rms_epsilon is None:
        refuse_missing(gguf, f"{name}.attention.layer_norm_rms_epsilon")
    n_loops = get_int(gguf, f"{name}.num_loops", at_least=1, at_most=_MAX_LOOPS) or 1
    has_attention = tuple(n > 0 or not is_hybrid for n in info.n_head_kv)
    hyper = Hyperparameters(
        architecture=name,
        n_vocab=embedding.shape[1],
        n_embd=positive(gguf, "embedding_length", info.n_embd),
        n_layer=positive(gguf, "block_count", info.n_layer) * n_loops,
        n_head=in_all_layers(gguf, "attention.head_count", info.n_head),
        n_head_kv=in_all_layers(gguf, "attention.head_count_kv", tuple(compress(info.n_head_kv, has_attention))),
        head_dim=positive(gguf, "attention.key_length", info.key_length),
        n_ff=in_all_layers(gguf, "feed_forward_length", info.n_ff),
        n_ctx_train=positive(gguf, "context_length", info.n_ctx_train),
        n_rot=positive(gguf, "rope.dimension_count", info.n_rot),
        rope_base=info.rope_base,
        rms_epsilon=info.rms_epsilon,
        **_experts(gguf, info),
        has_attention=has_attention * n_loops,
        n_loops=n_loops,
    )
    if hyper.n_head % hyper.n_head_kv or hyper.n_rot % 2 or hyper.n_rot > hyper.head_dim:
        raise ModelFormatError(
            f"{path}: {hyper.n_head} heads on {hyper.n_head_kv} key-value heads, {hyper.n_rot} rotated elements of "
            f"{hyper.head_dim}; expected a multiple and an even number of at most the head: download the file again"
        )
    if info.value_length != info.key_length:
        raise UnsupportedModelError(f"{path}: keys and values differ in length; use the llamacpp runtime")
    return hyper


def _experts(gguf: GGUF, info: ModelInfo) -> dict[str, int]:
    """Return the fields of Hyperparameters about experts.

    Files leave out the widths where these follow from others, by rules of each architecture; then those of the first
    layer's matrices stand.
    """
    names = ("n_expert", "n_expert_used", "n_ff_expert", "n_ff_shared", "n_dense")
    if not info.n_expert:
        return dict.fromkeys(names, 0)
    n_dense = get_int(gguf, f"{info.architecture}.leading_dense_block_count", at_most=info.n_layer) or 0

    def width(key: str, short: str) -> int:
        found = get_int(gguf, f"{info.architecture}.{key}", at_most=_MAX_WIDTH)
        tensor = gguf.tensors.get(f"blk.{n_dense}.{short}.weight")
        return found or (tensor.shape[1] if tensor is not None and len(tensor.shape) > 1 else 0)

    n_ff_expert = width("expert_feed_forward_length", "ffn_gate_exps")
    n_ff_shared = width("expert_shared_feed_forward_length", "ffn_gate_shexp")
    sizes = (info.n_expert, positive(gguf, "expert_used_count", info.n_expert_used))
    n_ff_expert = positive(gguf, "expert_feed_forward_length", n_ff_expert)
    return dict(zip(names, (*sizes, n_ff_expert, n_ff_shared, n_dense), strict=True))


def in_all_layers(gguf: GGUF, key: str, values: tuple[int, ...] | None) -> int:
    """Return the number that a hyperparameter has in every layer.

    Args:
        gguf: The model, for messages.
        key: The hyperparameter's key below the architecture's name, for messages.
        values: The hyperparameter by layer; None where the file does not give it.

    Raises:
        UnsupportedModelError: The layers differ in it.
        ModelFormatError: It is missing or 0.
    """
    if len(set(values or ())) > 1:
        raise UnsupportedModelError(f"{gguf.paths[0]}: the layers differ in {key!r}; use the llamacpp runtime")
    return positive(gguf, key, values[0] if values else None)


def positive(gguf: GGUF, key: str, value: int | None) -> int:
    """Return a hyperparameter that is 1 or more (ModelFormatError where it is 0, or None: not in the file)."""
    key = f"{gguf.metadata['general.architecture']}.{key}"
    if value is None:
        refuse_missing(gguf, key)
    if value < 1:
        raise ModelFormatError(f"{gguf.paths[0]}: {key} is {value}, expected 1 or more; download the file again")
    return value
