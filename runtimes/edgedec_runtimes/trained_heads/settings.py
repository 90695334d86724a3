"""Read the config.json of an EAGLE-3 checkpoint, in the two dialects that trainers write.

SafeAILab's and SpecForge's files are flat, with some settings in `eagle_config`; those of speculators keep the layer's
settings in `transformer_layer_config`. The same word means different things:

- `norm_output`: in a flat file, there is a norm before the output matrix (absent: true). In speculators' files, the
  state fed back is the normed one (absent: false).
- `norm_before_residual`: absent is false in a flat file. In speculators' files absent is refused, because trainers and
  servers disagree on the default.
- `eagle_aux_hidden_state_layer_ids`: in both dialects, layers whose OUTPUT is tapped where the first is 1; otherwise
  layers that the taps ENTER.

That rule for layers is sglang's (pull request 25454): no head taps what leaves the embedding, so 1 as an input would be
the output of layer 0, which no trainer takes. `tie_word_embeddings` is ignored, as some trainers write true beside an
output matrix of its own: the tensors decide.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.trained_heads.card import FcNorm, HeadCard, Target
from edgedec_runtimes.trained_heads.record import layer_ids, text
from edgedec_runtimes.weights.config_values import ConfigValues, llama3_divisors

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
DEFAULT_TAPS = 3
_REMEDY = "edgedec does not run such a head; take one that is trained without it"
MOST_VALUES = 2**24
# The defaults of transformers' LlamaConfig and Qwen3Config, which write only what differs from them.
_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}
_SIZES: dict[str, Any] = {"hidden_size": 4096, "num_attention_heads": 32}
# Settings that must have one of these values, or be absent.
_EXPECTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation"), ("silu", "swish")),
    "num_hidden_layers": (1,),
    **dict.fromkeys(("attention_bias", "mlp_bias", "bias", "qkv_bias", "rope_interleaved"), (False,)),
    "partial_rotary_factor": (1, 1.0),
    "parallel_draft_step": (0, 1),
    **dict.fromkeys(("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"), (True,)),
    "eagle_decoder_type": ("llama",),
    "speculators_model_type": ("eagle3",),
}
# Settings that change no logit, or that the tensors answer; and those that are read by name below.
_KNOWN = frozenset({LAYER_IDS}).union(
    """
    _name_or_path architectures attention_dropout auto_map bos_token_id chunk_size_feed_forward d2t_path draft_arch
    draft_vocab_size dtype eagle_config embed_requires_grad eos_token_id fc_norm has_lm_head has_no_defaults_at_init
    head_dim hidden_size id2label initializer_range intermediate_size is_decoder label2id layer_types
    max_position_embeddings max_window_layers model_type norm_before_fc norm_before_residual norm_output
    num_attention_heads num_aux_hidden_states num_key_value_heads pad_token_id pretraining_tp problem_type
    rms_norm_eps rope_parameters rope_scaling rope_theta sliding_window speculators_config speculators_version
    t2d_path target_hidden_size target_model_type target_vocab_size tie_word_embeddings torch_dtype
    transformer_layer_config transformers_version use_cache vocab_size
    """.split()
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What config.json says of a head.

    Attributes:
        card: Without what the tensors and the record say. Numbers are 0 where the file does not say them, and taps are
            empty where it names no layers. A block has no confidence, and its mask_token is -1 where the file names no
            mask.
        rope_divisors: float32[head_dim / 2] that the frequencies are divided by, or None.
        n_taps: How many taps there are.
        neighbours: RoPE turns pairs of neighbours in the file, so that rows of q and k must be reordered.
        has_confidence: The file says that there is a confidence head.
    """

    card: HeadCard
    rope_divisors: NDArray[np.float32] | None
    n_taps: int
    neighbours: bool = False
    has_confidence: bool = False


def read_settings(path: Path, raw: Mapping[str, Any]) -> Settings:
    """Return the settings of an EAGLE-3 head.

    Args:
        path: The file, for messages.
        raw: What config.json holds.

    Raises:
        ModelFormatError: A value has another type than expected, or contradicts another.
        UnsupportedModelError: A setting has a value, or a name, that edgedec does not run; the message names it.
    """
    values = flat(path, raw, "eagle_config", _SIZES)
    is_speculators = any(raw.get(key) is not None for key in ("transformer_layer_config", "speculators_model_type"))
    _check_known(values)
    norm_output = values.flag("norm_output", not is_speculators)
    notes = []
    if is_speculators and "norm_before_residual" not in values.values:
        values.refuse("norm_before_residual", "expected true or false, as trainers disagree on its default")
    if not is_speculators and values.values.get("norm_output") is True:
        notes.append(
            "norm_output is true: read as a norm before the output matrix, as SpecForge means it; some trainers mean "
            'that the normed state is fed back, which "feeds_back_normed": true in edgedec-head.json says'
        )
    taps, tap_notes = _taps(values)
    notes += tap_notes
    n_taps = len(taps) or values.whole("num_aux_hidden_states", DEFAULT_TAPS, most=16)
    settings = settings_of(values, taps, tuple(notes), n_taps)
    card = replace(
        settings.card,
        n_embd_target=optional(values, "target_hidden_size"),
        norm_before_residual=values.flag("norm_before_residual", False),
        fc_norm=_fc_norm(values),
        feeds_back_normed=is_speculators and norm_output,
        norms_output=is_speculators or norm_output,
    )
    return replace(settings, card=card)


def flat(path: Path, raw: Mapping[str, Any], inner: str, defaults: dict[str, Any]) -> ConfigValues:
    """Return all settings in one object: those of `inner` win over those of speculators' layers, and outer ones win.

    Null stands for the default, as it does in the classes that write these files.
    """
    outer = ConfigValues(path, {key: value for key, value in raw.items() if value is not None}, _REMEDY)
    values = _DEFAULTS | defaults
    for table in (outer.table("transformer_layer_config"), outer.table(inner), outer.values):
        values |= {key: value for key, value in table.items() if value is not None}
    return ConfigValues(path, values, _REMEDY)


def settings_of(values: ConfigValues, taps: tuple[int, ...], notes: tuple[str, ...], n_taps: int) -> Settings:
    """Return what the files of all forms of heads say alike; a form replaces the rest."""
    n_embd, n_head, n_head_kv, head_dim = _sizes_of(values)
    base, divisors = _rope_of(values, head_dim)
    name = _target_name(values)
    card = HeadCard(
        name="",
        n_embd=n_embd,
        n_embd_target=0,
        n_ff=0,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        rms_epsilon=values.number("rms_norm_eps"),
        rope_base=base,
        taps=taps,
        n_vocab_draft=optional(values, "draft_vocab_size"),
        n_vocab_target=optional(values, "target_vocab_size") or optional(values, "vocab_size"),
        target=Target(name=name) if name else None,
        notes=notes,
    )
    return Settings(card, divisors, n_taps)


def _check_known(values: ConfigValues) -> None:
    """Refuse a setting with another value than the one that edgedec runs, and one that edgedec does not know."""
    check_expected(values, _EXPECTED)
    kinds = values.values.get("layer_types", ["full_attention"])
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        values.refuse("layer_types", "expected full_attention")
    refuse_unknown(values, _KNOWN | _EXPECTED.keys())


def check_expected(values: ConfigValues, expected: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse a setting whose value is none of those that edgedec runs (raises UnsupportedModelError)."""
    for key, allowed in expected.items():
        if key in values.values and values.values[key] not in allowed:
            values.refuse(key, f"expected {' or '.join(map(str, allowed))}")


def refuse_unknown(values: ConfigValues, names: Set[str]) -> None:
    """Refuse a setting that edgedec does not know, unless it asks for nothing (raises UnsupportedModelError)."""
    for key in sorted(values.values.keys() - names):
        value = values.values[key]
        if isinstance(value, str) or not value:  # a word describes; a flag that is off, or an empty list, asks nothing
            continue
        values.refuse(key[:80], "which edgedec does not know; delete it from the file where it changes no token")


def _sizes_of(values: ConfigValues) -> tuple[int, int, int, int]:
    """Return n_embd, n_head, n_head_kv and head_dim (raises ModelFormatError for heads that can't share)."""
    n_head = values.whole("num_attention_heads", most=MOST_VALUES)
    n_embd = values.whole("hidden_size", most=MOST_VALUES)
    head_dim = values.whole("head_dim", max(1, n_embd // n_head), most=MOST_VALUES)
    n_head_kv = values.whole("num_key_value_heads", n_head, most=MOST_VALUES)
    if n_head % n_head_kv or head_dim % 2:
        values.fail(f"{n_head} heads of size {head_dim} cannot share {n_head_kv} key-value heads")
    return n_embd, n_head, n_head_kv, head_dim


def optional(values: ConfigValues, key: str) -> int:
    """Return an integer from 1 to MOST_VALUES; 0 where the key is absent."""
    return values.whole(key, most=MOST_VALUES) if key in values.values else 0


def _fc_norm(values: ConfigValues) -> FcNorm:
    joined, each = values.flag("norm_before_fc", False), values.flag("fc_norm", False)
    if joined and each:
        values.refuse("fc_norm", "expected false beside norm_before_fc")
    return "joined" if joined else "each" if each else "none"


def _taps(values: ConfigValues) -> tuple[tuple[int, ...], list[str]]:
    """Return the layers that the taps enter, or an empty tuple where the file names none, and notes."""
    ids = layer_ids(values, LAYER_IDS)
    if ids is None:
        note = (
            "the file does not name the layers it taps: those of the EAGLE-3 paper's code are taken; where others were "
            'trained, "taps" in edgedec-head.json says which'
        )
        return (), [note]
    return (tuple(i + 1 for i in ids), []) if ids[0] == 1 else (ids, [])


def _target_name(values: ConfigValues) -> str:
    """Return the target's name, where speculators' dialect has it; "" where the file does not name the target."""
    config = ConfigValues(values.path, values.table("speculators_config"), values.remedy)
    return text(ConfigValues(values.path, config.table("verifier"), values.remedy), "name_or_path")


def _rope_of(values: ConfigValues, head_dim: int) -> tuple[float, NDArray[np.float32] | None]:
    """Return RoPE's base, and what its frequencies are divided by; transformers 4 (rope_scaling) or 5's form."""
    parameters = {key: value for key, value in values.table("rope_parameters").items() if value is not None}
    rope = ConfigValues(values.path, parameters or values.table("rope_scaling"), values.remedy)
    base = rope.number("rope_theta", values.number("rope_theta"))
    if rope.values.get("partial_rotary_factor", 1) != 1:
        rope.refuse("partial_rotary_factor", "expected 1.0")
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, np.full(head_dim // 2, rope.number("factor"), np.float32)
    if kind == "llama3":
        return base, llama3_divisors(rope, base, head_dim)
    return rope.refuse("rope_type" if "rope_type" in rope.values else "type", "expected default, linear or llama3")
