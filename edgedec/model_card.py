"""What a loaded model is and can do: the facts that the engine needs, and what it checks before it generates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgedec.callers import one_line
from edgedec.errors import CapabilityError


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a runtime can do with one model; the engine checks it before it generates.

    Attributes:
        rollback: `n_past` may be any number up to n_cached. False for most recurrent models, whose `n_past` is either
            n_cached or 0.
        trees: Rows may be a tree.
        exact_trees: Rows of a tree are bit-equal to their chains as far as `batch_invariant` says; else strict numerics
            verify chains only.
        fork: A session can be forked and shares its prefix with the fork.
        layers: Rows may leave half-layers out.
        groups: Rows of one forward may pass different layers (ForwardItem.groups).
        taps: Hidden states after given layers can be returned.
        hidden_input: A forward can start from hidden states instead of tokens.
        vector_rows: A forward can start from vectors in place of embeddings, as pictures of the model need.
        positions: The rows of a forward can have positions apart from their slots.
        keeps_prompts: Sessions can recall() what is kept on the disk of prompts that were read.
        attention_mass: The most heads of a layer, where a forward can return its attention's mass; 0 where it can't.
        final_states: The model was trained to embed texts and has no logits: each of its sessions is an EncoderSession,
            whose evaluate() refuses.
        max_rows: Most rows of logits that one forward returns for one session; means the same as in LoadOptions.
        prefill_chunk: A prefill is evaluated in chunks that end at multiples of this many positions, so that a prefix
            reused up to such a multiple has a cold start's bits. 1 where the bits don't depend on the chunks.
    """

    rollback: bool = True
    trees: bool = False
    exact_trees: bool = True
    fork: bool = False
    layers: bool = False
    groups: bool = False
    taps: bool = False
    hidden_input: bool = False
    vector_rows: bool = False
    positions: bool = False
    keeps_prompts: bool = False
    attention_mass: int = 0
    final_states: bool = False
    max_rows: int = 64
    prefill_chunk: int = 512

    def require(self, name: str, runtime: str) -> None:
        """Raise CapabilityError unless the attribute `name` is true; `runtime` is named in the message."""
        if not getattr(self, name):
            raise CapabilityError(
                f"the {runtime} runtime cannot do '{name}' for this model; "
                f"choose another runtime (edgedec doctor lists them) or leave the option out"
            )


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The facts of a loaded model that the engine needs.

    Attributes:
        name: What a person calls the model, as edgedec.gguf.model_info.model_name returns it; may be empty.
        architecture: As in the file ("llama", "qwen2", ...).
        runtime: Name of the runtime that loaded it.
        n_vocab: Length of a row of logits.
        n_embd: Length of a hidden state, and of a final state where a model has only those.
        n_layer: Number of layers.
        n_ctx_train: Longest context the model was trained for, in tokens.
        fingerprint: Identifies the weights and everything else that changes a logit (file header, library version,
            options); the key of every cache.
        chat_template: Source of the Jinja template, or None.
        sampling_defaults: Values that the file recommends, by the names of SamplingParams.
        left_out: The half-layers that no forward runs (lossy): pairs of a layer and 0 (attention) or 1 (feed-forward).
        share: The part of the whole model's bytes of weights that a token reads here; 0 to 1.
        variant: A name of what the model lacks, so that its texts are not kept with the whole model's; empty for that.
        lossy: What the model lacks, in words for a person; empty for a whole model.
        pooling: How the model was trained to make one vector of a text ("mean", "cls", "last"); None for a model that
            writes texts.
        adapters: The paths of the low-rank adapters that were loaded with the model.
        methods: By its name, what the method around sessions by which the model writes has to know of it
            (edgedec.companion); empty for a model whose rows are the law of the next token.
    """

    name: str
    architecture: str
    runtime: str
    n_vocab: int
    n_embd: int
    n_layer: int
    n_ctx_train: int
    fingerprint: str
    chat_template: str | None = None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[tuple[int, int], ...] = ()
    share: float = 1.0
    variant: str = ""
    lossy: str = ""
    pooling: str | None = None
    adapters: tuple[str, ...] = ()
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    __repr__ = one_line
