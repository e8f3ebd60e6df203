"""A node's key, certificate and state directory on disk. The certificate is self-signed and made once. Others recognise
it by its SHA-256 only."""

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

from swarm.broadcast.store.place import claim
from swarm.errors import UserError
from swarm.files import write_atomically
from swarm.net.signing import SigningKey

SECRETS = ("node.key", "tls.pem")  # Files that no other process has to read
MAX_DEFAULT_STATES = 64  # Nodes of one role, user and machine that share the default directories
MAX_GENERATION = 65_535  # Starts of one identity: enough for 179 years of daily starts, and a record stays short
VALID_FROM = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
VALID_UNTIL = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)
"""The same for all nodes, so that a certificate does not reveal when its node was set up. A certificate is pinned and
never renewed."""

_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "echo-node")])


def load_or_create_key(directory: Path) -> SigningKey:
    """Return the Ed25519 key in `directory`. It is made at the first start, and only its owner can read it."""
    path = directory / "node.key"
    if path.exists():
        secret = path.read_bytes()
        if len(secret) != 32:
            raise UserError(f"{path} is not a node key; remove it to get a new identity")
        return SigningKey.from_bytes(secret)
    if (directory / "generation").exists():
        raise UserError(
            f"{path} is gone, by which others know this node: put it back, or remove {directory / 'generation'} to "
            "have a new identity (a learner's samplers then need its new join line)"
        )
    key = SigningKey.generate()
    write_privately(path, key.secret_bytes())
    return key


def next_generation(directory: Path) -> int:
    """Count a start of the identity in `directory`, and return its new generation: 1, 2, 3 and so on."""
    return raise_generation(directory, _generation(directory) + 1)


def raise_generation(directory: Path, least: int) -> int:
    """Raise the generation to `least` if it is lower, and return it: others may remember one that our disk lost."""
    generation = max(_generation(directory), least)
    if generation > MAX_GENERATION:
        raise UserError(f"{directory} was started {MAX_GENERATION} times: remove node.key and generation in it")
    write_privately(directory / "generation", f"{generation}\n".encode())
    return generation


def _generation(directory: Path) -> int:
    path = directory / "generation"
    if not path.exists():
        return 0
    text = path.read_bytes().strip()
    if not text.isdigit() or len(text) > len(str(MAX_GENERATION)):
        raise UserError(f"{path} is not a number of starts; remove it together with node.key to get a new identity")
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """What a server needs to speak TLS, and the fingerprint of its certificate."""

    context: ssl.SSLContext
    fingerprint: bytes


def load_or_create_tls(directory: Path) -> ServerTls:
    """Return the certificate in `directory`. It is made at the first start, and only its owner can read the key."""
    path = directory / "tls.pem"
    if not path.exists():
        write_privately(path, _new_certificate())
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        # No session tickets: they take 500 bytes, and no node resumes a TLS session.
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
    """Return the PEM of a new ECDSA P-256 key and its self-signed certificate."""
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
    """Replace a file that only its owner may read, and wait until the disk has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content, mode=0o600, durable=True)


def default_states() -> Path:
    """Return the directory of this user's default state directories."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "echo-node"


class StateDirectory:
    """A node's directory. It is locked while the node lives, because two nodes must not share a key."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def claim(cls, wanted: Path | None, role: str = "sampler") -> StateDirectory:
        """Lock `wanted`, or if it is None the first free default directory of this user for `role`."""
        if wanted is not None:
            if (lock := _try_lock(wanted)) is None:
                raise UserError(f"another node uses {wanted}: stop it or pass another --state-dir")
            return cls(wanted, lock)
        root = default_states()
        for number in range(MAX_DEFAULT_STATES):
            path = root / f"{role}-{number}"
            if (lock := _try_lock(path)) is not None:
                return cls(path, lock)
        raise UserError(f"{MAX_DEFAULT_STATES} nodes already run from {root}: pass --state-dir")

    def release(self) -> None:
        os.close(self._lock)


def _try_lock(directory: Path) -> int | None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return claim(directory)
    except OSError as error:
        raise UserError(f"cannot use the state directory {directory}: {error.strerror}") from error
