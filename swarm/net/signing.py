"""Ed25519 identities and sealed messages: a signature covers the exact bytes received, never a re-encoding."""

from __future__ import annotations

from typing import Annotated

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm.errors import ProtocolError
from swarm.types import NodeId, SwarmId
from swarm.wire import Message, decode, digest, encode

ID_BYTES = 16  # Ids are 128 bits of a digest: two nodes never share one by chance, and a status line stays readable

PublicKeyField = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
SignatureField = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


class Sealed(Message, frozen=True):
    """A body and its author's signature over `context` and body."""

    body: bytes
    signature: SignatureField


class SigningKey:
    """A node's private key. `public_bytes` is its public key, and `node_id` is derived from that."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public_bytes = private.public_key().public_bytes_raw()
        self.node_id = node_id_of(self.public_bytes)

    @classmethod
    def generate(cls) -> SigningKey:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_bytes(cls, secret: bytes) -> SigningKey:
        """Return the key with this 32-byte secret."""
        return cls(Ed25519PrivateKey.from_private_bytes(secret))

    def secret_bytes(self) -> bytes:
        return self._private.private_bytes_raw()

    def seal(self, context: str, body: bytes) -> bytes:
        """Return `body` with a signature. Because of `context` a lease can never pass for a head."""
        return encode(Sealed(body=body, signature=self.sign(context, body)))

    def sign(self, context: str, body: bytes) -> bytes:
        """Return only the 64-byte signature, for a reader that has the body already."""
        return self._private.sign(_signed_bytes(context, body))


def unseal(context: str, data: bytes, public_bytes: bytes, *, cap_bytes: int) -> bytes:
    """Return the body of a message that the owner of `public_bytes` sealed. Raise ProtocolError for any other."""
    sealed = decode(data, Sealed, cap_bytes=cap_bytes)
    verify(context, sealed.body, sealed.signature, public_bytes)
    return sealed.body


def verify(context: str, body: bytes, signature: bytes, public_bytes: bytes) -> None:
    """Raise ProtocolError unless the owner of `public_bytes` signed `body` in this context."""
    try:
        Ed25519PublicKey.from_public_bytes(public_bytes).verify(signature, _signed_bytes(context, body))
    except (InvalidSignature, ValueError) as error:
        raise ProtocolError(f"the signature of this {context} is not by the key it should be by") from error


def node_id_of(public_bytes: bytes) -> NodeId:
    """Return a node's id: 128 bits of its public key's digest, in hexadecimal."""
    return NodeId(digest(b"echo-node id" + public_bytes)[:ID_BYTES].hex())


def swarm_id_of(learner_public_bytes: bytes) -> SwarmId:
    """Return a swarm's id, which follows from its learner's key."""
    return SwarmId(digest(b"echo-node swarm" + learner_public_bytes)[:ID_BYTES].hex())


def _signed_bytes(context: str, body: bytes) -> bytes:
    return b"echo-node/" + context.encode() + b"\0" + body
