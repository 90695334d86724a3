"""llama-server's fields: the names that it has for options of sampling, and what has no counterpart here."""

from typing import Any

from edgedec_apps.server.core.fields import Fields

_ALIASES = {"repeat_penalty": "repetition_penalty", "repeat_last_n": "penalty_last_n", "ignore_eos": "ignore_end"}
# Samplers that edgedec does not have, with the values that switch them off, and what only has a meaning beside them.
_OFF: dict[str, tuple[Any, ...]] = {
    "tfs_z": (1, 1.0),
    "typical_p": (1, 1.0),
    "mirostat": (0,),
    "penalize_newline": (True,),
    "dynatemp_range": (0, 0.0),
    "xtc_probability": (0, 0.0),
    "dry_multiplier": (0, 0.0),
    "top_n_sigma": (-1, -1.0),
}
_OF_THESE = (
    *("mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold", "dry_base", "dry_allowed_length"),
    *("dry_penalty_last_n", "dry_sequence_breakers"),
)
# What is about how llama-server computes or shows an answer.
_IGNORED = (
    *("samplers", "min_keep", "n_indent", "n_keep", "n_discard", "n_cache_reuse", "t_max_prompt_ms"),
    *("t_max_predict_ms", "return_tokens", "return_progress", "response_fields", "post_sampling_probs"),
    *("parse_tool_calls", "add_generation_prompt", "thinking_forced_open"),
)
_THOUGHTS_APART = ("auto", "deepseek")  # values of reasoning_format for what is done here anyway


def read_names(fields: Fields) -> None:
    """Let llama-server's names of sampling options stand for those here."""
    for alias, name in _ALIASES.items():
        fields.rename(alias, name)


def require_no_other_samplers(fields: Fields) -> None:
    """Read the fields of samplers that edgedec does not have (ApiError where one is switched on)."""
    for name, values in _OFF.items():
        fields.only(name, *values)
    fields.skip(*_OF_THESE)


def ignore_llama_servers(fields: Fields) -> None:
    """Read llama-server's further fields; those that have a value are named as ignored.

    Raises:
        ApiError: A field asks for another text than the one that would come.
    """
    require_no_other_samplers(fields)
    fields.unsupported("lora", "leave it out")
    fields.ignore(*_IGNORED)
    if fields.take("reasoning_format") not in (None, *_THOUGHTS_APART):
        fields.note_ignored("reasoning_format")
