"""Errors in the words of the command line: they name the options that were typed, not the arguments of load()."""

from collections.abc import Mapping

from edgedec.decoding.prompt_length import CUT_DOCUMENT, CUT_TEXT
from edgedec.errors import EdgedecError
from edgedec_apps.cli.other_words import table

TRAINING = table("""
block > --block
kind > --kind
n_answer > --answer-tokens
n_layers > --layers
n_passes > --passes
n_processes > --processes
n_tokens > --tokens
n_vocabulary > --vocabulary
prompts > --prompts
rank > --rank
width > --width
work > --work
""")
"""The option of edgedec train-drafter for each field of edgedec_export.training.train_drafter.TrainOptions that is not
among the arguments of edgedec.load and of a generation."""

_SAME = """
allow_requantize chat_template check device draft grammar json_schema kv_type logit_bias logprobs lora max_tokens memory
min_p offline passages pooling prompt_cache runtime seed stop temperature top_k top_p
"""
_OTHERS = """
denoise > --method diffusion:denoise
draft_head > --draft-option head
draft_model > --draft-option model
draft_numerics numerics > --draft-option numerics
draft_overlap > --draft-option overlap
draft_store > --draft-option store
draft_tree tree > --draft-option tree
entropy > --method switching:entropy
entropy_force > --method switching:entropy-force
frequency_penalty > --penalty frequency
gpu_memory n_gpu_layers > --gpu-layers
ignore_end > --method ignore-end
image_max_tokens > --method pictures:max-tokens
json_close > --method json-close
layer_skip > --method layer-skip:speedup
layer_skip_force > --method layer-skip:force
length > --method diffusion:length
max_document_tokens > --document-tokens
min_tokens > --method min-tokens
momentum > --method momentum
n_ctx > --context
n_draft > --method reflective:n-draft
n_draft_max > --draft-option max
n_parallel > --parallel
n n_texts > --texts
n_threads > --threads
nats > --method anchored:nats
penalty_last_n > --penalty last-n
presence_penalty > --penalty presence
projector > --method pictures:projector
prompt_keep > --method prompt-keep:keep
repetition_penalty > --penalty repetition
runtime_options > --runtime-option
safe_model > --method anchored:safe-model
slide > --method slide
small_model > --method switching:small-model
stop_unsure > --method stop-unsure
verify > --draft-option rule
weight > --method reflective:weight
words > --method reflective:words
"""
OPTIONS: Mapping[str, str] = {
    **{name: "--" + name.replace("_", "-") for name in _SAME.split()},
    **table(_OTHERS),
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
