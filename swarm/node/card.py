"""What a run says of itself to those who may join it: signed by its learner, passed on by everybody's hello."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from swarm.errors import ProtocolError
from swarm.net.signing import SigningKey, unseal
from swarm.types import Count, Nickname, quoted
from swarm.wire import Message, decode, encode

CARD_CONTEXT = "card"  # Context of its signature, so that it cannot pass for anything else
CARD_BYTES = 768  # Longest names in four bytes a character, the signature and the key
Name = Annotated[str, msgspec.Meta(max_length=64)]


class Card(Message, frozen=True):
    """The model, what it learns, who leads, the size of its weights (0 while the learner has not loaded them), and how
    long a sample with its prompt may be; 0 if it may be as long as the model can read."""

    model: Name
    task: Name
    led_by: Nickname = ""
    weights_bytes: Count = 0
    sample_tokens: Count = 0


def sign_card(card: Card, key: SigningKey) -> bytes:
    """Return a sealed card."""
    return key.seal(CARD_CONTEXT, encode(card))


def card_of(model: str, task: str, led_by: str, *, weights_bytes: int = 0, sample_tokens: int = 0) -> Card:
    """Return what is told of a run: of paths on this machine only the last part."""
    kind, colon, rest = task.partition(":")
    told = f"{kind}{colon}{_without_directory(rest)}"
    return Card(
        model=_without_directory(model)[:64],
        task=told[:64],
        led_by=led_by,
        weights_bytes=weights_bytes,
        sample_tokens=sample_tokens,
    )


def _without_directory(name: str) -> str:
    # Unlike Path.exists it bears names that no file can have.
    is_path = name.startswith(("/", ".", "~")) or os.path.exists(name)
    return Path(name).name if is_path else name


def open_card(sealed: bytes, learner_key: bytes) -> Card | None:
    """Return the card in `sealed`, or None if there is none that the owner of `learner_key` signed."""
    try:
        return decode(unseal(CARD_CONTEXT, sealed, learner_key, cap_bytes=CARD_BYTES), Card, cap_bytes=CARD_BYTES)
    except ProtocolError:
        return None


def purpose(card: Card) -> str:
    by = f", led by {quoted(card.led_by)}" if card.led_by else ""
    return f"this swarm trains {quoted(card.model)} on the task {quoted(card.task)}{by}"


def card_lines(card: Card, *, draws: bool, has_base: bool) -> Iterator[str]:
    """Yield what a volunteer is told before anything is fetched. `draws`: an engine will hold the weights too."""
    # The codec imports numpy, which nobody needs who only says hello.
    from swarm.broadcast.version.codec import FULL_RATIO

    yield purpose(card)
    if card.weights_bytes:
        total = card.weights_bytes
        first = "only what differs from --base" if has_base else f"about {size(FULL_RATIO * total)}"
        beside = ", beside the engine's own" if draws else ""
        yield (
            f"to download: {first} at first, then what each version changes; wanted: {size(total)} of memory for the "
            f"weights{beside}, and up to {size((1 + FULL_RATIO) * total)} of disk"
        )
    pause = "; to have this machine back for a while: echo-node pause" if draws else ""
    yield f"to stop: Ctrl-C; what cannot be finished is handed back{pause}"


def size(nbytes: float) -> str:
    """Return a size in words, rounded up: what is asked for suffices."""
    unit, name = (1e8, "GB") if nbytes >= 1e8 else (1e5, "MB")
    return f"{-(-nbytes // unit) / 10:.1f} {name}"
