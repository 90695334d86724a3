"""The hyperparameters of a llama-like decoder, for the runtimes that run one themselves."""

from dataclasses import dataclass

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
        "classifier.output_labels",
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
ATTENTION, CONVOLUTION, RECURRENT, NO_MIXER = "attention", "convolution", "recurrent", "none"
ATTENTION_AND_RECURRENT = "attention+recurrent"
"""The mixers of layers (LayerShape.mixer)."""
ENCODER, MEMORY, DECODER, CROSS = "encoder", "memory", "decoder", "cross"
"""The roles of the layers of a model with an encoder (LayerShape.role)."""
OF_TARGET = -1
"""LayerShape.kv_from of layers of a draft head that see the target's keys and values; their role is "cross"."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of one layer.

    Attributes:
        mixer: What stands before the feed-forward block: "attention", "convolution" (a short one, of LFM2), "recurrent"
            (Switches.recurrence), "attention+recurrent" (side by side) or "none".
        n_head, n_head_kv: Heads of queries, and of keys and values.
        head_dim: Length of a head, of keys as of values.
        n_ff: Width of the feed-forward block, unless the layer has experts; 0 where it has none.
        kv_from: The layer whose keys and values the attention reads: its own number, that of a layer before, or
            OF_TARGET.
        is_mixer: The layer has a mixer only, neither a feed-forward block nor experts.
        role: "all", or what the layer is for in a model with an encoder: its rows are those of the source, which see
            one another ("encoder"); it only keeps keys and values of the encoder's output ("memory"); its rows are
            those behind the source, which see one another ("decoder"), or the source, by a memory ("cross").
    """

    mixer: str
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    kv_from: int
    is_mixer: bool = False
    role: str = "all"

    def has(self, mixer: str) -> bool:
        """Return whether the layer has a mixer of this kind, alone or beside another one."""
        return mixer in self.mixer.split("+")

    @property
    def n_q(self) -> int:
        """Elements of one token's queries."""
        return self.n_head * self.head_dim

    @property
    def n_kv(self) -> int:
        """Elements of one token's keys (or values)."""
        return self.n_head_kv * self.head_dim


_MAX_LOOPS = 512


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The numbers that give a decoder its shape.

    Attributes:
        n_vocab: Rows of the embedding matrix.
        n_rot: Elements of a head that are rotated to their position, in layers that see the whole context.
        n_expert: Experts of a layer with a mixture of experts; 0 where there are none.
        n_expert_used: Experts that a token goes through.
        n_ff_expert: Width of an expert.
        n_ff_shared: Width of the expert that all tokens go through; 0 where there is none.
        n_dense: Layers from the first on that have a feed-forward block instead of experts.
        n_per_layer: Elements that each layer gets of a token beside the hidden state; 0 where it gets none.
        layers: The shape of each layer.
        n_loops: How many times the file's layers run, one pass after another. The passes' layers count as layers, whose
            weights are the same.
    """

    architecture: str
    n_vocab: int
    n_embd: int
    n_layer: int
    n_ctx_train: int
    n_rot: int
    rope_base: float
    rms_epsilon: float
    n_expert: int
    n_expert_used: int
    n_ff_expert: int
    n_ff_shared: int
    n_dense: int
    n_per_layer: int
    layers: tuple[LayerShape, ...]
    n_loops: int

    @property
    def n_block(self) -> int:
        """How many layers the file has."""
        return self.n_layer // self.n_loops

    @property
    def n_head(self) -> int:
        """Heads of queries. This number, like the next three, is refused by name where layers differ in it."""
        return self._in_all_layers("n_head")

    @property
    def n_head_kv(self) -> int:
        """Heads of keys and values."""
        return self._in_all_layers("n_head_kv")

    @property
    def head_dim(self) -> int:
        """Length of a head."""
        return self._in_all_layers("head_dim")

    @property
    def n_ff(self) -> int:
        """Width of the feed-forward blocks."""
        return self._in_all_layers("n_ff")

    def has_mixer(self, layer: int, mixer: str) -> bool:
        """Return whether a layer has a mixer of this kind."""
        return self.layers[layer].has(mixer)

    def n_with(self, mixer: str) -> int:
        """Return how many layers have a mixer of this kind."""
        return sum(self.has_mixer(layer, mixer) for layer in range(self.n_layer))

    @property
    def most_heads(self) -> int:
        """The most heads of queries that a layer with attention has; 0 without such layers."""
        return max((layer.n_head for layer in self.layers if layer.has(ATTENTION)), default=0)

    def stores_kv(self, layer: int) -> bool:
        """Return whether a layer stores keys and values; a layer that reads those of another one does not."""
        return self.has_mixer(layer, ATTENTION) and self.layers[layer].kv_from == layer

    @property
    def is_encoder(self) -> bool:
        """Whether there is an encoder alone, which makes states of a text's tokens and writes nothing."""
        return all(layer.role == ENCODER for layer in self.layers)

    @property
    def n_source(self) -> int:
        """Most tokens that the encoder reads; 0 where there is none.

        With a decoder it is half of the context, which counts what is read and what is written
        (ModelInfo.n_ctx_train).
        """
        if self.is_encoder:
            return self.n_ctx_train
        return self.n_ctx_train // 2 if any(layer.role == ENCODER for layer in self.layers) else 0

    @property
    def kept_layers(self) -> list[LayerShape]:
        """The layers whose keys and values have places of their own: those of the role that has the most of them.

        Encoder, memory and decoder keep theirs in the same places: what an encoder layer keeps is read no more when
        memories are written, and those of the text are other tokens.
        """
        by_role: dict[str, list[LayerShape]] = {}
        for number, layer in enumerate(self.layers):
            if self.stores_kv(number):
                by_role.setdefault(layer.role, []).append(layer)
        return max(by_role.values(), key=len, default=[])

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has a mixture of experts."""
        return self.n_expert > 0 and layer >= self.n_dense and not self.layers[layer].is_mixer

    def dense_width(self, layer: int) -> int:
        """Return the width of a layer's feed-forward block, or of the expert that all tokens go through there."""
        return self.n_ff_shared if self.has_experts(layer) else self.layers[layer].n_ff

    def has_mlp(self, layer: int) -> bool:
        """Return whether a layer has a feed-forward block or a mixture of experts."""
        return self.has_experts(layer) or self.layers[layer].n_ff > 0

    def _in_all_layers(self, name: str) -> int:
        """Return a number of the layers' shapes that all layers with attention, or with a feed-forward block, share.

        Raises:
            UnsupportedModelError: They differ in it.
        """
        is_there = "n_ff" if name == "n_ff" else "n_head_kv"
        values = {getattr(layer, name) for layer in self.layers if getattr(layer, is_there)}
        if len(values) > 1:
            raise UnsupportedModelError(
                f"the layers of this {self.architecture} differ in {name}, which is from {min(values)} to "
                f"{max(values)}; expected layers of one shape: run the GGUF itself, with the cpu runtime"
            )
        return max(values, default=0)


def read_hyperparameters(
    gguf: GGUF, info: ModelInfo, runtime: str, more_keys: frozenset[str] = frozenset(), ignored: tuple[str, ...] = ()
) -> Hyperparameters:
    """Return the hyperparameters of a llama-like decoder; layers with key-value heads have attention, others nothing.

    Args:
        gguf: The model.
        info: What describe said of it.
        runtime: The runtime's name, for messages.
        more_keys: Metadata keys that the runtime honours, below the architecture's name, beside those of every decoder.
        ignored: How keys begin, below the architecture's name, that are of other parts of a file than the decoder.

    Raises:
        UnsupportedModelError: The file has a key that the runtime would ignore.
        ModelFormatError: The file contradicts itself, or a number is missing.
    """
    path, name = gguf.paths[0], info.architecture
    for key in gguf.metadata:
        prefix, _, rest = key.partition(".")
        if prefix == name and rest not in _KEYS | more_keys and not rest.startswith(ignored):
            raise UnsupportedModelError(
                f"{path}: the {runtime} runtime does not know {key!r}; use the llamacpp runtime"
            )
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFormatError(f"{path}: it has no matrix 'token_embd.weight'; download the file again")
    if info.rms_epsilon is None:
        refuse_missing(gguf, f"{name}.attention.layer_norm_rms_epsilon")
    if info.value_length != info.key_length:
        raise UnsupportedModelError(f"{path}: keys and values differ in length; use the llamacpp runtime")
    attends = any(info.n_head_kv)
    head_dim = positive(gguf, "attention.key_length", info.key_length) if attends else 0
    n_ff = info.n_ff
    if n_ff is None:
        n_ff = (0,) * info.n_layer if info.n_expert else refuse_missing(gguf, f"{name}.feed_forward_length")
    n_loops = get_int(gguf, f"{name}.num_loops", at_least=1, at_most=_MAX_LOOPS) or 1
    sizes = enumerate(list(zip(info.n_head, info.n_head_kv, n_ff, strict=True)) * n_loops)
    return Hyperparameters(
        architecture=name,
        n_vocab=embedding.shape[1],
        n_embd=positive(gguf, "embedding_length", info.n_embd),
        n_layer=positive(gguf, "block_count", info.n_layer) * n_loops,
        n_ctx_train=positive(gguf, "context_length", info.n_ctx_train),
        n_rot=positive(gguf, "rope.dimension_count", info.n_rot) if attends else 0,
        rope_base=info.rope_base,
        rms_epsilon=info.rms_epsilon,
        **_experts(gguf, info),
        n_per_layer=get_int(gguf, f"{name}.embedding_length_per_layer_input", at_most=_MAX_WIDTH) or 0,
        layers=tuple(
            LayerShape(ATTENTION if n_kv else NO_MIXER, n_head, n_kv, head_dim, width, layer)
            for layer, (n_head, n_kv, width) in sizes
        ),
        n_loops=n_loops,
    )


def _experts(gguf: GGUF, info: ModelInfo) -> dict[str, int]:
    """Return the fields of Hyperparameters about experts.

    Files leave out the widths where these follow from others, by rules of each architecture; then those of the first
    layer's matrices stand.
    """
    names = ("n_expert", "n_expert_used", "n_ff_expert", "n_ff_shared", "n_dense")
    if not info.n_expert:
        return dict.fromkeys(names, 0)
    n_dense = get_int(gguf, f"{info.architecture}.leading_dense_block_count", at_most=info.n_layer) or 0

    def width(key: str, *shorts: str) -> int:
        value = get_int(gguf, f"{info.architecture}.{key}", at_most=_MAX_WIDTH)
        tensors = (gguf.tensors.get(f"blk.{n_dense}.{short}.weight") for short in shorts)
        widths = (tensor.shape[1] for tensor in tensors if tensor is not None and len(tensor.shape) > 1)
        return value or next(widths, 0)

    n_ff_expert = width("expert_feed_forward_length", "ffn_gate_exps", "ffn_up_exps")
    n_ff_shared = width("expert_shared_feed_forward_length", "ffn_up_shexp", "ffn_gate")
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
