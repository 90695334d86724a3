"""HTTP for all sources: a client with its certificates, which failures to retry, and what refusals mean."""

import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx

from edgedec.errors import EdgedecError, ModelNotFoundError, PullError
from edgedec.load_options import ResolveOptions
from edgedec.progress import check_cancelled
from edgedec_models.addresses import redact

N_TRIES = 4  # attempts in a row without progress
PROGRESS_BYTES = 1 << 20  # less is no progress; otherwise a server that sends a byte per attempt would never end
SLOW_S = 60.0
SLOW_BYTES = 1 << 16  # must come in SLOW_S; a modem brings five times as many
BACKOFF_S = 0.5  # wait before the second attempt; doubled before each further one
LONGEST_WAIT_S = 30.0
TIMEOUT = httpx.Timeout(30.0, connect=10.0)

T = TypeVar("T")

_CERTIFICATES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_WORTH_ANOTHER_TRY = {408, 425, 429, 500, 502, 503, 504}


class TransientError(Exception):
    """A failure that may be gone at the next attempt; `wait_s` is how long the server asked us to wait."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        """Keep the message and the wait in seconds."""
        super().__init__(message)
        self.wait_s = wait_s


def open_client() -> httpx.Client:
    """Return a client that follows redirects and trusts the certificates that a variable such as SSL_CERT_FILE names.

    The client raises PullError for a redirect from https to http. Each request has a connection of its own, which
    edgedec_models.fetching.documents.watched can end.

    Raises:
        PullError: The certificates cannot be used.
    """
    headers = {"User-Agent": "edgedec", "Accept-Encoding": "identity", "Connection": "close"}
    hooks = {"response": [_refuse_downgrade]}
    return httpx.Client(
        verify=tls_context(), headers=headers, timeout=TIMEOUT, follow_redirects=True, event_hooks=hooks
    )


def _refuse_downgrade(response: httpx.Response) -> None:
    """Raise PullError for a redirect from https to http, where anybody on the way could change the file."""
    if not response.has_redirect_location or response.request.url.scheme != "https":
        return
    target = response.request.url.join(response.headers["Location"])
    if target.scheme == "http":
        raise PullError(
            f"{redact(str(response.request.url))} leads from https to {redact(str(target))}, which is not encrypted; "
            f"if you trust the network, give that address yourself, with #sha256=... to have the file verified"
        )


class Pace:
    """Ends a connection over which almost nothing comes."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._n_bytes = 0

    def got(self, n_bytes: int) -> None:
        """Count received bytes; raise TransientError where the last SLOW_S seconds brought fewer than SLOW_BYTES."""
        self._n_bytes += n_bytes
        now_s = time.monotonic()
        if now_s - self._since_s < SLOW_S:
            return
        if self._n_bytes < SLOW_BYTES:
            raise TransientError(f"only {self._n_bytes:,} bytes came in {now_s - self._since_s:.0f} s")
        self._since_s, self._n_bytes = now_s, 0


def retry(attempt: Callable[[], T], what: str, options: ResolveOptions, n_done: Callable[[], int] = lambda: 0) -> T:
    """Return attempt(); after a transient failure call it again.

    Progress resets the count of failures. Progress means that n_done(), in bytes, is PROGRESS_BYTES above its highest
    value so far; so the file's size bounds the number of attempts.

    Raises:
        PullError: N_TRIES attempts failed in a row, or one failed for good.
    """
    furthest, n_failed = n_done(), 0
    while True:
        try:
            return attempt()
        except (TransientError, httpx.HTTPError, httpx.InvalidURL) as error:
            if not _is_transient(error):
                raise PullError(f"{what}: {_reason(error)}") from error
            if n_done() >= furthest + PROGRESS_BYTES:
                furthest, n_failed = n_done(), 0
            n_failed += 1
            if n_failed >= N_TRIES:
                note = ". What was fetched stays for resuming" if n_done() else ""
                raise PullError(
                    f"{what}: {_reason(error)} (tried {N_TRIES} times); check the connection and run it again{note}"
                ) from error
            wait_s = max(BACKOFF_S * 2 ** (n_failed - 1), getattr(error, "wait_s", 0.0))
        _pause(min(wait_s, LONGEST_WAIT_S), what, options)


def check_status(response: httpx.Response, what: str, advice: str = "") -> None:
    """Raise an error if the status of a response is no success, and as refuse_compressed.

    Args:
        advice: What to do when access is refused, for the message.

    Raises:
        TransientError: The failure may pass.
        ModelNotFoundError: The server has no such file.
        PullError: The server refuses.
    """
    status = response.status_code
    if response.is_success:
        refuse_compressed(response, what)
        return
    message = f"{what}: {redact(str(response.url))} answers {status} {response.reason_phrase}".rstrip()
    if status in _WORTH_ANOTHER_TRY:
        raise TransientError(message, _retry_after_s(response))
    raise refusal(status, message, advice)


def refuse_compressed(response: httpx.Response, what: str) -> None:
    """Raise PullError where an answer is compressed, so that a few bytes might become very many."""
    coding = response.headers.get("Content-Encoding", "identity")
    if coding != "identity":
        raise PullError(
            f"{what}: {redact(str(response.url))} sends its answer compressed ({coding:.20}), though it was asked for "
            "it as it is; try another address"
        )


def refusal(status: int, message: str, advice: str) -> EdgedecError:
    """Return the error to raise for an HTTP status that refuses; it says what to do."""
    if status in (401, 403):
        return PullError(
            f"{message}: access is refused; {advice or 'check whether the address needs a user name and a password'}"
        )
    if status in (404, 410):
        return ModelNotFoundError(f"{message}: the server has no such file; check the spelling")
    return PullError(message)


def tls_context() -> ssl.SSLContext | bool:
    """Return the certificates to trust: those that a variable of _CERTIFICATES names, else True, httpx's default.

    Raises:
        PullError: The file or folder that the variable names cannot be used.
    """
    for variable in _CERTIFICATES:
        value = os.environ.get(variable)
        if not value:
            continue
        path = Path(value)
        try:
            return ssl.create_default_context(
                cafile=None if path.is_dir() else value, capath=value if path.is_dir() else None
            )
        except OSError as error:
            raise PullError(
                f"{variable} is {value}, which holds no usable certificates: {error}; correct the variable"
            ) from error
    return True


def _is_transient(error: Exception) -> bool:
    if isinstance(error, httpx.UnsupportedProtocol) or "CERTIFICATE_VERIFY_FAILED" in str(error):
        return False
    return isinstance(error, TransientError | httpx.TransportError)


def _reason(error: Exception) -> str:
    message = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in message:
        return f"{message}; behind a proxy of your own, set SSL_CERT_FILE to its certificate"
    return message


def _retry_after_s(response: httpx.Response) -> float:
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0


def _pause(wait_s: float, what: str, options: ResolveOptions) -> None:
    end = time.monotonic() + wait_s
    while (rest_s := end - time.monotonic()) > 0:
        check_cancelled(options.cancel, what)
        time.sleep(min(rest_s, 0.1))
