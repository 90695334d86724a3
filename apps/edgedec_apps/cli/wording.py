"""Errors in the words of the command line: they name the options that were typed, not the arguments of load()."""

from collections.abc import Mapping
from dataclasses import fields

from edgedec.decoding.prompt_length import CUT_DOCUMENT, CUT_TEXT
from edgedec.errors import EdgedecError
from edgedec_apps.cli.options import LoadFlags
from edgedec_apps.cli.sampling_options import ChoiceFlags, SamplingFlags

KEYWORDS: Mapping[str, str] = {
    "context": "n_ctx",
    "document_tokens": "max_document_tokens",
    "draft_max": "n_draft_max",
    "gpu_layers": "n_gpu_layers",
    "mmproj": "projector",
    "parallel": "n_parallel",
    "runtime_option": "runtime_options",
    "texts": "n_texts",
    "threads": "n_threads",
}
"""The keyword in Python for each option of the command line that has another name; both without dashes."""

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

_CHOICE = [field.name for field in fields(ChoiceFlags)]
_FLAGS = [field.name for flags in (LoadFlags, SamplingFlags) for field in fields(flags)]

OPTIONS: Mapping[str, str] = {
    KEYWORDS.get(name, name): "--" + name.replace("_", "-")
    for name in (*_FLAGS, *_CHOICE, "parallel", "allow_requantize", "pooling", "document_tokens", "check", "passages")
} | {CUT_TEXT: "--truncate", CUT_DOCUMENT: "--truncate", "numerics": "--draft-numerics", **TRAINING}
"""The command line's option for each argument of edgedec.load, of a generation and of a training, by its name."""


def in_options(error: EdgedecError) -> str:
    """Return the message of an error, with the options of the command line in it.

    >>> from edgedec.errors import OptionError
    >>> in_options(OptionError("n_ctx", 0, "it must be from 1 to 16777216"))
    '--context is 0; it must be from 1 to 16777216'
    """
    return error.naming(OPTIONS)
