"""Files that commands write: whole or not at all. And reports, which go to standard output and to a file."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgedec.errors import StorageError, as_storage_error
from edgedec.storage.whole_file import write_atomically
from edgedec_apps.cli.shown.terminal import write_json, write_line


def require_writable(*paths: Path | None) -> None:
    """Raise StorageError where one of these files could not be written, so that no work is done in vain."""
    for path in filter(None, paths):
        if path.is_dir():
            raise StorageError(f"{path} is a directory; give the name of a file")
        if not path.parent.is_dir():
            raise StorageError(f"{path} can't be written: there is no directory {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise StorageError(f"{path} can't be written: no permission")


def report(
    document: dict[str, Any], lines: Callable[[dict[str, Any]], list[str]], *, as_json: bool, json_out: Path | None
) -> None:
    """Print a document, as JSON or as the lines that `lines` returns, and write its JSON to the file `json_out`."""
    if as_json:
        write_json(document)
    else:
        for line in lines(document):
            write_line(line)
    if json_out is not None:
        write_json_file(json_out, document)


def write_json_file(path: Path, document: Any) -> None:
    """Write a document as a file of one line of JSON in ASCII (StorageError where it can't be written)."""
    write_file(path, (json.dumps(document) + "\n").encode("ascii"))


def write_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; a link stays, and the file that it names is written.

    The data is appended to what is not a regular file, and to a file that is this process's own output (/dev/stderr).

    Raises:
        StorageError: The file can't be written; an earlier file is unchanged.
    """
    with as_storage_error(f"{path} could not be written"):
        if path.exists() and (not path.is_file() or _is_own_output(path)):
            with path.open("ab") as file:
                file.write(data)
        else:
            write_atomically(Path(os.path.realpath(path)), data)


def _is_own_output(path: Path) -> bool:
    return any(os.path.samestat(path.stat(), os.fstat(descriptor)) for descriptor in (1, 2))


def default_name(model: str, source: Path) -> str:
    """Return a file's name, without an ending, for what a command makes of a model: after its file, or its own name.

    >>> default_name("hf:someone/Some-Model-GGUF:Q4_0", Path("/cache/0a1b2c.gguf"))
    'Some-Model-GGUF-Q4_0'
    """
    stem = source.resolve().name if source.is_dir() else source.stem
    name = stem if Path(model).exists() else model.rpartition("/")[2]
    plain = re.sub(r"-\d{5}-of-\d{5}$", "", name)
    return re.sub(r"[^\w.+-]+", "-", plain).strip(".-")
