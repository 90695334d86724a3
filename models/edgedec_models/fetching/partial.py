"""A file that is being fetched: FILE.partial, which a later attempt resumes, and FILE.partial.json, which describes it.

The SHA-256 is computed while writing. FILE itself appears only when it is complete, verified and synced to the disk.
"""

import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from edgedec.errors import PullError
from edgedec.load_options import ResolveOptions
from edgedec.storage.whole_file import publish
from edgedec_models.fetching.verify import digest_of
from edgedec_models.record import WantedFile
from edgedec_models.storage import (
    human_bytes,
    is_full,
    make_folder,
    require_space,
    storage_errors,
    write_json,
)
from edgedec_runtimes.tile_files.record import read_json, sidecar

MOST_UNKNOWN_BYTES = 100_000_000_000  # the most to fetch of a file whose size the server does not give
ROOM_BYTES = 16 << 20


def partial_path(path: Path) -> Path:
    """Return where a file is kept while it is incomplete."""
    return path.with_name(path.name + ".partial")


class Partial:
    """The part of a file that has been fetched; a context manager that keeps it for resuming if the block ends early.

    Attributes:
        size_bytes: Bytes that are there.
        validator: ETag or date of the remote file that the bytes belong to; "" where the server gave none.
        n_parts: Number of complete parts, for a file that comes in parts.
    """

    def __init__(self, file: WantedFile, options: ResolveOptions, *, in_parts: bool = False) -> None:
        """Prepare. With `in_parts` only complete parts (see checkpoint) are resumed."""
        self._wanted = file
        self._options = options
        self._identity = file.sha256 or file.source
        self._in_parts = in_parts
        self._path = partial_path(file.path)
        self._state = sidecar(self._path)
        self._digest = hashlib.sha256()
        self._total_bytes = file.size_bytes or 0
        self.size_bytes = 0
        self.validator = ""
        self.n_parts = 0

    def __enter__(self) -> Self:
        """Open the file, and resume what an earlier attempt left.

        Raises:
            StorageError: The file cannot be opened or read.
            CancelledError: `options.cancel` was cancelled.
        """
        make_folder(self._path.parent)
        with storage_errors("write", self._path):
            self._file = open(self._path, "a+b", buffering=0)
        try:
            self._take_up()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file. What is there stays; an empty file is deleted."""
        self._file.close()
        if not self.size_bytes:
            self.discard()

    def restart(self, validator: str = "") -> None:
        """Discard what is there, and begin again with a remote file that has this validator."""
        with storage_errors("write", self._path):
            self._file.truncate(0)
        self._digest = hashlib.sha256()
        self.size_bytes = self.n_parts = 0
        self.validator = validator
        self._write_state()

    def expect(self, total_bytes: int) -> None:
        """Check that the disk has room for a file of this size.

        Raises:
            StorageError: The disk has too little room.
        """
        self._total_bytes = total_bytes
        self._require_space(total_bytes - self.size_bytes)

    def make_room(self, n_bytes: int) -> None:
        """Check that n_bytes more may come of a file whose size is unknown; the disk is looked at every ROOM_BYTES.

        Raises:
            PullError: The file would be larger than any model.
            StorageError: The disk has too little room to go on.
        """
        size_bytes = self.size_bytes + n_bytes
        if size_bytes > MOST_UNKNOWN_BYTES:
            self.restart()
            raise PullError(
                f"pull {self._wanted.name}: more than {human_bytes(MOST_UNKNOWN_BYTES)} came, and the server does not "
                "say how large the file is; nothing was kept. If this is the address of a model, fetch it with another "
                "program and pass the path of its file"
            )
        if size_bytes > self._total_bytes:
            self.expect(size_bytes + ROOM_BYTES)

    def write(self, block: bytes) -> None:
        """Append a block.

        Raises:
            StorageError: The disk is full, or fails; what was written before stays.
        """
        rest = memoryview(block)
        with storage_errors("write", self._path):
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError as error:
                if is_full(error):
                    self._require_space(max(self._total_bytes - self.size_bytes, len(rest)))
                raise
        self._digest.update(block)
        self.size_bytes += len(block)

    def checkpoint(self) -> None:
        """Record that one more part is complete."""
        with storage_errors("write", self._path):
            os.fsync(self._file.fileno())
        self.n_parts += 1
        self._write_state()

    def sha256(self) -> str:
        """Return the SHA-256 (hex) of what is there."""
        return self._digest.hexdigest()

    def head(self, n_bytes: int) -> bytes:
        """Return the first n_bytes of what is there."""
        with storage_errors("read", self._path):
            self._file.seek(0)
            return self._file.read(n_bytes) or b""

    def publish(self) -> str:
        """Give the file its final name and return its SHA-256 (hex).

        Raises:
            PullError: It is not the file wanted, and was deleted.
            StorageError: It cannot be stored.
        """
        file, sha256 = self._wanted, self.sha256()
        fault = None
        if file.size_bytes not in (None, self.size_bytes):
            fault = f"{self.size_bytes} bytes came where {file.size_bytes} were expected"
        elif file.sha256 not in (None, sha256):
            fault = f"its SHA-256 is {sha256} where {file.sha256} was expected"
        if fault:
            self.restart()
            raise PullError(
                f"{file.name} from {file.source} is not the file wanted: {fault}; nothing was kept. Try "
                "again if it was damaged on the way; it may also have changed at its source"
            )
        with storage_errors("write", self._path):
            os.fsync(self._file.fileno())
            self._file.close()
        with storage_errors("rename", self._path):
            publish(self._path, file.path)
        self.discard()
        return sha256

    def discard(self) -> None:
        """Delete what is there."""
        with storage_errors("delete", self._path):
            self._path.unlink(missing_ok=True)
            self._state.unlink(missing_ok=True)

    def _take_up(self) -> None:
        state = read_json(self._state)
        if state.get("identity") != self._identity or (self._in_parts and "part_bytes" not in state):
            self.restart()
            return
        self.validator = str(state.get("validator", ""))
        with storage_errors("read", self._path):
            size_bytes = os.fstat(self._file.fileno()).st_size
            if self._in_parts:
                part_bytes, n_parts = state.get("part_bytes"), state.get("n_parts")
                if not isinstance(part_bytes, int) or not isinstance(n_parts, int) or part_bytes > size_bytes:
                    part_bytes = n_parts = 0
                self.n_parts = n_parts
                size_bytes = part_bytes
                self._file.truncate(part_bytes)
            self._file.seek(0)
            self._digest = digest_of(self._file, size_bytes, f"{self._wanted.name}, fetched earlier", self._options)
        self.size_bytes = size_bytes

    def _require_space(self, n_bytes: int) -> None:
        note = (
            f". The {human_bytes(self.size_bytes)} fetched so far stay for resuming; "
            f"`edgedec rm {self._wanted.name}` deletes them"
        )
        what = f"pull {self._wanted.name}"
        require_space(self._path.parent, max(0, n_bytes), what, note if self.size_bytes else "")

    def _write_state(self) -> None:
        state: dict[str, object] = {"identity": self._identity, "source": self._wanted.source}
        if self._in_parts:
            state |= {"n_parts": self.n_parts, "part_bytes": self.size_bytes}
        else:
            state |= {"validator": self.validator}
        write_json(self._state, state)
