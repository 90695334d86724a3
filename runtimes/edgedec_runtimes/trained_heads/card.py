"""What is known of a trained draft head without its weights, in one form for all file formats.

A head here is an EAGLE-3 head (arXiv:2503.01840): `fc` fuses hidden states of the target (its *taps*) into a feature,
one decoder layer reads pairs of a feature and a token's embedding, and an output matrix scores the draft vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FcNorm = Literal["none", "joined", "each"]


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
            token t + 1 has position t; drafted pairs have t + 1, t + 2, ...
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
