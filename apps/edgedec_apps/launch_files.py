"""Settings files of other programs: written with a copy of what was there, and given back byte for byte.

The first line of a file that was written has the hash of the rest, so that an edited one is not taken for ours. The
copy lies beside it; there is none where there was no file. Functions raise OSError where the disk fails.
"""

import os
import re
import shutil
from hashlib import sha256
from pathlib import Path

from edgedec.errors import RequestError
from edgedec.storage.whole_file import write_atomically

_AS_IS = "surrogateescape"  # bytes that are no UTF-8 stay
_LINE = b"# Written by edgedec launch, which --undo takes back; sha256 of the rest: "
_SEAL = re.compile(re.escape(_LINE) + rb"([0-9a-f]{64})\n")


def text_before(path: Path) -> str:
    """Return what a file had before it was written, "" for none (RequestError where it was edited since)."""
    return _read(_copy(path) if _is_written(path) else path).decode(errors=_AS_IS)


def write_settings(path: Path, text: str) -> None:
    """Write a file; what was there is copied first, unless it was written before (RequestError as text_before)."""
    if not _is_written(path) and path.exists():
        shutil.copy2(path, _copy(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _sealed(text), private=True)  # it may hold keys


def undo_settings(path: Path) -> str:
    """Give back what was there, and say so (RequestError where nothing was written, or the file was edited since)."""
    if not _is_written(path):
        raise RequestError(f"there is nothing to undo: edgedec launch has not written {path}")
    if _copy(path).exists():
        os.replace(_copy(path), path)
        return f"{path} is as it was before"
    path.unlink()
    return f"{path} is deleted; there was none before"


def is_as_written(path: Path, text: str) -> bool:
    """Return whether a file is what write_settings makes of a text."""
    return _read(path) == _sealed(text)


def _copy(path: Path) -> Path:
    return path.with_name(f"{path.name}.before-edgedec")


def _sealed(text: str) -> bytes:
    data = text.encode(errors=_AS_IS)
    return _LINE + sha256(data).hexdigest().encode() + b"\n" + data


def _is_written(path: Path) -> bool:
    """Return whether a file is as it was written (RequestError where it was edited since)."""
    data, copy = _read(path), _copy(path)
    seal = _SEAL.match(data)
    if seal is not None and _sealed(data[seal.end() :].decode(errors=_AS_IS)) == data:
        return True
    if seal is None and (not copy.exists() or _read(copy) == data):  # the latter where writing was interrupted
        return False
    where = f"its earlier contents are in {copy}" if copy.exists() else "there was no such file before"
    raise RequestError(f"{path} was edited since edgedec launch wrote it, and stays; {where}: restore it by hand")


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""
