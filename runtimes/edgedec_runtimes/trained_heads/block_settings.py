"""Read the config.json of a block head, in the dialects that trainers write.

z-lab's and SpecForge's files keep some settings in `dflash_config`; DeepSpec's are flat; LiquidAI's are both; those of
speculators keep the layers' settings in `transformer_layer_config`. The same thing is said in different ways:

- taps: `target_layer_ids` are layers whose OUTPUT is tapped (-1: what enters the first), `aux_hidden_state_layer_ids`
  (speculators) layers that the taps ENTER. Both count from 0.
- `sample_from_anchor`: row j predicts the token behind it. Absent, a file of the name DSpark means yes, DFlash no. In
  speculators' files the number of tokens that a block proposes says it, or else the flag; older files without the flag
  mean no.
- windows: speculators count features before the anchor; the others count rows, the row itself included, so that rows
  behind the first would see fewer features. They see as many as the first one here.
- `use_sliding_window` must be true for sliding layers to slide. In speculators' files and SpecForge's DSpark, sliding
  layers are causal within the block, and others are not; a head with layers of both kinds is refused.

`tie_word_embeddings` is ignored, and so is what a file copies from the target's config.json: the tensors decide.
DeepSpec's class turns whole heads, whatever `partial_rotary_factor` it copied.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from edgedec_runtimes.trained_heads.card import BlockShape, Markov
from edgedec_runtimes.trained_heads.record import layer_ids
from edgedec_runtimes.trained_heads.settings import (
    MOST_VALUES,
    Settings,
    check_expected,
    flat,
    optional,
    refuse_unknown,
    settings_of,
)
from edgedec_runtimes.weights.config_values import ConfigValues

MOST_LAYERS = 64
MOST_ROWS = 256
# Whether rows predict the token behind them where the file does not say it, by its class.
_SHIFTED = {
    **dict.fromkeys(("DFlashDraftModel", "DFlashSpeculator", "DFlash2DraftModel", "Qwen3DFlash2Model"), False),
    **dict.fromkeys(("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator", "LingDSparkModel"), True),
    "Lfm2DSparkDraftModel": True,
}
# Relatives with another forward, by a part of their class's or model's name.
_RELATIVES = {
    "laguna": "Laguna's form, with gates and a norm for each tap",
    "deepseek": "DeepSeek-V4's form, with experts",
    "gemma4": "Gemma 4's form, with norms of its own",
    "qwen35dspark": "the form with gated queries",
}
_WORDS = frozenset({"dflash_config", "target_layer_ids", "aux_hidden_state_layer_ids"})
# Settings that must have one of these values, or be absent.
_EXPECTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation"), ("silu", "swish")),
    **dict.fromkeys(("attention_bias", "mlp_bias", "shift_label"), (False,)),
    "partial_rotary_factor": (1, 1.0),
    "projector_type": ("dspark",),
    "attention_value_scale": (1, 1.0),
    "pure_draft_prefix_len": (0,),
    "speculators_model_type": ("dflash", "dspark"),
}
# Settings that change no score, or that the tensors answer; and those that are read by name below.
_KNOWN = frozenset(
    """
    _name_or_path architectures attention_dropout attention_mode attn_output_gate auto_map aux_hidden_state_layer_ids
    block_size bos_token_id causal chunk_size_feed_forward conv_group_size conv_kernel_size selector_rank
    selector_top_k confidence_head_alpha confidence_head_with_markov dflash_config draft_vocab_size dtype
    enable_confidence_head eos_token_id final_logit_softcapping full_attention_interval has_no_defaults_at_init
    head_dim hidden_size id2label initializer_range input_embedding_scale intermediate_size is_causal is_decoder
    label2id layer_types linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads
    linear_value_head_dim mamba_ssm_dtype markov_head_type markov_rank mask_token_id max_position_embeddings
    max_window_layers model_type mtp_num_hidden_layers num_anchors num_attention_heads num_hidden_layers
    num_key_value_heads num_target_layers output_gate_type output_multiplier pad_token_id pretraining_tp problem_type
    rms_norm_eps rope_is_neox_style rope_parameters rope_scaling rope_theta runtime_block_size sample_from_anchor
    sliding_window sliding_window_non_causal speculators_config speculators_version swa_window_size target_hidden_size
    target_layer_ids text_config tie_word_embeddings torch_dtype transformer_layer_config transformers_version
    use_cache use_sliding_window use_swa vision_config vocab_size
    """.split()
)


def is_block_config(raw: Mapping[str, Any]) -> bool:
    """Return whether what config.json holds is of a block head rather than of an EAGLE-3 head or a model."""
    if raw.get("speculators_model_type") is not None:
        return raw["speculators_model_type"] in _EXPECTED["speculators_model_type"]
    return bool(_WORDS & raw.keys())


def read_block_settings(path: Path, raw: Mapping[str, Any]) -> Settings:
    """Return the settings of a block head.

    Args:
        path: The file, for messages.
        raw: What config.json holds.

    Raises:
        ModelFormatError: A value has another type than expected, or contradicts another.
        UnsupportedModelError: A setting has a value, or a name, that edgedec does not run; the message names it.
    """
    values = _flat(path, raw)
    _refuse_relatives(values)
    check_expected(values, _EXPECTED)
    refuse_unknown(values, _KNOWN | _EXPECTED.keys())
    n_layer = values.whole("num_hidden_layers", most=MOST_LAYERS)
    windows, notes = _windows(values, n_layer)
    taps = _taps(values)
    settings = settings_of(values, taps, notes, len(taps))
    return replace(
        settings,
        card=replace(settings.card, block=_shape(values, n_layer, windows)),
        neighbours=not values.flag("rope_is_neox_style", True),
        has_confidence=values.flag("enable_confidence_head", False),
    )


def _flat(path: Path, raw: Mapping[str, Any]) -> ConfigValues:
    values = flat(path, raw, "dflash_config", {})
    if values.values.get("architectures") == ["Qwen3DSparkModel"]:
        values.values.pop("partial_rotary_factor", None)
        rope = values.table("rope_parameters")
        values.values["rope_parameters"] = {key: rope[key] for key in rope if key != "partial_rotary_factor"}
    return values


def _refuse_relatives(values: ConfigValues) -> None:
    """Refuse drafters that are called alike and compute something else."""
    names = values.values.get("architectures", [])
    words = [str(name).lower() for name in (names if isinstance(names, list) else [names])]
    for part, form in _RELATIVES.items():
        if any(part in word for word in words) or part in str(values.values.get("model_type", "")).lower():
            values.refuse("architectures", f"which is {form}")
    if values.values.get("projector_type") == "domino":
        values.refuse("projector_type", "expected dspark, as Domino has a recurrent network over the prefix")


def _shape(values: ConfigValues, n_layer: int, windows: tuple[int, ...]) -> BlockShape:
    rank, markov = _markov(values)
    shifted = _is_shifted(values, rank if markov != "selector" else 0)
    if markov == "rnn" and not shifted:
        values.refuse("markov_head_type", "expected vanilla or gated where sample_from_anchor is false")
    mask = values.values.get("mask_token_id", -1)
    if type(mask) is not int or not -1 <= mask <= MOST_VALUES:
        values.fail(f"mask_token_id is {mask!r:.80}, expected a whole number from 0 to {MOST_VALUES}")
    return BlockShape(
        n_layer=n_layer,
        size=values.whole("block_size", most=MOST_ROWS),
        shifted=shifted,
        causal=_is_causal(values, n_layer),
        windows=windows,
        markov=markov,
        rank=rank,
        top_k=optional(values, "selector_top_k"),
        conv_length=optional(values, "conv_kernel_size"),
        conv_group=optional(values, "conv_group_size"),
        logit_scale=values.number("output_multiplier", 1.0),
        softcap=values.number("final_logit_softcapping") if values.values.get("final_logit_softcapping") else 0.0,
        embedding_scale=values.number("input_embedding_scale", 1.0),
        mask_token=mask,
    )


def _markov(values: ConfigValues) -> tuple[int, Markov]:
    """Return BlockShape's rank and markov."""
    rank = values.values.get("markov_rank", 0)
    if type(rank) is not int or not 0 <= rank <= MOST_VALUES:
        values.fail(f"markov_rank is {rank!r:.80}, expected a whole number from 0 to {MOST_VALUES}")
    markov: Markov = "none" if rank == 0 else values.values.get("markov_head_type", "vanilla")
    if markov not in get_args(Markov)[:4]:
        values.refuse("markov_head_type", f"expected {', '.join(get_args(Markov)[1:4])}")
    selected = optional(values, "selector_rank")
    if not selected:
        return rank, markov
    if rank:
        values.refuse("markov_rank", "expected none beside selector_rank")
    return selected, "selector"


def _is_shifted(values: ConfigValues, rank: int) -> bool:
    if "speculators_model_type" in values.values:
        n_unused = values.whole("block_size", most=MOST_ROWS) - _proposed(values)
        return n_unused == 0 if n_unused in (0, 1) else values.flag("sample_from_anchor", False)
    if "sample_from_anchor" in values.values:
        return values.flag("sample_from_anchor", True)
    names = values.values.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str) or name not in _SHIFTED:
        values.refuse("architectures", f"expected one of {', '.join(_SHIFTED)}, or sample_from_anchor")
    if rank and not _SHIFTED[name]:
        values.refuse(
            "markov_rank", f"with the class {name}, whose files mean either order of rows: add sample_from_anchor"
        )
    return _SHIFTED[name]


def _proposed(values: ConfigValues) -> int:
    """Return how many tokens a block proposes, as speculators' dialect says; 0 where it does not say it."""
    methods = values.table("speculators_config").get("proposal_methods")
    method = methods[0] if isinstance(methods, list) and methods else None
    n_tokens = method.get("speculative_tokens") if isinstance(method, dict) else None
    return n_tokens if type(n_tokens) is int else 0


def _sliding(values: ConfigValues, n_layer: int) -> list[bool]:
    """Return for each layer whether it has a window."""
    if values.flag("use_swa", False):
        return [True] * n_layer
    kinds = values.values.get("layer_types", ["full_attention"] * n_layer)
    if not isinstance(kinds, list) or not all(kind in ("full_attention", "sliding_attention") for kind in kinds):
        values.refuse("layer_types", "expected full_attention or sliding_attention for each layer")
    if len(kinds) != n_layer:
        values.fail(f"layer_types has {len(kinds)} layers, expected {n_layer}")
    slides = values.flag("use_sliding_window", False) and bool(values.values.get("sliding_window"))
    return [slides and kind == "sliding_attention" for kind in kinds]


def _is_causal(values: ConfigValues, n_layer: int) -> bool:
    if values.flag("is_causal", values.flag("causal", False)):
        return True
    sliding = _sliding(values, n_layer)
    if any(sliding) and "selector_rank" in values.values and not {"is_causal", "causal"} & values.values.keys():
        values.refuse("layer_types", "with windows and a selector, but without is_causal: other readers disagree there")
    if "speculators_model_type" in values.values:
        in_windows = not values.flag("sliding_window_non_causal", False)
    else:
        in_windows = "projector_type" in values.values
    if in_windows and any(sliding) and not all(sliding):
        values.refuse("layer_types", "expected layers of one kind, as rows of sliding layers see no later rows here")
    return in_windows and all(sliding)


def _windows(values: ConfigValues, n_layer: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return BlockShape's windows, and notes."""
    sliding = _sliding(values, n_layer)
    if not any(sliding):
        return (), ()
    window = values.whole("swa_window_size" if "swa_window_size" in values.values else "sliding_window")
    if "speculators_model_type" in values.values:
        return tuple(window * slides for slides in sliding), ()
    if window < 2:
        values.refuse("sliding_window", "expected 2 or more")
    note = f"rows see the last {window - 1} tokens before the newest one, from where the first row stands"
    return tuple((window - 1) * slides for slides in sliding), (note,)


def _taps(values: ConfigValues) -> tuple[int, ...]:
    """Return the layers that the taps enter."""
    taps = layer_ids(values, "aux_hidden_state_layer_ids")
    if taps is None and (left := layer_ids(values, "target_layer_ids", least=-1)) is not None:
        taps = tuple(i + 1 for i in left)
    if taps is None:
        values.fail("it names no target_layer_ids, the layers that the head taps")
    if list(taps) != sorted(taps):
        values.fail(f"the tapped layers are {taps}, expected rising ones")
    return taps
