"""What kind of random tiny model tiny_quantized.py writes."""

from dataclasses import dataclass
from typing import Any

from support.models.state_spaces import SMALL
from support.models.state_spaces import StateSpace as StateSpace
from support.models.tiny_models import N_VOCAB


@dataclass(frozen=True, slots=True)
class Tiny:
    """What kind of model; the defaults have the widths that every type's blocks fit.

    Attributes:
        types: Names of tensor types; every matrix has one of them at random.
        dealt: The matrices have the types in turn instead, so that none is missing.
        tied: There is no matrix of the head beside that of the embeddings.
        biases: Queries, keys and values have biases (qwen2 always).
        vectors: More vectors of every layer.
        rope_factors: There is a vector of what frequencies are divided by, as Llama 3 has; of phi3, two.
        rope_scale: Positions are divided by it ("linear" scaling); 1 for no such keys.
        sliding_window: Tokens that layers with a window see.
        convolutions: Layers that have a short convolution in place of attention.
        recurrent: Layers that have a recurrent state in place of attention.
        n_state_head, n_state_key_head, n_state: Heads with states, heads of their keys, and the width of both.
        n_rot: Elements of a head that are rotated; None for all.
        n_expert, n_expert_used: Experts of a layer and of a token; 0 for a feed-forward block.
        n_dense: Layers from the first on that have a feed-forward block instead of experts.
        n_ff_expert, n_ff_shared: The width of an expert, and of the one that all tokens go through.
        narrow: Length of a head in layers with a window; 0 for head_dim.
        whole: One layer of so many sees everything, of gemma4.
        n_shared: Layers, the last ones, that read the keys and values of layers before; their feed-forward blocks are
            twice as wide.
        n_per_layer: Elements that each layer gets of a token; 0 where it gets none.
        keys_as_values: Layers that see everything have no matrix of values, and half the key-value heads.
        n_vocab: Tokens, at least N_VOCAB.
        parts: By layer, what it has: A (attention), M (a Mamba-2 mixer) and F (a feed-forward block); () for A and F.
            The parts of later layers are the same again.
        space: The sizes of the mixers.
        keys: More metadata keys, below the architecture's name.
    """

    architecture: str = "llama"
    types: tuple[str, ...] = ("F32",)
    dealt: bool = False
    n_layer: int = 2
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_ff: int = 256
    n_ctx_train: int = 1024
    tied: bool = False
    biases: bool = False
    vectors: tuple[str, ...] = ()
    rope_factors: bool = False
    rope_scale: float = 1.0
    sliding_window: int = 8
    convolutions: tuple[int, ...] = ()
    recurrent: tuple[int, ...] = ()
    n_state_head: int = 4
    n_state_key_head: int = 2
    n_state: int = 64
    n_rot: int | None = None
    n_expert: int = 0
    n_expert_used: int = 0
    n_dense: int = 0
    n_ff_expert: int = 256
    n_ff_shared: int = 0
    narrow: int = 0
    whole: int = 3
    n_shared: int = 0
    n_per_layer: int = 0
    keys_as_values: bool = False
    n_vocab: int = N_VOCAB
    parts: tuple[str, ...] = ()
    space: StateSpace = SMALL
    keys: tuple[tuple[str, Any], ...] = ()
    seed: int = 0

    def has(self, layer: int, part: str) -> bool:
        """Return whether a layer has a part; of a model whose layers have parts."""
        return part in self.parts[layer % len(self.parts)]

    def slides(self, layer: int) -> bool:
        """Return whether a layer of gemma4 has a window."""
        return self.architecture == "gemma4" and (layer + 1) % self.whole != 0

    def shares(self, layer: int) -> bool:
        """Return whether a layer reads the keys and values of one before."""
        return layer >= self.n_layer - self.n_shared

    def heads(self, layer: int) -> tuple[int, int]:
        """Return the key-value heads of a layer, and their length."""
        is_whole = not self.slides(layer)
        n = self.n_head_kv // 2 if is_whole and self.keys_as_values else self.n_head_kv
        return n, self.head_dim if is_whole else self.narrow

    def width(self, layer: int) -> int:
        """Return the width of a layer's feed-forward block."""
        return self.n_ff * (2 if self.shares(layer) else 1)

    def missing(self, layer: int) -> tuple[str, ...]:
        """Return the matrices that a layer with attention lacks."""
        if self.shares(layer):
            return ("attn_k.weight", "attn_v.weight")
        return ("attn_v.weight",) if self.keys_as_values and not self.slides(layer) else ()

    @property
    def gain(self) -> float:
        """What the head's matrix is larger by, where the architecture divides logits by it."""
        return float(dict(self.keys).get("logit_scale", 1.0))
