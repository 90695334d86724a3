"""Files that appear whole or not at all: readers see the old contents or the new contents, never a part."""

import os
import re
from contextlib import suppress
from pathlib import Path

_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp$")


def write_atomically(path: Path, *pieces: bytes | memoryview, private: bool = False, sync: bool = False) -> None:
    """Give a file new contents by writing a temporary file in its folder and renaming that.

    The temporary file is called `NAME.XXXXXXXXXXXXXXXX.tmp` and is deleted where writing or renaming fails.

    Args:
        path: The file; it need not exist, its folder must.
        pieces: The new contents, one piece after another.
        private: Let nobody but the file's owner read or write it (mode 0600, on POSIX).
        sync: Wait until the disk holds the contents and the name, so that they outlive a loss of power.

    Raises:
        OSError: The file can't be written or renamed; what was at `path` is unchanged.
    """
    temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        with open(temporary, "xb", opener=_open_private if private else None) as file:
            file.writelines(pieces)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        if sync:
            publish(temporary, path)
        else:
            os.replace(temporary, path)
    finally:
        with suppress(OSError):  # it was renamed, or a file system that lets nothing be written lets nothing be deleted
            temporary.unlink()


def remove_temporaries(folder: Path) -> None:
    """Delete the temporary files in a folder, which processes that were killed have left; one that can't be is left.

    The caller sees to it that no process writes there meanwhile.
    """
    with suppress(OSError):
        for path in list(folder.iterdir()):
            if _TEMPORARY.search(path.name):
                with suppress(OSError):
                    path.unlink()


def publish(source: Path, target: Path) -> None:
    """Rename a file whose contents are on the disk already, and wait until the disk holds the new name.

    Raises:
        OSError: The file can't be renamed.
    """
    os.replace(source, target)
    try:
        folder = os.open(target.parent, os.O_RDONLY)
    except PermissionError:  # a system on which folders can't be opened
        return
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _open_private(path: str, flags: int) -> int:
    """Open a file as open() does; a new file is for its owner alone."""
    return os.open(path, flags, 0o600)
