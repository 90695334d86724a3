"""Errors in the words of the command line: they name the options that were typed, not the arguments of load()."""

import re
from collections.abc import Mapping

from edgedec.decoding.prompt_length import CUT_DOCUMENT, CUT_TEXT
from edgedec.errors import EdgedecError
from edgedec_apps.cli.other_words import MOVED, table

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
allow_requantize chat_template check choices device draft grammar json_schema kv_type logit_bias logprobs lora
max_tokens memory min_p offline passages pooling prompt_cache runtime seed stop temperature top_k top_p
"""
_VALUE = re.compile(r"[=: ](?:VALUE|yes)$")  # with which a new spelling ends
_MOVED = """
denoise draft_head draft_model draft_numerics draft_overlap draft_store draft_tree entropy entropy_force
frequency_penalty gpu_memory ignore_end image_max_tokens json_close layer_skip layer_skip_force momentum
penalty_last_n presence_penalty prompt_keep repetition_penalty slide small_model stop_unsure verify
"""
_OTHERS = """
numerics > --draft-option numerics
tree > --draft-option tree
n_gpu_layers > --gpu-layers
length > --method diffusion:length
max_document_tokens > --document-tokens
min_tokens > --method min-tokens
n_ctx > --context
n_draft > --method reflective:n-draft
n_draft_max > --draft-option max
n_parallel > --parallel
n n_texts > --texts
n_threads > --threads
nats > --method anchored:nats
projector > --method pictures:projector
runtime_options > --runtime-option
safe_model > --method anchored:safe-model
weight > --method reflective:weight
words > --method reflective:words
"""
OPTIONS: Mapping[str, str] = {
    **{name: "--" + name.replace("_", "-") for name in _SAME.split()},
    **{name: _VALUE.sub("", MOVED["--" + name.replace("_", "-")]) for name in _MOVED.split()},
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
