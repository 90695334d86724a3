"""Fetch one file over HTTP: resume what an earlier attempt left, and verify the file before it gets its name."""

import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field

import httpx

from edgedec.errors import PullError
from edgedec.load_options import ResolveOptions
from edgedec.progress import check_cancelled, report_progress
from edgedec_models.addresses import redact
from edgedec_models.fetching.documents import watched
from edgedec_models.fetching.partial import Partial
from edgedec_models.fetching.web import Pace, TransientError, check_status, open_client, retry
from edgedec_models.record import WantedFile


@dataclass(frozen=True, slots=True)
class Remote:
    """A file on a server.

    Attributes:
        url: The file's URL.
        headers: Sent with each request; Authorization is not sent to another host after a redirect.
        advice: What to do when the server refuses access, for the message.
        magic: The bytes that the file must begin with, since some servers send a page in place of a file.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    advice: str = ""
    magic: bytes = b""


def download_gguf(
    url: str,
    file: WantedFile,
    options: ResolveOptions,
    *,
    headers: Mapping[str, str] | None = None,
    advice: str = "",
    magic: bytes = b"GGUF",
) -> str:
    """Fetch the GGUF at a URL as `file` and return its SHA-256 (hex); the caller holds the lock of the path.

    Args:
        headers, advice, magic: As in `Remote`; another `magic` is for the files of a draft head, which are no GGUFs.

    Raises:
        ModelNotFoundError, PullError, StorageError, CancelledError: As `download`.
    """
    with open_client() as client:
        return download(client, Remote(url, headers or {}, advice, magic=magic), file, options)


def download(client: httpx.Client, remote: Remote, file: WantedFile, options: ResolveOptions) -> str:
    """Fetch `remote` as `file` and return its SHA-256 (hex); the caller holds the lock of the path.

    Raises:
        ModelNotFoundError: The server has no such file.
        PullError: The network or the server fails, or the file is not the one wanted.
        StorageError: The disk has too little room, or cannot be written.
        CancelledError: `options.cancel` was cancelled; what was fetched is kept for resuming.
    """
    what = f"pull {file.name}"
    with Partial(file, options) as partial:
        resumed = partial.size_bytes > 0
        retry(lambda: _receive(client, remote, file, partial, options), what, options, lambda: partial.size_bytes)
        if resumed and file.sha256 not in (None, partial.sha256()):
            partial.restart()  # what an earlier attempt left was damaged
            retry(lambda: _receive(client, remote, file, partial, options), what, options, lambda: partial.size_bytes)
        head = partial.head(len(remote.magic))
        if head != remote.magic:
            partial.restart()
            raise PullError(
                f"{what}: what {redact(remote.url)} sends is not a model: it begins with {head!r} where "
                f"{remote.magic!r} was expected; nothing was kept. Give the address of the file itself"
            )
        return partial.publish()


def _receive(client: httpx.Client, remote: Remote, file: WantedFile, partial: Partial, options: ResolveOptions) -> None:
    """Make one request and append what comes; return when the file is complete."""
    if not (file.sha256 or partial.validator) and partial.size_bytes:
        partial.restart()  # nothing shows whether the remote file is still the same
    if file.size_bytes is not None and file.size_bytes == partial.size_bytes:
        return
    headers = dict(remote.headers)
    if partial.size_bytes:
        headers["Range"] = f"bytes={partial.size_bytes}-"
        if partial.validator and not file.sha256:  # each mirror has its own validator; the checksum is better
            headers["If-Range"] = partial.validator
    with watched(f"pull {file.name}", options) as extensions:
        request = client.build_request("GET", remote.url, headers=headers, extensions=extensions)
        response = client.send(request, stream=True)
    with closing(response):
        if response.status_code == 416 and partial.size_bytes:
            if _total_bytes(response, 0) == partial.size_bytes:
                return
            partial.restart()
            raise TransientError("the remote file is shorter than the part that was fetched before")
        check_status(response, f"pull {file.name}", remote.advice)
        if response.status_code == 206:
            _check_range(response, partial)
        else:
            partial.restart(_validator(response))
        _append(response, file, partial, options)


def _append(response: httpx.Response, file: WantedFile, partial: Partial, options: ResolveOptions) -> None:
    total = _total_bytes(response, partial.size_bytes) or file.size_bytes
    if file.size_bytes not in (None, total):
        partial.restart()
        raise PullError(
            f"pull {file.name}: {redact(str(response.url))} has {total} bytes where {file.size_bytes} were "
            "expected: it is another file; nothing was kept"
        )
    if total is not None:
        partial.expect(total)
    pace = Pace()
    for block in response.iter_raw():
        pace.got(len(block))
        if total is None:
            partial.make_room(len(block))
        check_cancelled(options.cancel, f"pull {file.name}")
        partial.write(block)
        if total is not None and partial.size_bytes > total:
            partial.restart()
            raise PullError(
                f"pull {file.name}: the server announced {total} bytes and sent more; nothing was kept, try again"
            )
        report_progress(options.on_progress, "download", partial.size_bytes, total, "bytes", file.name)
    if total is not None and partial.size_bytes < total:
        raise TransientError(f"the connection ended after {partial.size_bytes} of {total} bytes")


def _check_range(response: httpx.Response, partial: Partial) -> None:
    match = re.match(r"bytes ([0-9]{1,18})-", response.headers.get("Content-Range", ""))
    if match is None or int(match[1]) != partial.size_bytes:
        partial.restart()
        raise TransientError("the server sends another range than the requested one")


def _total_bytes(response: httpx.Response, begin: int) -> int | None:
    """Return the size of the whole remote file by Content-Range or Content-Length; None where neither says it."""
    if match := re.search(r"/([0-9]{1,18})$", response.headers.get("Content-Range", "")):
        return int(match[1])
    length = response.headers.get("Content-Length", "")
    return begin + int(length) if re.fullmatch("[0-9]{1,18}", length) else None


def _validator(response: httpx.Response) -> str:
    """Return what If-Range may carry: a strong ETag, else the date; "" where the response has neither."""
    etag: str = response.headers.get("ETag", "")
    if etag and not etag.startswith("W/") and etag.isascii():
        return etag
    date: str = response.headers.get("Last-Modified", "")
    return date if date.isascii() else ""
