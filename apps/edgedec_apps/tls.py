"""TLS: the certificate of a server, checked before anything is loaded, and what a client trusts."""

import ssl
from pathlib import Path

from edgedec.errors import RequestError, as_storage_error


def server_context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Return what a server speaks TLS with; None where neither file is given.

    Raises:
        RequestError: One file is missing, is not PEM, or the key has a passphrase or is of another certificate.
        StorageError: A file can't be read.
    """
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise RequestError("--tls-cert and --tls-key belong together; give both, or neither")
    for path in (cert, key):
        _require_readable(path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key, password=_refuse_passphrase)
    except _PassphraseError:
        raise RequestError(
            f"the key {key} has a passphrase; give one without, such as openssl pkey -in {key.name} -out FILE writes"
        ) from None
    except ssl.SSLError as error:
        if "KEY_VALUES_MISMATCH" in str(error):
            wrong = f"{key} is not the key of the certificate {cert}; give the two that belong together"
            raise RequestError(wrong) from error
        raise RequestError(
            f"{cert} and {key} are no certificate and key in PEM, or one of them is damaged ({error.reason or error})"
        ) from error
    return context


def client_context(ca: Path | None) -> ssl.SSLContext:
    """Return what a client trusts: the certificates of a file, or the system's for None.

    Raises:
        RequestError: The file holds no certificate in PEM.
        StorageError: The file can't be read.
    """
    if ca is None:
        return ssl.create_default_context()
    _require_readable(ca)
    try:
        return ssl.create_default_context(cafile=ca)
    except ssl.SSLError as error:
        raise RequestError(f"{ca} holds no certificate in PEM") from error


def _require_readable(path: Path) -> None:
    with as_storage_error(f"{path} can't be read"), path.open("rb") as file:
        file.read(1)


class _PassphraseError(Exception):
    pass


def _refuse_passphrase() -> str:
    raise _PassphraseError
