"""What becomes of the fields that clients send: one table for all interfaces.

A field of a request has one of four outcomes, and a field that is not in the table is ignored by name:

- `HONOURED`: edgedec does what the field says; `IDLE` are those of them that say nothing about an answer (`user`)
- `IGNORED`: the answer's header `x-edgedec-ignored` and the log name the field, and nothing else happens
- `AS_TEXT`: an item of a chat's history is passed on to the chat template as text
- `REFUSED`: the field is known to change the text, and edgedec can't do what the field says: a 400 that names it

A name is the path of a field without indices. A kind of item, part or block stands behind a colon.
"""

import re
from typing import Any

HONOURED, IDLE, IGNORED, AS_TEXT, REFUSED = "honoured", "honoured, idle", "ignored", "as text", "refused"
_OUTCOMES = {"h": HONOURED, "n": IDLE, "i": IGNORED, "t": AS_TEXT, "r": REFUSED}
INTERFACES = ("chat", "completions", "responses", "messages", "ollama")
_BY_PATH = {"/chat/completions": 0, "/completions": 1, "/infill": 1, "/responses": 2, "/messages": 3, "/api/": 4}

# Each row: the outcome in chat, completions (and /infill), responses, messages and ollama, and the fields' names.
_ROWS = (
    ("hhhhh", "model stream keep_alive reuse speculative speculative.draft speculative.verify json_close"),
    ("hhhh-", "temperature top_p top_k min_p repetition_penalty repeat_penalty frequency_penalty presence_penalty"),
    ("hhhh-", "momentum stop_unsure penalty_last_n repeat_last_n seed stop logit_bias ignore_end ignore_eos lora"),
    ("hhhh-", "n_predict min_tokens"),
    ("hh-h-", "max_tokens"),
    ("hh---", "n n_probs timings_per_token return_progress stream_options.include_usage response_format json_schema"),
    ("hh---", "grammar guided_json guided_regex guided_choice structured_outputs"),
    ("hhh--", "stream_options"),
    ("h----", "max_completion_tokens prediction refine messages.function_call"),
    ("-h---", "prompt echo suffix best_of input_prefix input_suffix input_extra"),
    ("hh--h", "logprobs"),
    ("h-h-h", "top_logprobs"),
    ("h-h--", "parallel_tool_calls"),
    ("h-hh-", "tool_choice enable_thinking chat_template_kwargs reasoning_effort reasoning reasoning.effort"),
    ("h-hh-", "reasoning.enabled reasoning.max_tokens thinking_token_budget thinking_budget_tokens"),
    ("h-hhh", "tools tools.type"),
    ("h---h", "tools.function tools.function.name tools.function.description tools.function.parameters"),
    ("h---h", "tools.function.strict tools.function.return messages.tool_calls messages.tool_call_id messages.name"),
    ("h---h", "messages.reasoning_content messages.reasoning messages.thinking messages.images messages.tool_name"),
    ("--hh-", "tools.name tools.description"),
    ("h--hh", "messages messages.role messages.content messages.content.text"),
    ("--h--", "input instructions previous_response_id include max_output_tokens text text.format store"),
    ("--h--", "tools.parameters tools.strict"),
    ("---h-", "system stop_sequences thinking thinking.type thinking.budget_tokens"),
    ("---h-", "output_config output_config.effort output_config.format"),
    ("---h-", "tools.input_schema tool_choice.type tool_choice.name tool_choice.disable_parallel_tool_use"),
    ("----h", "prompt system raw suffix images format think options options.temperature options.top_k options.top_p"),
    ("----h", "options.min_p options.repeat_penalty options.stop options.presence_penalty options.frequency_penalty"),
    ("----h", "options.momentum options.stop_unsure options.seed options.repeat_last_n options.num_predict"),
    ("----h", "options.num_ctx options.draft_num_predict"),
    # What says nothing about an answer: bookkeeping, the keeping of prompts, how a model is loaded, samplers' settings.
    ("nnnn-", "user metadata safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention"),
    ("nnnn-", "cache_prompt id_slot mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold dry_base"),
    ("nnnn-", "dry_allowed_length dry_penalty_last_n dry_sequence_breakers"),
    ("nnn--", "stream_options.include_obfuscation"),
    ("-n---", "input_extra.time"),
    ("n--nn", "messages.refusal messages.annotations messages.reasoning_details messages.cache_control"),
    ("n--nn", "messages.prefix messages.content.cache_control messages.content.citations messages.tool_calls.index"),
    ("n---n", "messages.provider_specific_fields messages.parsed messages.tool_calls.function.parsed_arguments"),
    ("n---n", "messages.content.image_url.detail messages.tool_calls.function.index"),
    ("--n--", "input.id input.status input.phase input.caller input.namespace input.async input.encrypted_content"),
    ("--n--", "input.summary input.content.annotations input.content.logprobs input.content.detail"),
    ("--n--", "input.parsed_arguments input.content.parsed"),
    ("---n-", "cache_control user_profile_id workspace_id thinking.display tools.cache_control system.cache_control"),
    ("---n-", "tools.strict"),
    ("---n-", "messages.content.caller messages.content.toolset_name messages.content.signature"),
    ("---n-", "messages.content.is_error messages.content.source.media_type messages.content.content.cache_control"),
    ("---n-", "messages.content.content.source.media_type system.citations"),
    ("----n", "options.numa options.num_batch options.num_gpu options.main_gpu options.low_vram options.f16_kv"),
    ("----n", "options.logits_all options.vocab_only options.use_mmap options.use_mlock options.embedding_only"),
    ("----n", "options.num_thread options.num_keep options.mirostat_tau options.mirostat_eta"),
    # What the services and servers of others do.
    ("ii-i-", "store"),
    ("iiii-", "moderation service_tier client_metadata provider usage session_id models route transforms plugins"),
    ("iiii-", "trace samplers min_keep n_indent n_keep n_discard n_cache_reuse t_max_prompt_ms t_max_predict_ms"),
    ("iiii-", "return_tokens response_fields post_sampling_probs parse_tool_calls thinking_forced_open"),
    ("iiii-", "reasoning_format verbosity"),
    ("i----", "audio"),
    ("--i--", "max_tool_calls context_management background_options access_programs image truncation text.verbosity"),
    ("i-i--", "reasoning.context reasoning.mode"),
    ("i-n--", "reasoning.summary reasoning.generate_summary"),
    ("---i-", "container mcp_servers context_management diagnostics inference_geo speed betas"),
    ("---i-", "output_config.task_budget"),
    ("----i", "tool_choice truncate shift width height steps"),
    # Items, parts and blocks of a chat's history.
    ("t---t", "messages.content:refusal messages.content:input_text messages.content:output_text"),
    ("--t--", "input.content:refusal input.output:refusal input:custom_tool_call input:custom_tool_call_output"),
    ("--t--", "input:local_shell_call input:local_shell_call_output input:shell_call input:shell_call_output"),
    ("--t--", "input:apply_patch_call input:apply_patch_call_output"),
    ("---t-", "messages.content:search_result messages.content.content:search_result"),
    ("--i--", "input:item_reference input:web_search_call input:file_search_call input:code_interpreter_call"),
    ("--i--", "input:image_generation_call input:computer_call input:mcp_call input:mcp_list_tools input:compaction"),
    ("---i-", "messages.content:redacted_thinking messages.content:server_tool_use"),
    ("---i-", "messages.content:web_search_tool_result messages.content.content:tool_reference"),
    # What changes the text, and can't be done.
    ("rrrr-", "tfs_z typical_p mirostat penalize_newline dynatemp_range xtc_probability dry_multiplier top_n_sigma"),
    ("rrrr-", "top_a epsilon_cutoff eta_cutoff smoothing_factor guidance_scale no_repeat_ngram_size length_penalty"),
    ("rrrr-", "use_beam_search skip_special_tokens stop_token_ids bad_words allowed_token_ids logits_processors"),
    ("rr---", "structured_outputs.grammar guided_grammar"),
    ("r-rr-", "chat_template documents add_generation_prompt continue_final_message"),
    ("r----", "modalities web_search_options functions function_call"),
    ("--r--", "background conversation prompt input.content:input_file input.content:input_audio"),
    ("--r--", "input.output:input_file"),
    ("r---r", "messages.content:input_audio messages.content:file messages.content:video_url"),
    ("---r-", "thread messages.content:document messages.content.content:document"),
    ("----r", "options.tfs_z options.typical_p options.mirostat options.penalize_newline template context"),
)
# Values with which a field asks for nothing else than what is done anyway.
_USUAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tfs_z", "typical_p", "guidance_scale", "length_penalty"), (1,)),
    **dict.fromkeys(("mirostat", "dynatemp_range", "xtc_probability", "dry_multiplier", "top_a", "n_keep"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "smoothing_factor", "no_repeat_ngram_size", "n_indent"), (0,)),
    **dict.fromkeys(("min_keep", "n_discard", "n_cache_reuse", "return_tokens"), (0,)),
    **dict.fromkeys(("penalize_newline", "add_generation_prompt", "skip_special_tokens"), (True,)),
    "top_n_sigma": (-1, 0),
    "modalities": (["text"],),
    "function_call": ("none", "auto"),
    "service_tier": ("auto", "default", "standard_only"),
    "truncation": ("disabled",),
    "reasoning_format": ("auto", "deepseek"),
}
_NOTHING: tuple[Any, ...] = (None, "", [], {})
TABLE = {
    (interface, name): _OUTCOMES[cell]
    for cells, names in _ROWS
    for interface, cell in zip(INTERFACES, cells, strict=True)
    for name in names.split()
    if cell != "-"
}
"""The outcome of each known field, by interface and name."""


def interface_of(address: str) -> str:
    """Return the interface that an address of the server belongs to; empty for one that is not in the table."""
    return next((INTERFACES[i] for part, i in _BY_PATH.items() if part in address), "")


def name_of(path: str) -> str:
    """Return the name in the table of a field by its path, such as "messages.refusal" for "messages[3].refusal"."""
    return re.sub(r"^parameters\.", "options.", re.sub(r"\[\d+\]", "", path))  # those of a preset are options


def asks_for_nothing(name: str, value: Any) -> bool:
    """Return whether the value of a known field asks for nothing else than what is done anyway."""
    usual = _USUAL.get(name.removeprefix("options."), ())
    if value is False:
        return not any(each is True for each in usual)
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in (*_NOTHING, *usual))
