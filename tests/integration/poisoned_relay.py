"""A real relay that lies: of all chunks that it passes on it alters one bit. Run as the command line is."""

from __future__ import annotations

from swarm.__main__ import main
from swarm.broadcast.notes import Send
from swarm.broadcast.transfers import Link, Part, Transfer
from swarm.net.stream import Outgoing

_honest = Link._chunk


def _poisoned(link: Link, transfer: Transfer, segment: int, part: Part, send: Send) -> Outgoing:
    out = _honest(link, transfer, segment, part, send)
    altered = bytearray(out.payload)
    altered[len(altered) // 2] ^= 1
    return Outgoing(out.header, memoryview(altered), out.sent)


if __name__ == "__main__":
    Link._chunk = _poisoned  # type: ignore[method-assign, assignment]
    main()
