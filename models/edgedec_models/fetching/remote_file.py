"""A file on a server as a file object: what is read comes in ranges, so that a model's header costs no more than that.

A server that sends whole files only is noticed by its first answer, of which nothing is read.
"""

import io
import re
from contextlib import suppress

import httpx

from edgedec.errors import PullError
from edgedec.gguf.values import MAX_HEADER_BYTES
from edgedec.load_options import ResolveOptions
from edgedec.progress import check_cancelled, report_progress
from edgedec_models.addresses import redact
from edgedec_models.fetching.download import Remote
from edgedec_models.fetching.web import Pace, TransientError, check_status, retry
from edgedec_models.storage import human_bytes

MOST_BYTES = MAX_HEADER_BYTES + (16 << 20)  # of one file: the largest header, and the directory of a zip file
_LEAST_BYTES = 1 << 16  # of a request, if the file has as many: a zip file is read in small pieces
_MOST_AHEAD_BYTES = 1 << 21  # of a request for more than was asked for


class WholeFilesOnlyError(PullError):
    """A server sends a file only as a whole; `size_bytes` is how large the file is, or None."""

    def __init__(self, message: str, size_bytes: int | None) -> None:
        """Keep the message and the size."""
        super().__init__(message)
        self.size_bytes = size_bytes


class RemoteFile(io.RawIOBase):
    """A file on a server, to be read from any place. Bytes that were fetched last are kept, and no others.

    Attributes:
        size_bytes: The size of the file, as the server says it.
        n_fetched: The bytes that came so far.
    """

    def __init__(self, client: httpx.Client, remote: Remote, name: str, options: ResolveOptions) -> None:
        """Ask for the beginning of the file.

        Raises:
            WholeFilesOnlyError: The server does not send parts of files.
            ModelNotFoundError, PullError, CancelledError: The server has no such file, refuses, or can't be reached.
        """
        super().__init__()
        self._client, self._remote, self._name, self._options = client, remote, name, options
        self._what = f"read the header of {name}"
        self._position, self._start, self._kept = 0, 0, b""
        self.size_bytes, self.n_fetched = 0, 0
        self._fetch(0, _LEAST_BYTES)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the place that is read next."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place of the file and return it; nothing is fetched."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Return so many bytes from here on, fewer only at the end of the file (raises as __init__)."""
        end = self.size_bytes if size < 0 else min(self.size_bytes, self._position + size)
        data = bytearray()
        while self._position < end:
            if not self._start <= self._position < self._start + len(self._kept):
                goes_on = self._position == self._start + len(self._kept)
                ahead = min(2 * len(self._kept), _MOST_AHEAD_BYTES) if goes_on else _LEAST_BYTES
                self._fetch(self._position, min(max(end - self._position, ahead), self.size_bytes - self._position))
            begin = self._position - self._start
            data += self._kept[begin : begin + end - self._position]
            self._position = self._start + min(len(self._kept), begin + end - self._position)
        return bytes(data)

    def _fetch(self, start: int, n_bytes: int) -> None:
        """Keep `n_bytes` from `start` on, as many as the file has."""
        if self.n_fetched + n_bytes > MOST_BYTES:
            raise PullError(
                f"{self._what}: more than {human_bytes(self.n_fetched)} would have to be read, and no model's header "
                f"is so large; check the address {redact(self._remote.url)}"
            )
        self._kept = retry(lambda: self._ask(start, n_bytes), self._what, self._options)
        self._start = start
        self.n_fetched += len(self._kept)
        report_progress(self._options.on_progress, "header", self.n_fetched, None, "bytes", self._name)

    def _ask(self, start: int, n_bytes: int) -> bytes:
        """Make one request for a range and return what came, after checks (TransientError where too little came)."""
        check_cancelled(self._options.cancel, self._what)
        headers = {**self._remote.headers, "Range": f"bytes={start}-{start + n_bytes - 1}"}
        with self._client.stream("GET", self._remote.url, headers=headers) as response:
            check_status(response, self._what, self._remote.advice)
            n_expected = min(n_bytes, self._check_range(response, start) - start)
            content, pace = bytearray(), Pace()
            for block in response.iter_raw():
                pace.got(len(block))
                check_cancelled(self._options.cancel, self._what)
                content += block
                if len(content) > n_expected:
                    raise PullError(
                        f"{self._what}: {redact(self._remote.url)} sends more than the {n_expected} bytes that were "
                        "asked for; try another address"
                    )
        if len(content) < n_expected:
            raise TransientError(f"the connection ended after {len(content)} of {n_expected} bytes")
        return bytes(content)

    def _check_range(self, response: httpx.Response, start: int) -> int:
        """Return the size of the file, by the answer to a request for a range that begins with `start`."""
        if response.status_code != 206:
            n_bytes = None
            with suppress(ValueError):
                n_bytes = int(response.headers.get("Content-Length", ""))
            raise WholeFilesOnlyError(f"{self._what}: {redact(self._remote.url)} sends only the whole file", n_bytes)
        match = re.fullmatch(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18})", response.headers.get("Content-Range", ""))
        if match is None or int(match[1]) != start or int(match[2]) <= start:
            raise PullError(
                f"{self._what}: {redact(self._remote.url)} answers with the range "
                f"{response.headers.get('Content-Range', '')[:80]!r}, expected one from byte {start} on and the size "
                "of the file; try another address"
            )
        if self.size_bytes not in (0, int(match[2])):
            raise PullError(f"{self._what}: the file changed at {redact(self._remote.url)}; try again")
        self.size_bytes = int(match[2])
        return self.size_bytes
