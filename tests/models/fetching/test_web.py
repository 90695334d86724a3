"""HTTP: which certificates are trusted, when a failure is retried, and for how long."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from edgedec.errors import CancelledError, PullError
from edgedec.load_options import ResolveOptions
from edgedec.progress import CancelToken
from edgedec_models.fetching import documents, web
from edgedec_models.hubs.wheel import find_wheel

TLS_CONTEXT = web.tls_context  # the fixture of all tests replaces it
CERTIFICATES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


@pytest.fixture(autouse=True)
def _no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "tls_context", TLS_CONTEXT)
    for variable in CERTIFICATES:
        monkeypatch.delenv(variable, raising=False)


def test_certificates_are_httpx_defaults_without_variables() -> None:
    """Without a variable httpx's default certificates are used."""
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
    """The error for a missing or invalid file names the variable and the file."""
    path = tmp_path / "my.pem"
    if content:
        path.write_text(content)
    monkeypatch.setenv("PIP_CERT", str(path))
    with pytest.raises(PullError, match=r"PIP_CERT is .*my\.pem, which holds no usable certificates"):
        web.tls_context()


def test_untrusted_server_is_asked_once() -> None:
    """A failed certificate check is not retried, and the error says what to do."""
    n_tries = 0

    def attempt() -> None:
        nonlocal n_tries
        n_tries += 1
        raise httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")

    with pytest.raises(PullError, match="set SSL_CERT_FILE"):
        web.retry(attempt, "pull a", ResolveOptions())
    assert n_tries == 1


def test_waiting_between_tries_can_be_cancelled() -> None:
    """Cancelling ends the wait that a server asked for."""
    cancel = CancelToken()

    def attempt() -> None:
        cancel.cancel()
        raise web.TransientError("busy", wait_s=20.0)

    with pytest.raises(CancelledError):
        web.retry(attempt, "pull a", ResolveOptions(cancel=cancel))


def client_of(answers: dict[str, httpx.Response]) -> httpx.Client:
    """Return our client with these responses by URL in place of a network."""
    client = web.open_client()
    client._transport = httpx.MockTransport(lambda request: answers[str(request.url)])
    return client


@pytest.mark.parametrize(
    ("first", "second", "follows"),
    [
        ("https://a/x", "https://b/y", True),
        ("http://a/x", "http://b/y", True),
        ("http://a/x", "https://b/y", True),
        ("https://a/x", "http://me:secret@b/y", False),
        ("https://a/x", "http://a/x/y", False),
    ],
)
def test_a_redirect_does_not_give_up_encryption(first: str, second: str, follows: bool) -> None:
    """A redirect from https to http is refused; the error has both addresses and no password."""
    answers = {
        first: httpx.Response(302, headers={"Location": second}),
        second: httpx.Response(200, stream=httpx.ByteStream(b"data")),
    }
    with client_of(answers) as client:
        if follows:
            assert documents.get(client, first, {}, "look up a", ResolveOptions()).text == "data"
        else:
            with pytest.raises(PullError, match=r"https://a/x leads from https to http://(a/x|b)/y") as refused:
                documents.get(client, first, {}, "look up a", ResolveOptions())
            assert "secret" not in str(refused.value)


def test_a_page_has_a_bound() -> None:
    """A page that does not end is given up before it fills the memory."""
    n_sent = 0

    class Endless(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            nonlocal n_sent
            while n_sent < 1000:
                n_sent += 1
                yield bytes(1 << 16)

    with (
        client_of({"https://a/x": httpx.Response(200, stream=Endless())}) as client,
        pytest.raises(PullError, match="https://a/x sends more than 1 MiB, expected a page"),
    ):
        documents.get(client, "https://a/x", {}, "look up a", ResolveOptions(), most_bytes=1 << 20)
    assert n_sent == 17


def test_an_index_does_not_lead_to_unchecked_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """An http link of an https index needs a checksum."""
    monkeypatch.setenv("EDGEDEC_PYPI_INDEX", "https://a/simple")

    def found(fragment: str) -> str:
        page = f'<a href="http://b/p-1.0-py3-none-any.whl{fragment}">p-1.0-py3-none-any.whl</a>'
        answer = httpx.Response(200, stream=httpx.ByteStream(page.encode()))
        with client_of({"https://a/simple/p/": answer}) as client:
            return find_wheel(client, "p==1.0", "a", ResolveOptions()).url

    with pytest.raises(PullError, match=r"http://b/p-1\.0-py3-none-any\.whl, which is not encrypted"):
        found("")
    assert found("#sha256=" + "0" * 64) == "http://b/p-1.0-py3-none-any.whl"
