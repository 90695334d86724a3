"""HTTP details: which certificates are trusted, when a failure is tried again, and for how long."""

import ssl
from pathlib import Path

import httpx
import pytest

from edgedec.errors import CancelledError, PullError
from edgedec.progress import CancelToken
from edgedec.resolver import ResolveOptions
from edgedec_models import web

TLS_CONTEXT = web.tls_context  # the fixture of all tests replaces it
CERTIFICATES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


@pytest.fixture(autouse=True)
def _no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "tls_context", TLS_CONTEXT)
    for variable in CERTIFICATES:
        monkeypatch.delenv(variable, raising=False)


def test_certificates_are_httpx_defaults_without_variables() -> None:
    """Without a variable httpx decides."""
    assert web.tls_context() is True


@pytest.mark.parametrize("variable", CERTIFICATES)
def test_certificates_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """A variable may name a folder of certificates."""
    monkeypatch.setenv(variable, str(tmp_path))
    context = web.tls_context()
    assert isinstance(context, ssl.SSLContext)
    assert context.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_unusable_certificates_name_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    """A file that is absent or holds none is an error that names the variable and the file."""
    path = tmp_path / "my.pem"
    if content:
        path.write_text(content)
    monkeypatch.setenv("PIP_CERT", str(path))
    with pytest.raises(PullError, match=r"PIP_CERT is .*my\.pem, which holds no usable certificates"):
        web.tls_context()


def test_untrusted_server_is_asked_once() -> None:
    """A certificate that is not trusted does not get better by trying; the way out is named."""
    n_tries = 0

    def attempt() -> None:
        nonlocal n_tries
        n_tries += 1
        raise httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")

    with pytest.raises(PullError, match="set SSL_CERT_FILE"):
        web.retry(attempt, "pull a", ResolveOptions())
    assert n_tries == 1


def test_waiting_between_tries_can_be_cancelled() -> None:
    """A server that asks for a long wait does not hold up cancelling."""
    cancel = CancelToken()

    def attempt() -> None:
        cancel.cancel()
        raise web.TransientError("busy", wait_s=20.0)

    with pytest.raises(CancelledError):
        web.retry(attempt, "pull a", ResolveOptions(cancel=cancel))
