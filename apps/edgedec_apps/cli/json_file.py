"""--json-out: a file that is written whole or not at all; and how a document is reported."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgedec.errors import StorageError
from edgedec.storage.whole_file import write_atomically
from edgedec_apps.cli.terminal import write_json, write_line


def require_json_file(path: Path) -> None:
    """Find out before the work whether the file could be written (StorageError when it can't)."""
    if path.is_dir():
        raise StorageError(f"{path} is a directory; name a file for the JSON object")
    if not path.parent.is_dir():
        raise StorageError(f"{path} can't be written: there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise StorageError(f"{path} can't be written: no permission")


def report(
    document: dict[str, Any], lines: Callable[[dict[str, Any]], list[str]], *, as_json: bool, json_out: Path | None
) -> None:
    """Print a document, as JSON or in the lines that it makes for a person, and write it to a file where asked for."""
    if as_json:
        write_json(document)
    else:
        for line in lines(document):
            write_line(line)
    if json_out is not None:
        write_json_file(json_out, document)


def write_json_file(path: Path, document: Any) -> None:
    """Write a JSON file, whole or not at all (StorageError when it can't be).

    What is no regular file, or one of our own output (/dev/stderr), is added to; of a link, the file it names counts.
    """
    text = json.dumps(document) + "\n"
    try:
        if path.exists() and (not path.is_file() or _is_own_output(path)):
            with path.open("a", encoding="ascii") as file:
                file.write(text)
        else:
            write_atomically(Path(os.path.realpath(path)), text.encode("ascii"))
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error.strerror or error}") from error


def _is_own_output(path: Path) -> bool:
    return any(os.path.samestat(path.stat(), os.fstat(descriptor)) for descriptor in (1, 2))
