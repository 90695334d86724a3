"""Tab completion of values: names of models, drafters, runtimes and types, for bash, zsh and fish.

`edgedec --install-completion` writes typer's script for the shell. At each press of Tab the script calls edgedec, with
the words so far in the environment. So nothing heavy is imported here, and nothing fails: a name that can't be found
out is left out. Where nothing fits, the shell completes names of files.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain

Complete = Callable[[str], list[str]]

_SHELL = "_EDGEDEC_COMPLETE"  # which protocol: complete_bash, complete_zsh, complete_fish
_BEGINNING = "_EDGEDEC_BEGINNING"
EXPORTED_TYPES = """
F32 F16 BF16 Q8_0 Q6_K Q5_K_M Q5_K_S Q5_1 Q5_0 Q4_K_M Q4_K_S Q4_1 Q4_0 IQ4_NL IQ4_XS Q3_K_L Q3_K_M Q3_K_S Q2_K
"""  # those of edgedec_export.requantize, which imports numpy
_HUB_TYPES = "Q4_K_M Q4_0 Q8_0 Q4_K_S Q5_K_M Q5_K_S Q6_K Q3_K_M F16 BF16"


def join_words() -> None:
    """Undo in the environment that bash ends words at colons and equals signs (hf:OWNER/REPO:Q4_K_M, --draft=suffix).

    What stands before the last of them in the word to complete is kept in a variable of its own, as bash replaces only
    what follows.
    """
    if os.environ.get(_SHELL) != "complete_bash" or not os.environ.get("COMP_CWORD", "").isdigit():
        return
    words = os.environ.get("COMP_WORDS", "").split("\n")[: int(os.environ["COMP_CWORD"]) + 1]
    joined = [""]
    for before, word in zip(["", *words], words, strict=False):
        if word == "=" and before.startswith("--"):
            continue
        if word in (":", "=") or joined[-1].endswith((":", "=")):
            joined[-1] += word
        else:
            joined.append(word)
    if words[-1:] == ["="] and joined[-1].startswith("--"):
        joined.append("")
    rest = re.split("[:=]", joined[-1])[-1]
    os.environ["COMP_WORDS"] = "\n".join([*joined[1:-1], rest])
    os.environ["COMP_CWORD"] = str(len(joined) - 2)
    os.environ[_BEGINNING] = joined[-1].removesuffix(rest)


def any_model(incomplete: str) -> list[str]:
    """Return the names of models and presets on this machine and of the catalogue that begin so."""
    return _fitting(incomplete, lambda: chain(_quantized(_beginning() + incomplete), _stored(), _catalogue()))


def stored_model(incomplete: str) -> list[str]:
    """Return the names of models and presets on this machine that begin so."""
    return _fitting(incomplete, _stored)


def draft_head(incomplete: str) -> list[str]:
    """Return `off` and the names of models, which draft heads are among."""
    return _fitting(incomplete, lambda: chain(["off"], _stored(), _catalogue()))


def runtime(incomplete: str) -> list[str]:
    """Return `auto` and the names of the runtimes that begin so."""
    return _fitting(incomplete, lambda: ["auto", *_plugins("edgedec.runtimes")])


def drafter(incomplete: str) -> list[str]:
    """Return `auto`, `off` and the names of the drafters; behind a plus the drafters that are not named yet."""
    before, plus, _ = incomplete.rpartition("+")
    parts = before.split("+")

    def candidates() -> list[str]:
        names = _plugins("edgedec.drafters")
        return [f"{before}+{name}" for name in names if name not in parts] if plus else ["auto", "off", *names]

    return _fitting(incomplete, candidates)


def method(incomplete: str) -> list[str]:
    """Return the names of the methods that begin so; behind "diffusion:" the rules of denoising."""

    def candidates() -> Iterator[str]:
        groups = ("edgedec.sessions", "edgedec.text_methods", "edgedec.searches:chooser", "edgedec.searches")
        yield from ("layer-skip", "momentum", "ignore-end", "passages", "pictures", "refine")
        yield from (name.replace("_", "-") for group in groups for name in _plugins(group))
        yield from (f"diffusion:{name}" for name in _plugins("edgedec.sessions:denoising_rule"))

    return _fitting(incomplete, candidates)


def draft_option(incomplete: str) -> list[str]:
    """Return what `--draft-option` takes that begins so: its keys, and their values where these are names."""

    def candidates() -> Iterator[str]:
        yield from ("max=", "store=", "overlap=yes", "head=off", "tree=chain", "rule=coupled")
        yield from (f"numerics={name}" for name in ("strict", "padded", "loose"))
        yield from (f"tree={name}" for name in _plugins("edgedec.rules:tree_shape"))
        yield from (f"rule={name}" for name in _plugins("edgedec.rules"))
        yield from (f"{key}={name}" for key in ("model", "head") for name in chain(_stored(), _catalogue()))

    return _fitting(incomplete, candidates)


def machine(incomplete: str) -> list[str]:
    """Return the names of the machines that a memory plan can be made for."""
    from edgedec_apps.cli.reports.machines import MACHINES

    return _fitting(incomplete, lambda: MACHINES)


def one_of(*words: str) -> Complete:
    """Return the completion of a value that is one of these words, in any case."""

    def complete(incomplete: str) -> list[str]:
        at = len(incomplete)
        return [incomplete + word[at:] for word in words if word.lower().startswith(incomplete.lower())]

    return complete


def _fitting(incomplete: str, choices: Callable[[], Iterable[str]]) -> list[str]:
    """Return the names that begin with a text, once each; the part of the word that bash keeps is left out.

    The names are those up to the first that can't be found out.
    """
    beginning = _beginning()
    names = list[str]()
    with suppress(Exception):  # such as a damaged catalogue; the command itself says what is wrong
        names.extend(choices())
    fitting = dict.fromkeys(name for name in names if name.startswith(beginning + incomplete))
    return [name.removeprefix(beginning) for name in fitting]


def _beginning() -> str:
    return os.environ.get(_BEGINNING, "")


def _stored() -> Iterator[str]:
    from edgedec_models.cache import list_models
    from edgedec_models.presets import preset_names

    yield from (model.name for model in list_models())
    yield from preset_names()


def _catalogue() -> Iterator[str]:
    from edgedec_models.catalogue import load_catalogue

    yield from load_catalogue()


def _quantized(name: str) -> Iterator[str]:
    """Yield the name of a repository with quantizations that many repositories have."""
    repository, colon, _ = name.rpartition(":")
    if name.startswith("hf:") and "/" in repository and colon:
        yield from (f"{repository}:{quantization}" for quantization in _HUB_TYPES.split())


def _plugins(kind: str) -> Iterable[str]:
    from edgedec.plugins import plugins

    return plugins(kind)
