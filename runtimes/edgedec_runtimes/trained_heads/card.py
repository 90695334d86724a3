"""What is known of a trained draft head without its weights, in one form for all file formats.

`fc` fuses hidden states of the target (its *taps*) into a feature, and an output matrix scores the draft vocabulary.
Between them stands

- in an EAGLE-3 head (arXiv:2503.01840), one decoder layer that reads pairs of a feature and a token's embedding, and
  drafts token after token;
- in a head that joins pairs (nextn; arXiv:2412.19437), a matrix that makes one row of each pair, and an ordinary layer.
  It needs no `fc`: what leaves the target's last norm is the feature. In an assistant (Gemma 4) the layers see the
  target's keys and values, and `fc` makes features of the assistant's own states;
- in a row head (hidden transfer, arXiv:2404.12022; parallel prompt decoding, arXiv:2405.18628), the target's own
  layers: rows behind the newest token's go through them in the same forward. It has no `fc`, no layer and no taps;
- in an exit head (Kangaroo, arXiv:2404.18911), an attention block that sees what the target's first layers make of each
  token, drafted ones too. Its only tap is that state, and it has no `fc`;
- in a block head (DFlash, arXiv:2602.06036; DSpark, arXiv:2607.05147; DFlash2), one or more decoder layers that read
  the newest token and masks behind it, and draft all tokens in one forward. The features are seen by attention alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FcNorm = Literal["none", "joined", "each"]
Markov = Literal["none", "vanilla", "gated", "rnn", "selector"]


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a head was trained for.

    Attributes:
        name: Its name, for messages; may be empty.
        weights_hash: What `hash_weights` (target.py, beside this file) returns for the file it learned from; "" where
            unknown.
        norms_hash: What `hash_norms` returns for that file: quantizations of one model share it; "" where unknown.
        tokenizer_hash: What `hash_tokenizer` returns for that file; "" where unknown.
    """

    name: str = ""
    weights_hash: str = ""
    norms_hash: str = ""
    tokenizer_hash: str = ""


@dataclass(frozen=True, slots=True)
class Promise:
    """What a head accepted on prompts that it was not trained on, drafting chains, greedy.

    Attributes:
        reach: Chance that a draft is accepted up to its first, second, third, ... token: each at most the one before.
        reach_by_kind: The same by the kind of prompt ("chat", "math", ...); may be empty.
    """

    reach: tuple[float, ...]
    reach_by_kind: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The fields of a block head's card that an EAGLE-3 head does not have.

    Row j of a block stands at position anchor + j, where the anchor is the position of the newest token. Every row
    attends to all tokens before the anchor, whose keys and values are made of their features.

    Attributes:
        n_layer: Its decoder layers.
        size: Rows of a block as it was trained: the newest token, and size - 1 masks.
        shifted: Row j predicts the token at anchor + j + 1; else the one at anchor + j, and row 0 drafts nothing.
        causal: A row sees the rows of its block up to itself; else it sees all of them.
        windows: For each layer how many features before the anchor its rows see; 0 for all. Empty where all layers
            see all.
        markov: How a row's scores depend on the token before: not at all, by a matrix product of that token's
            embedding e ("vanilla"), of e times a gate ("gated"), or of a recurrent state ("rnn"). A "selector" scores
            the row's `top_k` best tokens alone, and adds the product of e times a gate with an embedding of each.
        rank: Length of e; 0 where there is no e.
        top_k: How many tokens a selector scores; else 0.
        conv_length: Convolutions stand before and behind each layer's attention, and before and behind its gate, up and
            down. They go over so many rows of the block, the row itself and those before it; 0 where there are none.
        conv_group: So many neighbours of a row share what is added to the base of their kernels; else 0.
        confidence: The head says how likely a drafted token is accepted, given that all before it were.
        logit_scale: Multiplies what the output matrix makes.
        softcap: If not 0, scores x so scaled become softcap * tanh(x / softcap), before the token before is heeded.
        embedding_scale: Multiplies the embeddings, that of masks too.
        mask_token: The token whose embedding masked rows have; -1 where the head has a tensor `mask`.
    """

    n_layer: int
    size: int
    shifted: bool
    causal: bool = False
    windows: tuple[int, ...] = ()
    markov: Markov = "none"
    rank: int = 0
    top_k: int = 0
    conv_length: int = 0
    conv_group: int = 0
    confidence: bool = False
    logit_scale: float = 1.0
    softcap: float = 0.0
    embedding_scale: float = 1.0
    mask_token: int = -1

    @property
    def n_drafts(self) -> int:
        """How many tokens a block drafts at most."""
        return self.size if self.shifted else self.size - 1


@dataclass(frozen=True, slots=True)
class RowShape:
    """The fields of a row head's card: rows behind one of the target's, the first of which drafts the token after next.

    Attributes:
        n: How many rows.
        layer: The target's layer that they enter. Row k enters with base + kept * s + matrix s, where s is the state
            with which the row before them enters that layer; at layer 0 with base alone.
    """

    n: int
    layer: int


@dataclass(frozen=True, slots=True)
class HeadCard:
    """The shape of a head and the choices by which heads differ.

    Attributes:
        name: The head's name, for messages.
        n_embd: Length of the head's hidden state and of its embeddings.
        n_embd_target: Length of one tap.
        n_ff: Rows of gate and up.
        n_head: Query heads.
        n_head_kv: Heads of keys and values.
        head_dim: Length of one head.
        rms_epsilon: Added under the root of every norm.
        rope_base: RoPE turns halves of a head (element i with i + head_dim / 2) by position * rope_base^(-2 i /
            head_dim), divided by `rope_divisors` where the head has that tensor. The pair of position t's feature and
            token t + 1 has position t; drafted pairs have t + 1, t + 2, ... A block head's features and rows have the
            positions of their tokens.
        taps: Layers of the target, counted from 0: the taps are the residual stream that ENTERS these layers, before
            any norm, joined in this order. `n_layer` of the target stands for what leaves its last layer. Empty where
            the file names no layers, until the head is fitted to its target (`fit` of target.py).
        n_vocab_draft: Rows of the output matrix: the tokens that the head can draft.
        n_vocab_target: Size of the target's vocabulary.
        norm_before_residual: The layer adds its attention to the normed feature (after `hidden_norm`), instead of the
            feature itself.
        fc_norm: Which RMS norm stands before fc: "none", "joined" (one over all taps together) or "each" (one over
            each tap). The tensor is called fc_norm either way.
        feeds_back_normed: The next drafted token gets the layer's output after `output_norm`, instead of before it.
        norms_output: `output_norm` stands before the output matrix; it does in all heads but some of SpecForge.
        own_embedding: The head has an embedding matrix; else it uses the target's.
        own_output: The head has an output matrix; else that is the rows `d2t` of the target's.
        target: The model it was trained for, where the file says so.
        promise: What it accepted when it was measured, where the file says so.
        notes: Sentences on what the file leaves open, and how it was read.
        block: What makes it a block head; None for an EAGLE-3 head. norm_before_residual, fc_norm, feeds_back_normed
            and norms_output have their defaults in a block head, and mean nothing there.
        joins: A matrix joins the embedding and the feature of each pair, and its product goes through a layer of the
            target's own kind (Head.layers), or through several of them.
        rows: What makes it a row head; None for other heads. Its sizes of layers are 0.
        exits: It is an exit head: the target's layers below its only tap are a part of its drafts. n_ff is 0 then.
        reads_target: Its layers have no keys and values, and see the target's; `joins` is true then. n_ff, n_head,
            n_head_kv and head_dim are those of its first layer, and n_embd_target is the length of embeddings, too.
    """

    name: str
    n_embd: int
    n_embd_target: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    rms_epsilon: float
    rope_base: float
    taps: tuple[int, ...]
    n_vocab_draft: int
    n_vocab_target: int
    norm_before_residual: bool = False
    fc_norm: FcNorm = "none"
    feeds_back_normed: bool = False
    norms_output: bool = True
    own_embedding: bool = False
    own_output: bool = False
    target: Target | None = None
    promise: Promise | None = None
    notes: tuple[str, ...] = ()
    block: BlockShape | None = None
    joins: bool = False
    rows: RowShape | None = None
    exits: bool = False
    reads_target: bool = False

    @property
    def splits_forwards(self) -> bool:
        """Whether rows of one forward pass different layers of the target, as those of row heads and exit heads do."""
        return self.exits or self.rows is not None

    @property
    def split_layer(self) -> int:
        """The target's layer that a row head's rows enter, or the first that an exit head's drafts skip; else 0."""
        return self.taps[0] if self.exits else 0 if self.rows is None else self.rows.layer
