"""HTTPS: an answer, whole and as a stream; files that are no certificate and key are refused before anything loads."""

import datetime
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.processes.command_line import run_here
from support.processes.running_server import messages, started, wait_until

pytest.importorskip("cryptography", reason="certificates for tests are made by it")

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from edgedec.errors import RequestError, StorageError
from edgedec_apps.cli.server_client import Address, ask
from edgedec_apps.server.core.settings import Settings
from edgedec_apps.server.serving import address_of, open_socket
from edgedec_apps.tls import client_context, server_context

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Certificates:
    """The files of a server's certificate, its key, the key with a passphrase, and the certificate that signed it."""

    cert: Path
    key: Path
    locked_key: Path
    ca: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """A certificate of 127.0.0.1 with its key, and the one that signed it."""
    folder = tmp_path_factory.mktemp("tls")
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name, name = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in ("tests", "server"))
    now = datetime.datetime.now(datetime.UTC)

    def signed(subject: x509.Name, public: ec.EllipticCurvePublicKey, *, is_ca: bool) -> bytes:
        builder = x509.CertificateBuilder(ca_name, subject, public, x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1))
        builder = builder.add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        if is_ca:
            usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(usage, critical=True)
            builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        else:
            address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
            builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
            issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
            builder = builder.add_extension(issuer, critical=False)
        return builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def private(encryption: serialization.KeySerializationEncryption) -> bytes:
        return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)

    contents = {
        "cert.pem": signed(name, key.public_key(), is_ca=False),
        "key.pem": private(serialization.NoEncryption()),
        "locked.pem": private(serialization.BestAvailableEncryption(b"secret")),
        "ca.pem": signed(ca_name, ca_key.public_key(), is_ca=True),
    }
    for file, data in contents.items():
        (folder / file).write_bytes(data)
    return Certificates(*(folder / file for file in contents))


def test_a_server_answers_over_tls(chat_path: Path, files: Certificates) -> None:
    """The same text as over plain HTTP, to a client that trusts the certificate; others are told what to do.

    Connections that say nothing, or no TLS, are closed in time.
    """
    body = {"messages": messages("hi"), "temperature": 0, "max_tokens": 4, "ignore_end": True}
    with started(chat_path) as plain:
        expected = plain.client.post("/v1/chat/completions", json=body).json()["choices"]
    with started(chat_path, tls=server_context(files.cert, files.key), header_timeout_s=0.5) as running:
        url = running.url.replace("http://", "https://")
        with httpx.Client(base_url=url, verify=client_context(files.ca), timeout=60) as client:
            assert client.post("/v1/chat/completions", json=body).json()["choices"] == expected
            with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as reply:
                assert reply.read().decode().endswith("data: [DONE]\n\n")
            assert client.get("/", headers={"origin": url}).status_code == 200
            assert client.get("/", headers={"origin": "https://evil.example"}).status_code == 403
        assert ask("GET", Address(url, ca=files.ca), "/api/ps")["models"]
        with pytest.raises(RequestError, match=r"is not trusted .*--tls-ca FILE"):
            ask("GET", Address(url), "/api/ps")
        with pytest.raises(RequestError, match="no server answers"):
            ask("GET", Address(running.url), "/api/ps")
        with pytest.raises(RequestError, match="--tls-ca is for a server at https"):
            ask("GET", Address(running.url, ca=files.ca), "/api/ps")
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.settimeout(30)
            assert silent.recv(1) == b""
        with (
            socket.create_connection(("127.0.0.1", port)) as inner,
            client_context(files.ca).wrap_socket(inner, server_hostname="127.0.0.1") as half,
        ):
            half.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert half.recv(100).startswith(b"HTTP/1.1 200")
        wait_until(lambda: running.service.n_connections == 0, "a connection stays")


def test_the_address_says_https() -> None:
    """As a browser needs it."""
    with open_socket(Settings(port=0)) as listener:
        assert address_of(listener, tls=True) == f"https://127.0.0.1:{listener.getsockname()[1]}"
        assert address_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_files_that_are_no_certificate_are_refused(files: Certificates, tmp_path: Path) -> None:
    """One without the other, none at all, a key of another certificate or with a passphrase, and what is no PEM."""
    assert server_context(None, None) is None
    assert isinstance(server_context(files.cert, files.key), ssl.SSLContext)
    for pair in ((files.cert, None), (None, files.key)):
        with pytest.raises(RequestError, match="belong together"):
            server_context(*pair)
    with pytest.raises(StorageError, match=r"none can't be read: No such file"):
        server_context(tmp_path / "none", files.key)
    with pytest.raises(RequestError, match="is not the key of the certificate"):
        server_context(files.ca, files.key)
    with pytest.raises(RequestError, match="has a passphrase"):
        server_context(files.cert, files.locked_key)
    rubbish = tmp_path / "rubbish"
    rubbish.write_bytes(b"\0rubbish")
    for cert, key in ((rubbish, files.key), (files.cert, rubbish), (files.key, files.cert)):
        with pytest.raises(RequestError, match="no certificate and key in PEM"):
            server_context(cert, key)
    with pytest.raises(RequestError, match="holds no certificate"):
        client_context(rubbish)


def test_serve_checks_its_files_before_it_loads(files: Certificates, tmp_path: Path) -> None:
    """The command ends with the sentence, although there is no such model."""
    model = tmp_path / "none.gguf"
    run_here("serve", model, "--tls-cert", files.cert).failed(40, "--tls-cert and --tls-key belong together")
    run_here("serve", model, "--tls-cert", files.cert, "--tls-key", files.locked_key).failed(40, "has a passphrase")
