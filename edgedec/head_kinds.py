"""Kinds of trained draft heads, by entry points of `edgedec.head_kinds`, and the search for the head of a model.

The search takes the first head that it finds

1. beside the model, where a kind says that its heads lie;
2. among those that plug-ins (edgedec.plugins.HEAD_FOLDERS) return: the cache's, the shipped ones, others';
3. in the model's own file.

In 2 a head must name this very model: first one that learned from these weights, else from another quantization of
them. What is damaged, or is no head, is passed over, as nobody asked for it; so is a plug-in that fails.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from edgedec import plugins
from edgedec.errors import EdgedecError, PluginError

T = TypeVar("T")

OFF = "off"
"""What load's `draft_head` is where no head is wanted."""


class Kinship(Enum):
    """What a head was trained for, seen from a model."""

    THESE_WEIGHTS = "the model, in this quantization"
    THIS_MODEL = "the model, in another quantization"
    UNKNOWN = "another model, or the head does not say"


@dataclass(frozen=True, slots=True)
class HeadDescription:
    """What `edgedec info` shows of a head.

    Attributes:
        document: The head's facts, of plain JSON types.
        rows: Names and values, for a person.
    """

    document: Mapping[str, Any]
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class HeadKind:
    """A kind of trained draft heads, as an entry point of `edgedec.head_kinds` names one.

    A head may be a file, a folder, or a part of its model's file; in each case a path stands for it. A runtime names
    the kinds that it can load (edgedec.runtime.Runtime), and loads a head by LoadOptions.draft_head.

    Attributes:
        is_head: Returns whether a path is that of a head of this kind; False where it can't be read.
        beside: Returns the places beside a model that hold something by the name of its head, the best one first.
        trained_for: Returns the name, which may be empty, of the model that a head was trained for; None where nothing
            in the head tells that model from others, or where the head can't be read.
        kinship: `(head, model, cache folder or None)` -> what the head was trained for; unknown where one of them can't
            be read.
        require_fit: `(head, model)`: raises an EdgedecError that says what is wrong with the head, or why it does not
            fit the model.
        describe: Returns what there is to know of a head (EdgedecError: it can't be read, or is none).
    """

    is_head: Callable[[Path], bool]
    beside: Callable[[Path], Sequence[Path]]
    trained_for: Callable[[Path], str | None]
    kinship: Callable[[Path, Path, Path | None], Kinship]
    require_fit: Callable[[Path, Path], None]
    describe: Callable[[Path], HeadDescription]


def kind_of(path: Path) -> HeadKind | None:
    """Return the kind of the head at a path; None where no kind takes it for a head."""
    return next((kind for kind in _kinds().values() if _asked(False, kind.is_head, path)), None)


def require_fit(head: Path, model: Path) -> None:
    """Check that a head can be read and fits a model; the first kind says what is wrong with what is no head.

    Raises:
        ModelError, StorageError, MemoryCapError: It can't, or does not; the message says why.
        PluginError: No kind of heads is installed.
    """
    kind = kind_of(head) or next(iter(_kinds().values()), None)
    if kind is None:
        raise PluginError(f"{head}: no kind of draft heads is installed; reinstall {plugins.DISTRIBUTION}")
    kind.require_fit(head, model)


def usable_head(model: Path, kinds: Collection[str], cache_dir: Path | None) -> tuple[Path | None, str]:
    """Return the head that is found for a model and fits it, or None; and a note where one was found that does not fit.

    Args:
        model: The model's GGUF, the first part of a split one, or the folder of an export.
        kinds: The names of the kinds that are looked for.
        cache_dir: The cache's root; None for no cache.
    """
    head = find_head(model, kinds, cache_dir)
    if head is None:
        return None, ""
    try:
        require_fit(head, model)
    except EdgedecError as error:
        return None, f"the draft head {head.name} was found, but is not used: {error}"
    return head, ""


def find_head(model: Path, kinds: Collection[str], cache_dir: Path | None) -> Path | None:
    """Return the draft head for a model; None where there is none. The arguments are those of usable_head()."""
    chosen = [kind for name, kind in _kinds().items() if name in kinds]
    nothing: Sequence[Path] = ()
    for kind in chosen:
        for path in _asked(nothing, kind.beside, model):
            return path
    of_this_model = None
    for path in (*_elsewhere(cache_dir), model):
        for kind in chosen:
            kinship = _asked(Kinship.UNKNOWN, kind.kinship, path, model, cache_dir)
            if kinship is Kinship.THESE_WEIGHTS:
                return path
            if kinship is Kinship.THIS_MODEL and of_this_model is None:
                of_this_model = path
    return of_this_model


def _kinds() -> dict[str, HeadKind]:
    kinds: dict[str, HeadKind] = {}
    for name, plugin in plugins.plugins(plugins.HEAD_KINDS).items():
        with suppress(EdgedecError):  # edgedec doctor tells of a plug-in that does not import
            kind = plugin.load()
            if isinstance(kind, HeadKind):
                kinds[name] = kind
    return kinds


def _elsewhere(cache_dir: Path | None) -> Iterator[Path]:
    for plugin in plugins.plugins(plugins.HEAD_FOLDERS).values():
        paths: Sequence[Path] = ()
        with suppress(Exception):  # one package's fault must not keep a model from loading
            paths = list(plugin.load()(cache_dir))
        yield from paths


def _asked(otherwise: T, ask: Callable[..., T], *args: object) -> T:
    """Return what a kind answers, or `otherwise` where it fails."""
    with suppress(Exception):
        return ask(*args)
    return otherwise
