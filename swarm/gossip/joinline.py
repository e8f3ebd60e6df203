"""The join line: `echo1:` and everything a newcomer has to trust, in one word that can be pasted.

It carries the swarm's id, the learner's public key (one follows from the other: a typing error shows) and addresses,
each with the SHA-256 of the certificate to expect there.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

import msgspec

from swarm.errors import ProtocolError, UserError
from swarm.signing import PublicKeyField, swarm_id_of
from swarm.types import Address, Id
from swarm.wire import Message, decode, digest, encode

PREFIX = "echo1:"

MAX_LINE_BYTES = 2048
"""Eight addresses with names."""

CHECK_BYTES = 4


class JoinLine(Message, frozen=True):
    """Whom to trust and where to begin."""

    swarm: Id
    learner_key: PublicKeyField
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(min_length=1, max_length=8)]


def write_join_line(line: JoinLine) -> str:
    body = encode(line)
    return PREFIX + base64.urlsafe_b64encode(body + digest(body)[:CHECK_BYTES]).decode().rstrip("=")


def read_join_line(text: str) -> JoinLine:
    """The join line in `text`; UserError if it was cut or altered."""
    code = text.strip().removeprefix(PREFIX)
    try:
        data = base64.b64decode(code + "=" * (-len(code) % 4), altchars=b"-_", validate=True)
        body, check = data[:-CHECK_BYTES], data[-CHECK_BYTES:]
        line = decode(body, JoinLine, cap_bytes=MAX_LINE_BYTES)
    except (binascii.Error, ValueError, ProtocolError) as error:
        raise UserError("this join line is damaged: copy the whole line that `lead` printed") from error
    if check != digest(body)[:CHECK_BYTES] or line.swarm != swarm_id_of(line.learner_key):
        raise UserError("this join line is damaged: copy the whole line that `lead` printed")
    return line
