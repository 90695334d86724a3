"""Messages of the library in the words of the command line: the options that were typed, not the arguments of load().

An argument's name is replaced only where a message speaks of the option: at its start (`n_ctx is 0`), behind `leave` or
another word that leads to one, or as `name=...`. So what a message quotes (a path, a grammar, a text) stays as it is.
"""

import re
from collections.abc import Mapping
from dataclasses import fields

from edgedec_apps.cli.options import LoadFlags, SamplingFlags

OPTIONS: Mapping[str, str] = {
    field.name: "--" + field.name.replace("_", "-") for flags in (LoadFlags, SamplingFlags) for field in fields(flags)
} | {
    "n_ctx": "--context",
    "n_draft_max": "--draft-max",
    "n_gpu_layers": "--gpu-layers",
    "n_parallel": "--parallel",
    "n_threads": "--threads",
}
"""The command line's option for each argument of edgedec.load and of a generation, by the argument's name."""

_ANY = "|".join(sorted(OPTIONS, key=len, reverse=True))
_UNMISTAKABLE = "|".join(name for name in OPTIONS if "_" in name)
_BESIDE_OURS = re.compile(rf"(--[\w-]+), (?:{_ANY})=(?:True|\.\.\.)")  # "(--slide, slide=True)" has both already
_SAME_TWICE = re.compile(r"\b[a-z]+(?:_[a-z]+)+ \((--[a-z-]+)\)")  # "n_x (--x)": the option is said already
_ASSIGNED = re.compile(rf"(?<![^ (])({_ANY})=(?:True|\.\.\.)(?=[ ,;)]|$)")
_PLACES = (
    re.compile(rf"^(?:{_ANY})(?= (?:is|must|holds|names|takes) )"),
    re.compile(rf"\bleave (?:{_ANY})(?: (?:and|or) (?:{_ANY}))* out\b"),
    re.compile(rf"\b(?:use|without|which) (?:{_UNMISTAKABLE})(?=[ ,;:)]|$)"),
)
_NAME = re.compile(rf"\b({_ANY})\b")
_PYTHONS_DEFAULT = re.compile(r", or None$")


def in_options(message: str) -> str:
    """Return an error's message with the command line's options in the place of arguments.

    >>> in_options("n_ctx is 0; it must be from 1 to 16777216")
    '--context is 0; it must be from 1 to 16777216'
    >>> in_options("/n_ctx is/x.gguf: the runtime has no GPU; leave device and n_gpu_layers out")
    '/n_ctx is/x.gguf: the runtime has no GPU; leave --device and --gpu-layers out'
    """
    message = _SAME_TWICE.sub(r"\1", _BESIDE_OURS.sub(r"\1", message))
    message = _ASSIGNED.sub(_option, message)
    for place in _PLACES:
        message = place.sub(lambda found: _NAME.sub(_option, found[0]), message)
    return _PYTHONS_DEFAULT.sub("", message)


def _option(found: re.Match[str]) -> str:
    return OPTIONS[found[1]]
