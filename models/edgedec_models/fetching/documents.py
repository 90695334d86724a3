"""Small documents from the net, such as the listing of a hub: with a bound of bytes and of time, and never unpacked."""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import httpx

from edgedec.errors import PullError
from edgedec.load_options import ResolveOptions
from edgedec.progress import check_cancelled
from edgedec_models.addresses import redact
from edgedec_models.fetching.web import TransientError, check_status, refuse_compressed, retry

MOST_PAGE_BYTES = 64 << 20  # of an index page; the largest has about 10 MB
MOST_JSON_BYTES = 8 << 20  # of a hub's answer; as Python's values it takes up to twenty times as much memory
MOST_S = 60.0  # for a whole document, or for the headers of a file
_SHOWN_BYTES = 60
_CONNECTED = (".connect_tcp.complete", ".start_tls.complete")


@dataclass(frozen=True, slots=True)
class Document:
    """A document.

    Attributes:
        url: Its address, after redirects.
        kind: Its Content-Type, or "".
        content: All of its bytes.
    """

    url: str
    kind: str
    content: bytes

    @property
    def text(self) -> str:
        """The content as UTF-8, whatever encoding the server names; what is no UTF-8 is replaced."""
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        """Return the value that the content stands for (ValueError with what was found where it is no JSON)."""
        try:
            return json.loads(self.content)
        except (ValueError, RecursionError) as error:
            start = self.content[:_SHOWN_BYTES].decode("utf-8", "replace")
            kind = f" of type {self.kind}" if self.kind else ""
            why = "nested too deep" if isinstance(error, RecursionError) else "no JSON"
            raise ValueError(f"{len(self.content)} bytes{kind} that are {why} and begin with {start!r}") from error


def get(
    client: httpx.Client,
    url: str,
    headers: Mapping[str, str],
    what: str,
    options: ResolveOptions,
    *,
    most_bytes: int = MOST_PAGE_BYTES,
    check: Callable[[httpx.Response, str], None] = check_status,
) -> Document:
    """Return a document; failures that may pass are tried again.

    Args:
        client: A client of open_client.
        url, headers: What is asked for.
        what: The work, which begins the messages of errors.
        options: Whose `cancel` ends waiting.
        most_bytes: The most bytes that are read.
        check: Raises an error for a status that is no success, as check_status does.

    Raises:
        PullError, ModelNotFoundError, CancelledError: The document could not be fetched, or is too large.
    """

    def attempt() -> Document:
        with watched(what, options) as extensions:
            try:
                with client.stream("GET", url, headers=headers, extensions=extensions) as response:
                    check(response, what)
                    content = read_content(response, most_bytes, what)
            except httpx.ConnectError as error:
                raise TransientError(f"{_origin(url)} cannot be reached: {error}") from error
        return Document(str(response.url), response.headers.get("Content-Type", ""), content)

    return retry(attempt, what, options)


def read_content(response: httpx.Response, most_bytes: int, what: str) -> bytes:
    """Return the content of a response whose body was not read yet.

    Raises:
        PullError: It has more than `most_bytes`, or is compressed.
    """
    refuse_compressed(response, what)
    content = bytearray()
    for block in response.iter_raw():
        content += block
        if len(content) > most_bytes:
            raise PullError(
                f"{what}: {redact(str(response.url))} sends more than {most_bytes >> 20} MiB, expected a page; check "
                "the address"
            )
    return bytes(content)


@contextmanager
def watched(what: str, options: ResolveOptions) -> Iterator[dict[str, Any]]:
    """Yield the extensions for a request of the block; its connections end after MOST_S, or when it is cancelled.

    The time-outs of httpx are for each single read, so an answer of which a byte comes now and then would never end.

    Raises:
        TransientError: The time is over.
        CancelledError: `options.cancel` was cancelled.
    """
    sockets: list[socket.socket] = []
    is_cut = threading.Event()

    def cut() -> None:
        is_cut.set()
        for each in list(sockets):
            with suppress(OSError):
                socket.socket.shutdown(each, socket.SHUT_RDWR)  # not TLS's own, which is not for two threads

    def trace(event: str, info: Mapping[str, Any]) -> None:
        if event.endswith(_CONNECTED):
            sockets.append(info["return_value"].get_extra_info("socket"))
            if is_cut.is_set():
                cut()

    timer = threading.Timer(MOST_S, cut)
    timer.daemon = True
    timer.start()
    try:
        with nullcontext() if options.cancel is None else options.cancel.calling(cut):
            yield {"trace": trace}
    except httpx.HTTPError as error:
        if is_cut.is_set():
            _raise_cut(what, options, error)
        raise
    finally:
        timer.cancel()
    if is_cut.is_set():  # a body without a length ends as if it were whole
        _raise_cut(what, options)


def _raise_cut(what: str, options: ResolveOptions, error: Exception | None = None) -> None:
    check_cancelled(options.cancel, what)
    raise TransientError(f"the answer did not come within {MOST_S:.0f} s") from error


def _origin(url: str) -> str:
    return redact("/".join(url.split("/", 3)[:3]))
