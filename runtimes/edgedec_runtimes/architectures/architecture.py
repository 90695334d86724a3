"""What an architecture is: the tensors and the metadata keys of its files, and the switches of its networks.

The base of all is Llama (Touvron et al. 2023, arXiv:2302.13971). Each other file of this folder but `header`, `rope`
and `fused` is one architecture, as docs/plugins.md explains.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from edgedec.gguf.file import GGUF
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.rope import Rope, read_rope
from edgedec_runtimes.shared.hyperparameters import Hyperparameters, LayerShape

OUTPUT_BIAS = "attn_output.bias"
SINKS = "attn_sinks.weight"
DISTANCE_BIAS = "attn_rel_b.weight"
EXPERT_CHOICE_BIAS = "exp_probs_b.bias"
EXPERT_BIASES = frozenset(f"ffn_{name}.bias" for name in ("gate_inp", "gate_exps", "up_exps", "down_exps"))
BIASES = frozenset({"attn_q.bias", "attn_k.bias", "attn_v.bias"})
INPUT_NORMS = frozenset({"attn_norm.weight", "ffn_norm.weight"})
POST_NORMS = frozenset({"post_attention_norm.weight", "post_ffw_norm.weight"})
PER_LAYER = frozenset({"per_layer_proj_norm.weight", "post_norm.weight"})
EXPERT_NORMS = frozenset(
    """
    ffn_gate_inp.scale pre_ffw_norm_2.weight post_ffw_norm_1.weight post_ffw_norm_2.weight ffn_down_exps.scale
    """.split()
)
QK_NORMS = frozenset({"attn_q_norm.weight", "attn_k_norm.weight"})
CONVOLUTION_KERNELS = frozenset({"shortconv.conv.weight"})
RECURRENCE_VECTORS = frozenset({"ssm_conv1d.weight", "ssm_dt.bias", "ssm_a", "ssm_norm.weight"})


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The sizes of the layers with a recurrent state.

    A row's queries and keys, [n_key_head, n_key] each, and its values, [n_head, n_value], come out of one matrix and
    then of a convolution. Each head has a state, [n_key, n_value]. Papers of state spaces call keys B and queries C.

    Attributes:
        rule: How a row changes the state: "delta" (the gated delta rule), or "space" (the state spaces of Mamba-2).
        n_head: Heads with a state.
        n_key_head: Heads of queries and keys; each belongs to the same number of heads.
        length: How many tokens the convolution goes over.
        tiled: Head h has the key h % n_key_head (true), or neighbouring heads share a key (false).
    """

    rule: str
    n_head: int
    n_key_head: int
    n_key: int
    n_value: int
    length: int
    tiled: bool = False

    @property
    def n_values(self) -> int:
        """Elements of a row's values."""
        return self.n_head * self.n_value

    @property
    def n_norm(self) -> int:
        """Elements that the weights of the norm of the results have."""
        return self.n_values if self.rule == "space" else self.n_value

    @property
    def n_column(self) -> int:
        """Elements that the convolution goes over."""
        return 2 * self.n_key_head * self.n_key + self.n_values


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """How a network differs from others of its shape.

    Attributes:
        rope: How queries and keys are rotated.
        attention_scale: What the products of queries and keys are multiplied by.
        rope_interleaved: A rotation pairs neighbouring elements of a head, not its two halves.
        activation: What a gate g of the feed-forward block becomes before it multiplies: g * sigmoid(g) ("silu"), the
            tanh form of GELU ("gelu"), the greater of g and 0 ("relu"), or the square of that ("relu2").
        ungated: Feed-forward blocks and experts have no gate: `up` itself goes through the activation.
        glu_limit, glu_slope: l and s where a gate g becomes min(g, l) * sigmoid(s * min(g, l)), and what it multiplies
            becomes 1 + u, with u kept from -l to l; a limit of 0 where they do not.
        wide_norms: The norms of queries and keys are over all heads together, not over each head.
        norms_after_rope: The norms of queries and keys stand behind their rotation, not before it.
        norm_period: Behind each group of so many layers but the last, the state goes through the norm that stands
            behind all layers; 0 for none of them.
        embedding_scale: What embeddings are multiplied by.
        scaled_vectors: Vectors that stand in place of embeddings are multiplied by it, too.
        residual_scale: What the output of every half-layer is multiplied by before it is added to the hidden state.
        logit_scale: What logits are multiplied by.
        attention_softcap: c where attention scores become c * tanh(score / c); 0 where they stay.
        logit_softcap: The same for logits, after `logit_scale`.
        sliding_window: How many tokens the layers of `sliding` see.
        sliding: By layer: whether it sees a sliding window instead of all tokens before it; () for no layer.
        rope_sliding: How queries and keys of the layers of `sliding` are rotated; None for `rope`.
        value_norm: Each head of the values is normed, without a weight. A layer without a matrix of values has its keys
            as they are before their norm.
        unrotated: By layer: whether queries and keys are not rotated; () for no layer.
        convolution_length: How many tokens the short convolutions of layers without attention go over (LFM2); 0 where
            all layers have attention.
        temperature_scale, temperature_tokens: s and t where queries at position p are multiplied by
            1 + s * ln(1 + floor(p / t)); 0 tokens where they are not.
        expert_gating: How a router's scores become the weights of experts: by a softmax over all of them ("softmax"),
            the sigmoid of each ("sigmoid"), a softmax over those that a token goes through ("chosen"), or the score
            where it is above 0, over the root of the mean of all such squares ("relu"), where a token goes through all
            such experts.
        early_router: A layer's router reads the state that enters the layer, not what its experts read.
        norm_experts: The weights of a token's experts are divided by their sum.
        expert_scale: What these weights are multiplied by.
        attention_gate: Every head of queries has a gate behind it, whose sigmoid multiplies the head's result.
        recurrence: The sizes of the layers with a recurrent state; None where there are none.
    """

    rope: Rope
    attention_scale: float
    rope_interleaved: bool = False
    activation: str = "silu"
    ungated: bool = False
    glu_limit: float = 0.0
    glu_slope: float = 1.0
    wide_norms: bool = False
    norms_after_rope: bool = False
    norm_period: int = 0
    embedding_scale: float = 1.0
    scaled_vectors: bool = False
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    sliding_window: int = 0
    sliding: tuple[bool, ...] = ()
    rope_sliding: Rope | None = None
    value_norm: bool = False
    unrotated: tuple[bool, ...] = ()
    convolution_length: int = 0
    temperature_scale: float = 0.0
    temperature_tokens: int = 0
    expert_gating: str = "softmax"
    early_router: bool = False
    norm_experts: bool = False
    expert_scale: float = 1.0
    attention_gate: bool = False
    recurrence: Recurrence | None = None

    def slides(self, layer: int) -> bool:
        """Return whether a layer sees a sliding window instead of all tokens before it."""
        return bool(self.sliding) and self.sliding[layer]

    def rotates(self, layer: int) -> bool:
        """Return whether a layer's queries and keys are rotated."""
        return not self.unrotated or not self.unrotated[layer]

    def rope_of(self, layer: int) -> Rope:
        """Return how a layer that rotates does so."""
        return self.rope_sliding if self.slides(layer) and self.rope_sliding is not None else self.rope


def plain(header: Header) -> Switches:
    """Return the switches of a Llama whose heads are rotated in halves; dataclasses.replace changes what differs."""
    return Switches(rope=read_rope(header), attention_scale=max(header.hyper.head_dim, 1) ** -0.5)


def said_layers(header: Header) -> tuple[LayerShape, ...]:
    """Return the shapes of the layers as the metadata has them."""
    return header.hyper.layers


def as_stored(gguf: GGUF, hyper: Hyperparameters) -> GGUF:
    """Return the header as it is."""
    return gguf


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family of networks. An entry point of the group `edgedec.architectures` names one.

    Attributes:
        switches: Returns the switches of a network, given its header.
        keys: Metadata keys of its files below the architecture's name, beside those of every llama-like decoder.
        vectors: Vectors that its files may have.
        needed: Vectors that every layer of its files has.
        renamed: Names of tensors in its files, of a layer's tensors without its number, with their usual names.
        layers: Returns the shape of each layer, given a header whose shapes are what the metadata of every decoder says
            (`read_hyperparameters`): for networks whose layers differ in more than that.
        placed: Returns a header in which the tensors are those of layers, `blk.0.` and so on: for files that name them
            by parts of the network. Of a header that is so already it returns the same.
        ignored: How names of tensors begin, and keys below the architecture's name, that are of other parts of a file
            than the decoder, such as what reads images.
    """

    switches: Callable[[Header], Switches] = plain
    keys: frozenset[str] = frozenset()
    vectors: frozenset[str] = frozenset()
    needed: frozenset[str] = INPUT_NORMS
    renamed: Mapping[str, str] = field(default_factory=dict)
    layers: Callable[[Header], tuple[LayerShape, ...]] = said_layers
    placed: Callable[[GGUF, Hyperparameters], GGUF] = as_stored
    ignored: tuple[str, ...] = ()
