"""Certificates for tests of TLS: one that signs, and one of this machine that it signed."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Certificates:
    """The files of a server's certificate, its key, the key with a passphrase, and the certificate that signed it."""

    cert: Path
    key: Path
    locked_key: Path
    ca: Path


def make_certificates(folder: Path) -> Certificates:
    """Write certificates for 127.0.0.1 into a folder and return where they are."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

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
