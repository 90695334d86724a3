"""Settings files of other programs: written with a copy of what was there, and given back byte for byte.

The first line of a file that was written says so, with the hash of the rest, so that an edited file is never taken for
ours. The copy lies beside it and is called NAME.before-edgedec; there is none where there was no file.
"""

import os
import re
import shutil
from hashlib import sha256
from pathlib import Path

from edgedec.errors import RequestError, StorageError
from edgedec.storage.whole_file import write_atomically

_SEAL = re.compile(rb"# Written by edgedec launch, which --undo takes back; sha256 of the rest: ([0-9a-f]{64})\n")
_LINE = _SEAL.pattern.partition(b"(")[0]


def copy_of(path: Path) -> Path:
    """Return where the copy of a file lies."""
    return path.with_name(f"{path.name}.before-edgedec")


def text_before(path: Path) -> str:
    """Return what a file has without what was written to it; "" where there is none.

    Raises:
        RequestError: It was edited since it was written.
        StorageError: It can't be read, or is no text.
    """
    return _text(copy_of(path) if _is_written(path) else path)


def holds(path: Path, text: str) -> bool:
    """Return whether a file was written with this text, and is as it was (StorageError where it can't be read)."""
    return _read(path) == _sealed(text)


def write_settings(path: Path, text: str) -> None:
    """Give a file new contents; what was there is copied first, unless it was written before.

    Raises:
        RequestError: It was edited since it was written.
        StorageError: It can't be written; what was there is unchanged.
    """
    try:
        if not _is_written(path) and path.exists():
            shutil.copy2(path, copy_of(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, _sealed(text), private=True)  # it may hold keys
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error.strerror or error}") from error


def undo_settings(path: Path) -> bool:
    """Give back what was there before a file was written; return whether there was a file.

    Raises:
        RequestError: Nothing was written there, or it was edited since.
        StorageError: It can't be written.
    """
    if not _is_written(path):
        raise RequestError(f"there is nothing to undo: edgedec launch has not written {path}")
    try:
        if copy_of(path).exists():
            os.replace(copy_of(path), path)
            return True
        path.unlink()
    except OSError as error:
        raise StorageError(f"{path} could not be restored: {error.strerror or error}") from error
    return False


def _sealed(text: str) -> bytes:
    data = text.encode()
    return _LINE + sha256(data).hexdigest().encode() + b"\n" + data


def _is_written(path: Path) -> bool:
    """Return whether a file is as it was written (RequestError where it was edited since)."""
    data, copy = _read(path), copy_of(path)
    seal = _SEAL.match(data)
    if seal is not None and sha256(data[seal.end() :]).hexdigest().encode() == seal[1]:
        return True
    if seal is None and (not copy.exists() or _read(copy) == data):  # the latter where writing was interrupted
        return False
    where = f"its earlier contents are in {copy}" if copy.exists() else "there was no such file before"
    raise RequestError(
        f"{path} was edited since edgedec launch wrote it, and stays as it is; {where}: restore it by hand"
    )


def _read(path: Path) -> bytes:
    """Return the bytes of a file; none where there is none (StorageError where it can't be read)."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise StorageError(f"{path} could not be read: {error.strerror or error}") from error


def _text(path: Path) -> str:
    try:
        return _read(path).decode()
    except UnicodeDecodeError as error:
        raise StorageError(f"{path} is no text in UTF-8 (byte {error.start})") from error
