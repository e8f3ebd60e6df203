"""A node's certificate: self-signed, made once, known to others by its SHA-256 alone."""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from swarm.errors import UserError

VALID_FROM = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
VALID_UNTIL = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)
"""The same for all nodes, so that a certificate does not tell when its node was set up. It is pinned, never renewed."""

_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "echo-node")])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """What a server needs to speak TLS, and the fingerprint that it tells others."""

    context: ssl.SSLContext
    fingerprint: bytes


def load_or_create_tls(directory: Path) -> ServerTls:
    """The certificate in `directory`, made at the first start. Only the file's owner can read the key."""
    path = directory / "tls.pem"
    if not path.exists():
        write_privately(path, _new_certificate())
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        # No session tickets: nobody resumes, and they take 500 bytes.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        context.load_cert_chain(path)
    except (ValueError, ssl.SSLError) as error:
        raise UserError(
            f"{path} is not a key and certificate; remove it, and give the new join line to those who name this node"
        ) from error
    der = certificate.public_bytes(serialization.Encoding.DER)
    return ServerTls(context=context, fingerprint=hashlib.sha256(der).digest())


def _new_certificate() -> bytes:
    """PEM of a new ECDSA P-256 key and its own certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_NAME)
        .issuer_name(_NAME)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(VALID_FROM)
        .not_valid_after(VALID_UNTIL)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return secret + certificate.public_bytes(serialization.Encoding.PEM)


def write_privately(path: Path, content: bytes) -> None:
    """Replace a file that only its owner may read. A crash leaves it whole, new or as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
