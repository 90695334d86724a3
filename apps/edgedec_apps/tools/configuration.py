"""Which tool servers there are: a file {"mcpServers": {NAME: ...}}, as other programs with such servers have it.

A server is a program that is started here, {"command", "args", "env", "cwd"}, or one that answers elsewhere, {"url",
"headers"}. Further keys of other programs are left alone; a server that is "disabled" is left out.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edgedec.errors import RequestError
from edgedec_apps.texts import read_text
from edgedec_models.folders import config_folder

OFF = "off"
_DEFAULT = "mcp.json"
_MOST_BYTES = 1_000_000
_MOST_SERVERS = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_TYPES = {"stdio": "command", "http": "url", "streamable-http": "url", "streamableHttp": "url"}


@dataclass(frozen=True, slots=True)
class Program:
    """A tool server that is started here; no shell takes part.

    Attributes:
        name: The server's name.
        command: The program.
        args: Its arguments.
        env: Variables of its environment, besides the few that every server gets.
        cwd: The folder that it is started in; None for this process's own.
    """

    name: str
    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # keys of services are often in it
    cwd: str | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """A tool server that answers at a URL (streamable HTTP), with headers for each request."""

    name: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


Server = Program | Address


def configured(path: str | None) -> tuple[Server, ...]:
    """Return the servers of a file. None stands for mcp.json in the configuration folder where it exists, OFF for none.

    Raises:
        RequestError: The file is malformed.
        StorageError: The file can't be read.
    """
    if path == OFF:
        return ()
    file = config_folder() / _DEFAULT if path is None else Path(path).expanduser()
    return () if path is None and not file.exists() else read_servers(file)


def read_servers(path: Path) -> tuple[Server, ...]:
    """Return the servers that a file names, in its order.

    Raises:
        RequestError: The file is not JSON of this form.
        StorageError: The file can't be read.
    """
    try:
        document = json.loads(read_text(path, _MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} names no tool servers: it is not JSON ({error})") from error
    entries = document.get("mcpServers") if isinstance(document, dict) else None
    if not isinstance(entries, dict):
        raise RequestError(f'{path} names no tool servers: it must be {{"mcpServers": {{NAME: {{"command": ...}}}}}}')
    if len(entries) > _MOST_SERVERS:
        raise RequestError(f"{path} names {len(entries)} tool servers; at most {_MOST_SERVERS}")
    return tuple(_server(path, name, entry) for name, entry in entries.items() if not _is_disabled(entry))


def _is_disabled(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("disabled") is True


def _server(path: Path, name: str, entry: Any) -> Server:
    def refuse(what: str) -> RequestError:
        return RequestError(f"{path}: the tool server {name!r:.100} {what}")

    def texts(key: str) -> dict[str, str]:
        entries = entry.get(key) or {}
        if not isinstance(entries, dict) or not all(isinstance(value, str) for value in entries.values()):
            raise refuse(f"has {key} that is not an object of texts")
        return entries

    if _NAME.fullmatch(name) is None:
        raise refuse("must be named with letters, digits, '_', '-' and '.', at most 64")
    if not isinstance(entry, dict):
        raise refuse("must be an object")
    kind = entry.get("type")
    if kind is not None and (not isinstance(kind, str) or kind not in _TYPES):
        raise refuse(f"is of the type {kind!r:.40}; known: {', '.join(_TYPES)}")
    keys = [key for key in ("command", "url") if isinstance(entry.get(key), str) and entry[key]]
    if len(keys) != 1 or (kind is not None and _TYPES[kind] != keys[0]):
        raise refuse("must have a command or a url, one of them, that fits its type")
    if keys == ["url"]:
        return Address(name, _checked_url(entry["url"], refuse), texts("headers"))
    args, cwd = entry.get("args") or [], entry.get("cwd")
    if not isinstance(args, list) or not all(isinstance(each, str) for each in args):
        raise refuse("has args that are not a list of texts")
    if cwd is not None and not isinstance(cwd, str):
        raise refuse("has a cwd that is not the name of a folder")
    program = Program(name, entry["command"], tuple(args), texts("env"), cwd)
    if any("\0" in text for text in (program.command, *args, *program.env, *program.env.values(), cwd or "")):
        raise refuse("has a zero byte in its command or environment")
    return program


def _checked_url(url: str, refuse: Any) -> str:
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        sound = False
    if not sound:
        raise refuse(f"has the url {url!r:.100}; it must begin with http:// or https:// and name a host")
    return url
