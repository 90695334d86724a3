"""Errors in the words of the command line: they name the options that were typed, not the arguments of load()."""

from collections.abc import Mapping
from dataclasses import fields

from edgedec.errors import EdgedecError
from edgedec_apps.cli.options import LoadFlags, SamplingFlags

OPTIONS: Mapping[str, str] = {
    field.name: "--" + field.name.replace("_", "-") for flags in (LoadFlags, SamplingFlags) for field in fields(flags)
} | {
    "allow_requantize": "--allow-requantize",
    "n_ctx": "--context",
    "n_draft_max": "--draft-max",
    "n_gpu_layers": "--gpu-layers",
    "n_parallel": "--parallel",
    "n_threads": "--threads",
}
"""The command line's option for each argument of edgedec.load and of a generation, by the argument's name."""


def in_options(error: EdgedecError) -> str:
    """Return the message of an error, with the options of the command line in it.

    >>> from edgedec.errors import OptionError
    >>> in_options(OptionError("n_ctx", 0, "it must be from 1 to 16777216"))
    '--context is 0; it must be from 1 to 16777216'
    """
    return error.naming(OPTIONS)
