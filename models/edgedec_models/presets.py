"""Presets: names for a model with its own system message, chat template, options or draft head.

Each preset is a small TOML file, NAME.toml, in the folder `presets` of the configuration:

    model = "smollm2-135m"
    system = "You answer in one sentence."

    [options]
    temperature = 0.2
    n_ctx = 2048

A file can be read and written by its owner only, as it holds texts.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from edgedec.errors import ModelFormatError, RequestError, StorageError
from edgedec.storage.whole_file import write_atomically
from edgedec_models.folders import config_folder, is_plain
from edgedec_models.storage import storage_errors

MOST_BYTES = 1_000_000
"""Most bytes of a preset's file."""

_MOST_NAME_BYTES = 200
_CONTEXT = "n_ctx"
_NOT_KEPT = ("logit_bias", "logprobs")  # options that belong to one request
_SUFFIX = ".toml"


@dataclass(frozen=True, slots=True)
class Preset:
    """A name for a model with settings of its own; what is empty is as the model has it.

    Attributes:
        name: The preset's name.
        model: The name of the model, or of another preset's model.
        system: The system message of a chat that has none.
        template: Jinja source of the chat template.
        draft_head: The draft head, by name, or "off".
        lora: Adapters, one a line: the path of each, perhaps with its scale ("/models/tone.gguf=0.5").
        options: Options of sampling by the names of SamplingParams, and `n_ctx`, the tokens of the context.

    Raises:
        RequestError: The name is no plain name, a text is too long, or an option is unknown or out of range.
    """

    name: str
    model: str
    system: str = ""
    template: str = ""
    draft_head: str = ""
    lora: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from edgedec.sampling import SamplingParams  # here, as it imports numpy, and tab completion names presets

        if not _is_name(self.name):
            raise RequestError(f"{self.name!r:.300} is no name for a preset; use letters, digits, '-' and '_'")
        names = {*SamplingParams.names(), _CONTEXT} - set(_NOT_KEPT)
        if unknown := sorted(set(self.options) - names):
            raise RequestError(f"{unknown[0]!r:.100} is no option of a preset; known: {', '.join(sorted(names))}")
        n_ctx = self.options.get(_CONTEXT, 1)
        if type(n_ctx) is not int or n_ctx < 1:
            raise RequestError(f"{_CONTEXT} is {n_ctx!r:.100}; it must be a whole number, at least 1")
        SamplingParams(**self.sampling)

    @property
    def sampling(self) -> dict[str, Any]:
        """The options of sampling."""
        options = {name: value for name, value in self.options.items() if name != _CONTEXT}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}

    @property
    def n_ctx(self) -> int | None:
        """The tokens of the context, or None."""
        return self.options.get(_CONTEXT)


_TEXTS = [each.name for each in fields(Preset) if each.name not in ("name", "options")]


def presets_folder() -> Path:
    """Return the folder of the presets; it may be absent."""
    return config_folder() / "presets"


def list_presets() -> list[Preset]:
    """Return the presets, sorted by name. A file that can't be used is left out: find_preset says what is wrong.

    Raises:
        StorageError: The folder can't be read.
    """
    presets = []
    for name in preset_names():
        try:
            presets.append(find_preset(name))
        except (ModelFormatError, StorageError):
            continue
    return [preset for preset in presets if preset is not None]


def preset_names() -> list[str]:
    """Return the names of the presets, sorted, also of those whose files are damaged (StorageError as list_presets)."""
    folder = presets_folder()
    if not folder.is_dir():
        return []
    with storage_errors("list", folder):
        return sorted(path.stem for path in folder.iterdir() if path.suffix == _SUFFIX and _is_name(path.stem))


def find_preset(name: str) -> Preset | None:
    """Return the preset of a name, or None where there is none.

    Raises:
        ModelFormatError: The file is no preset; the message says what is wrong with it.
        StorageError: The file can't be read.
    """
    if not _is_name(name):
        return None
    path = _path(name)
    try:
        with storage_errors("read", path):
            if not path.is_file():
                return None
            if path.stat().st_size > MOST_BYTES:
                raise ModelFormatError(f"{path} has more than {MOST_BYTES} bytes, and is no preset; delete it")
            document = tomllib.loads(path.read_bytes().decode("utf-8"))
        return _preset(name, document)
    except (ValueError, TypeError, RequestError, RecursionError) as error:
        raise ModelFormatError(f"the preset {path} can't be used: {error}; correct it, or delete it") from error


def has_preset(name: str) -> bool:
    """Return whether there is a file of a preset of this name, damaged or not."""
    return _is_name(name) and _path(name).is_file()


def save_preset(preset: Preset) -> Path:
    """Write a preset's file, whole or not at all, in place of an earlier one; return its path.

    Raises:
        RequestError: The texts are too long, or are no Unicode.
        StorageError: The file can't be written.
    """
    path = _path(preset.name)
    try:
        data = _toml(preset).encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"the preset holds characters that are no Unicode: {error.reason}") from error
    if len(data) > MOST_BYTES:
        raise RequestError(f"the preset has {len(data)} bytes; it may have {MOST_BYTES}")
    with storage_errors("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data, private=True)
    return path


def remove_preset(name: str) -> bool:
    """Delete a preset, and return whether there was one (StorageError where it can't be deleted)."""
    if not has_preset(name):
        return False
    with storage_errors("delete", path := _path(name)):
        path.unlink()
    return True


def _is_name(name: str) -> bool:
    """Return whether a name can be a preset's: one that any file system takes."""
    return is_plain(name) and len(name.encode("utf-8", "replace")) <= _MOST_NAME_BYTES


def _path(name: str) -> Path:
    return presets_folder() / f"{name}{_SUFFIX}"


def _preset(name: str, document: dict[str, Any]) -> Preset:
    if unknown := sorted(set(document) - {*_TEXTS, "options"}):
        raise RequestError(f"the key {unknown[0]!r} is not known; known: {', '.join(_TEXTS)}, options")
    if wrong := [key for key in _TEXTS if not isinstance(document.get(key, ""), str)]:
        raise RequestError(f"{wrong[0]} must be a string")
    if not document.get("model"):
        raise RequestError("it names no model (model = ...)")
    if not isinstance(document.get("options", {}), dict):
        raise RequestError("options must be a table ([options])")
    return Preset(name, **document)


def _toml(preset: Preset) -> str:
    """Return a preset as TOML.

    >>> print(_toml(Preset("poet", "tiny", system="Rhyme.", options={"top_k": 5, "stop": ["x"]})))
    model = "tiny"
    system = "Rhyme."
    <BLANKLINE>
    [options]
    top_k = 5
    stop = ["x"]
    <BLANKLINE>
    """
    texts = {name: getattr(preset, name) for name in _TEXTS}
    lines = [f"{name} = {_value(text)}" for name, text in texts.items() if text]
    if preset.options:
        lines += ["", "[options]", *(f"{name} = {_value(value)}" for name, value in preset.options.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """Return a string, a number, a boolean or a list of strings as a value of TOML."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):  # JSON's escapes are TOML's, but for this one character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower()
