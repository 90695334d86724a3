"""What edgedec keeps beside a head's weights: the target, what the head promises, and what the format leaves open.

In the folder of a checkpoint it is the file `edgedec-head.json`; in a GGUF the same text is the key `edgedec.head`:

    {"name": "...", "target": {"name": "...", "weights": "...", "norms": "...", "tokenizer": "..."},
     "reach": [0.56, 0.28, 0.15], "reach_by_kind": {"chat": [0.56, 0.28, 0.15]},
     "taps": [2, 14, 25], "feeds_back_normed": false, "about": {...}}

Every key may be left out. `taps` and `feeds_back_normed` win over config.json, where trainers mean different things by
one word. `about` may hold anything (the recipe, for example) and is not read.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgedec.errors import ModelNotFoundError, UnsupportedModelError
from edgedec_runtimes.trained_heads.card import Promise, Target
from edgedec_runtimes.weights.config_values import ConfigValues, shown
from edgedec_runtimes.weights.safetensors import parse_json, read_json

RECORD_FILE = "edgedec-head.json"
RECORD_KEY = "edgedec.head"
MOST_TAPS = 16
MOST_LAYERS = 1024

_KEYS = frozenset({"name", "target", "reach", "reach_by_kind", "taps", "feeds_back_normed", "about"})
_HASHES = ("weights", "norms", "tokenizer")
_MOST_DEPTHS = 64
_MOST_CHARACTERS = 1000
_REMEDY = f"correct {RECORD_FILE}, or update edgedec"


@dataclass(frozen=True, slots=True)
class Record:
    """What a record says; None, or empty, where it says nothing.

    Attributes:
        taps: As in HeadCard.
        feeds_back_normed: As in HeadCard.
    """

    name: str = ""
    target: Target | None = None
    promise: Promise | None = None
    taps: tuple[int, ...] | None = None
    feeds_back_normed: bool | None = None


def read_record(folder: Path) -> Record:
    """Return the record in a checkpoint's folder; an empty one where there is none.

    Raises:
        ModelFormatError, UnsupportedModelError: As `parse_record`.
        StorageError: The file cannot be read.
    """
    path = folder / RECORD_FILE
    try:
        return _record(path, read_json(path))
    except ModelNotFoundError:
        return Record()


def parse_record(text: str, path: Path) -> Record:
    """Return the record that a JSON text holds; error messages name `path`.

    Raises:
        ModelFormatError: The text is no sound JSON, or a value has another type than expected.
        UnsupportedModelError: The record has a key that edgedec does not know.
    """
    return _record(path, parse_json(text.encode(), path))


def record_text(
    name: str, target: Target | None, promise: Promise | None, *, about: dict[str, Any] | None = None, **settings: Any
) -> str:
    """Return the JSON text of a record.

    Args:
        name: The head's name.
        target: The model that it was trained for.
        promise: What it accepted when it was measured.
        about: Anything that a reader may want to know, of plain JSON types.
        settings: `taps` or `feeds_back_normed`, where config.json can't say them.
    """
    values: dict[str, Any] = {"name": name}
    if target is not None:
        hashes = {"weights": target.weights_hash, "norms": target.norms_hash, "tokenizer": target.tokenizer_hash}
        values["target"] = {"name": target.name} | hashes
    if promise is not None:
        values["reach"] = list(promise.reach)
        values["reach_by_kind"] = {kind: list(reach) for kind, reach in promise.reach_by_kind.items()}
    values |= settings
    if about is not None:
        values["about"] = about
    return json.dumps(values, indent=1)


def _record(path: Path, raw: dict[str, Any]) -> Record:
    values = ConfigValues(path, {key: value for key, value in raw.items() if value is not None}, _REMEDY)
    if unknown := sorted(values.values.keys() - _KEYS):
        raise UnsupportedModelError(
            f"{path}: the key {unknown[0][:80]!r} is not known; expected {', '.join(sorted(_KEYS))}; {_REMEDY}"
        )
    return Record(
        name=text(values, "name"),
        target=_target(values) if "target" in values.values else None,
        promise=_promise(values) if "reach" in values.values else None,
        taps=layer_ids(values, "taps"),
        feeds_back_normed=values.flag("feeds_back_normed", False) if "feeds_back_normed" in values.values else None,
    )


def text(values: ConfigValues, key: str) -> str:
    """Return the text of a key; "" where it is absent.

    Raises:
        ModelFormatError: The value is no text, or one that can't be shown in a line.
    """
    value = values.values.get(key, "")
    if not isinstance(value, str) or not value.isprintable() or len(value) > _MOST_CHARACTERS:
        values.fail(f"{key} is {shown(value)}, expected a line of text of at most {_MOST_CHARACTERS} characters")
    return value


def layer_ids(values: ConfigValues, key: str, least: int = 0) -> tuple[int, ...] | None:
    """Return the layer ids of a key, all different; None where it is absent.

    Raises:
        ModelFormatError: The value is no list of 1 to MOST_TAPS whole numbers from `least` to MOST_LAYERS, or one is
            twice.
    """
    value = values.values.get(key)
    if value is None:
        return None
    sound = isinstance(value, list) and all(type(i) is int and least <= i <= MOST_LAYERS for i in value)
    if not sound or not 1 <= len(value) <= MOST_TAPS or len(set(value)) != len(value):
        values.fail(
            f"{key} is {shown(value)}, expected 1 to {MOST_TAPS} different layers from {least} to {MOST_LAYERS}"
        )
    return tuple(value)


def _target(values: ConfigValues) -> Target:
    table = ConfigValues(values.path, values.table("target"), values.remedy)
    weights, norms, tokenizer = (text(table, key) for key in _HASHES)
    return Target(text(table, "name"), weights, norms, tokenizer)


def _promise(values: ConfigValues) -> Promise:
    kinds = values.table("reach_by_kind")
    by_kind = {kind: _reach(values, f"reach_by_kind of {kind[:40]!r}", reach) for kind, reach in kinds.items()}
    return Promise(_reach(values, "reach", values.values["reach"]), by_kind)


def _reach(values: ConfigValues, what: str, value: Any) -> tuple[float, ...]:
    """Return chances by depth, each from 0 to 1 and at most the one before."""
    sound = isinstance(value, list) and all(type(p) in (int, float) and 0 <= p <= 1 for p in value)
    if not sound or not 1 <= len(value) <= _MOST_DEPTHS or value != sorted(value, reverse=True):
        values.fail(
            f"{what} is {shown(value)}, expected 1 to {_MOST_DEPTHS} numbers from 0 to 1, none above the one before"
        )
    return tuple(map(float, value))
