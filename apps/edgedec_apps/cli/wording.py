"""Errors in the words of the command line: they name the options that were typed, not the arguments of load()."""

from collections.abc import Mapping

from edgedec.decoding.prompt_length import CUT_DOCUMENT, CUT_TEXT
from edgedec.errors import EdgedecError

TRAINING: Mapping[str, str] = {
    "block": "--block",
    "kind": "--kind",
    "n_answer": "--answer-tokens",
    "n_layers": "--layers",
    "n_passes": "--passes",
    "n_processes": "--processes",
    "n_tokens": "--tokens",
    "n_vocabulary": "--vocabulary",
    "prompts": "--prompts",
    "rank": "--rank",
    "width": "--width",
    "work": "--work",
}
"""The option of edgedec train-drafter for each field of edgedec_export.training.train_drafter.TrainOptions that is not
among the arguments of edgedec.load and of a generation."""

_SWITCHING, _SKIP = "--method switching:", "--method layer-skip:"
OPTIONS: Mapping[str, str] = {
    "allow_requantize": "--allow-requantize",
    "chat_template": "--chat-template",
    "check": "--check",
    "denoise": "--method diffusion:denoise",
    "device": "--device",
    "draft": "--draft",
    "draft_head": "--draft-option head",
    "draft_model": "--draft-option model",
    "draft_numerics": "--draft-option numerics",
    "draft_overlap": "--draft-option overlap",
    "draft_store": "--draft-option store",
    "draft_tree": "--draft-option tree",
    "entropy": f"{_SWITCHING}entropy",
    "entropy_force": f"{_SWITCHING}entropy-force",
    "frequency_penalty": "--penalty frequency",
    "gpu_memory": "--gpu-layers",
    "grammar": "--grammar",
    "ignore_end": "--method ignore-end",
    "image_max_tokens": "--method pictures:max-tokens",
    "json_close": "--method json-close",
    "json_schema": "--json-schema",
    "kv_type": "--kv-type",
    "layer_skip": f"{_SKIP}speedup",
    "layer_skip_force": f"{_SKIP}force",
    "length": "--method diffusion:length",
    "logit_bias": "--logit-bias",
    "logprobs": "--logprobs",
    "lora": "--lora",
    "max_document_tokens": "--document-tokens",
    "max_tokens": "--max-tokens",
    "memory": "--memory",
    "min_p": "--min-p",
    "min_tokens": "--method min-tokens",
    "momentum": "--method momentum",
    "n_ctx": "--context",
    "n_draft": "--method reflective:n-draft",
    "n_draft_max": "--draft-option max",
    "n_gpu_layers": "--gpu-layers",
    "n_parallel": "--parallel",
    "n_texts": "--texts",
    "n_threads": "--threads",
    "nats": "--method anchored:nats",
    "numerics": "--draft-option numerics",
    "offline": "--offline",
    "passages": "--passages",
    "penalty_last_n": "--penalty last-n",
    "pooling": "--pooling",
    "presence_penalty": "--penalty presence",
    "projector": "--method pictures:projector",
    "prompt_cache": "--prompt-cache",
    "prompt_keep": "--method prompt-keep:keep",
    "repetition_penalty": "--penalty repetition",
    "runtime": "--runtime",
    "runtime_options": "--runtime-option",
    "safe_model": "--method anchored:safe-model",
    "seed": "--seed",
    "slide": "--method slide",
    "small_model": f"{_SWITCHING}small-model",
    "stop": "--stop",
    "stop_unsure": "--method stop-unsure",
    "temperature": "--temperature",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "tree": "--draft-option tree",
    "verify": "--draft-option rule",
    "weight": "--method reflective:weight",
    "words": "--method reflective:words",
    CUT_TEXT: "--truncate",
    CUT_DOCUMENT: "--truncate",
    **TRAINING,
}
"""What a person types for each argument of edgedec.load, of a generation and of a training, by its name."""


def in_options(error: EdgedecError) -> str:
    """Return the message of an error, with the options of the command line in it.

    >>> from edgedec.errors import OptionError
    >>> in_options(OptionError("n_ctx", 0, "it must be from 1 to 16777216"))
    '--context is 0; it must be from 1 to 16777216'
    """
    return error.naming(OPTIONS)
