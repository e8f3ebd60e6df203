"""Chunks over real sockets between cores in one process: proven before they go further, whoever lies or leaves."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.broadcast.frames import FrameType
from swarm.broadcast.mesh.forwarder import Forwarder
from swarm.broadcast.mesh.seeder import Seeder
from swarm.broadcast.notes import Complete, Courier, Have, Note, NoteKind, Want
from swarm.broadcast.store.store import ChunkFile, HeldVersion
from swarm.broadcast.transfers import EARLY_BITMAP_BYTES, MAX_EARLY, MAX_FAULTS, Link, Transfer, Transfers, read_note
from swarm.broadcast.version.manifest import ChunkTable, RegionEntry
from swarm.errors import ProtocolError
from swarm.net.pace import Pace
from swarm.net.stream import Frame, Outgoing, Stream
from swarm.types import NodeId, VersionId
from swarm.wire import digest, encode
from tests.builders import v
from tests.unit.broadcast.version.test_manifest import head_of
from tests.unit.wires import Place, at, pair_of_sockets, until

CHUNK_BYTES = 16_384
COUNT = 40
LAST_BYTES = 1000


def name(number: int) -> NodeId:
    return NodeId(f"{number:032x}")


SEEDER = name(0)


def content_of(version: int) -> bytes:
    return random.Random(version).randbytes((COUNT - 1) * CHUNK_BYTES + LAST_BYTES)


def chunk_of(index: int, version: int = 0) -> bytes:
    return content_of(version)[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


def held_at(path: Path, *, version: int = 0, whole: bool = False) -> HeldVersion:
    content = content_of(version)
    table = ChunkTable(
        regions=(RegionEntry(codec="raw", encoded_bytes=len(content), decoded_digest=digest(content)),),
        cuts=(1,),
        chunk_bytes=CHUNK_BYTES,
        chunk_digests=tuple(digest(chunk_of(i, version)) for i in range(COUNT)),
        tensor_sums=(0,),
    )
    if whole:
        path.write_bytes(content)
    chunks = ChunkFile(path, table)
    return HeldVersion(head=head_of(version=v(version)), sealed_head=b"", table=table, table_bytes=b"", chunks=chunks)


class Party:
    """An honest node."""

    def __init__(self, directory: Path, number: int) -> None:
        self.node = name(number)
        self.path = directory / f"{number}.chunks"
        self.left: list[NodeId] = []
        self.completed: list[VersionId] = []
        self.transfers = Transfers(
            is_leaf=lambda node: False,
            on_frame=self._refuse,
            on_link=lambda node, up: None,
            on_complete=lambda transfer: self.completed.append(transfer.held.version),
            on_fault=self._leave,
        )

    def open(self, *, version: int = 0, seeder: bool = False) -> Transfer:
        held = held_at(self.path.with_suffix(f".{version}"), version=version, whole=seeder)
        now = time.monotonic()
        courier: Courier = Seeder(COUNT, now=now) if seeder else Forwarder(SEEDER, COUNT, leaf=False, now=now)
        return self.transfers.open(held, lambda count, have: courier)

    def linked(self, node: NodeId, stream: Stream) -> None:
        stream.start(self.transfers.open_link(node, stream))

    def close(self) -> None:
        for link in list(self.transfers.links.values()):
            link.stream.close()
        for version in list(self.transfers.active):
            self.transfers.close(version)

    def _leave(self, node: NodeId) -> None:
        self.left.append(node)
        self.transfers.links[node].stream.close()

    @staticmethod
    def _refuse(node: NodeId, frame: Frame, payload: bytes) -> None:
        raise ProtocolError("nobody announces here")


class Stranger(Place):
    """The other end of a party's link, which says what a test wants it to say."""

    def says(self, note: Note, *, version: int = 0) -> None:
        body = encode(note)
        self.give(Outgoing(Frame(FrameType.NOTE, len(body), v(version)).pack(), body))

    def sends(self, index: int, payload: bytes, *, version: int = 0, kind: int = NoteKind.FRESH) -> None:
        self.give(chunk_frame(index, payload, version=version, kind=kind))

    def chunks(self) -> list[tuple[int, bytes]]:
        return [(frame.index, payload) for frame, payload in self.came if frame.type == FrameType.CHUNK]

    def notes(self) -> list[Note]:
        return [read_note(memoryview(payload)) for frame, payload in self.came if frame.type == FrameType.NOTE]


def chunk_frame(index: int, payload: bytes, *, version: int = 0, kind: int = NoteKind.FRESH) -> Outgoing:
    return Outgoing(Frame(FrameType.CHUNK, len(payload), v(version), kind, index).pack(), payload, lambda: None)


def stream_over(sock: object) -> Stream:
    return Stream(sock, upload=Pace(None), download=Pace(None))  # type: ignore[arg-type]


def stranger_at(party: Party, number: int, *, joins: bool = True) -> Stranger:
    here, there = pair_of_sockets()
    party.linked(name(number), stream_over(here))
    stranger = Stranger()
    at(there, stranger)
    if joins:
        stranger.says(Have(bitmap=b""))
    return stranger


def link(one: Party, two: Party) -> None:
    here, there = pair_of_sockets()
    one.linked(two.node, stream_over(here))
    two.linked(one.node, stream_over(there))


Parties = Callable[..., list[Party]]


@pytest.fixture
async def parties(tmp_path: Path) -> AsyncIterator[Parties]:
    made: list[Party] = []

    def make(count: int, *, linked: bool = True) -> list[Party]:
        found = [Party(tmp_path, number) for number in range(count)]
        made.extend(found)
        for one, two in itertools.combinations(found if linked else [], 2):
            link(two, one)
        return found

    yield make
    for party in made:
        party.close()


@pytest.fixture
async def relay(parties: Parties) -> Party:
    """One receiver, whose seeder and peers are strangers."""
    _, party = parties(2, linked=False)
    party.open()
    return party


def held_by(party: Party) -> dict[int, bytes]:
    chunks = party.transfers.active[v(0)].held.chunks
    return {i: bytes(chunks.chunk(i)) for i in range(COUNT) if chunks.has(i)}


def begun(party: Party, node: NodeId) -> bool:
    """Whether part of a chunk has come over the link to `node`."""
    return len(party.transfers.links[node]._scratch) > 0


# -- delivery ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("receivers", [1, 2, 5])
async def test_everybody_gets_every_bit(parties: Parties, receivers: int) -> None:
    everybody = parties(receivers + 1)
    for number, party in enumerate(everybody):
        party.open(seeder=number == 0)
    await until(lambda: all(party.completed for party in everybody[1:]))
    for party in everybody:
        assert b"".join(held_by(party).values()) == content_of(0)
        assert party.left == []
        assert party.transfers.rejected == {}


# -- lies ----------------------------------------------------------------------------------------------------


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("index", "payload", "kind", "reason"),
    [
        (3, flipped(chunk_of(3)), NoteKind.FRESH, "digest"),
        (3, chunk_of(4), NoteKind.FRESH, "digest"),
        (3, chunk_of(3)[:-1], NoteKind.FRESH, "shape"),
        (3, chunk_of(3) + b"x", NoteKind.FRESH, "shape"),
        (COUNT - 1, chunk_of(3), NoteKind.FRESH, "shape"),
        (COUNT, chunk_of(3), NoteKind.FRESH, "shape"),
        (2**32 - 1, chunk_of(3), NoteKind.FRESH, "shape"),
        (3, chunk_of(3), 9, "shape"),
    ],
    ids=["bit", "swapped", "short", "long", "last", "beyond", "far-beyond", "a kind that does not exist"],
)
async def test_a_wrong_chunk_goes_no_further_and_counts_against_its_sender(
    relay: Party, index: int, payload: bytes, kind: int, reason: str
) -> None:
    liar, child = stranger_at(relay, 0), stranger_at(relay, 7)
    liar.sends(index, payload, kind=kind)
    await until(lambda: relay.transfers.rejected)
    assert relay.transfers.rejected == {reason: 1}
    assert relay.transfers.links[SEEDER].faults == 1
    assert held_by(relay) == {}
    liar.sends(3, chunk_of(3))
    await until(child.chunks)
    assert child.chunks() == [(3, chunk_of(3))]
    assert held_by(relay) == {3: chunk_of(3)}
    assert relay.left == []


async def test_who_lies_again_and_again_is_left(relay: Party) -> None:
    liar, honest = stranger_at(relay, 7), stranger_at(relay, 0)
    for index in range(MAX_FAULTS + 2):
        liar.sends(index, flipped(chunk_of(index)))
    await until(lambda: liar.ends)
    assert relay.left == [name(7)]
    assert relay.transfers.rejected == {"digest": MAX_FAULTS}
    assert relay.transfers.links[SEEDER].faults == 0
    assert relay.transfers.links.keys() == {SEEDER}
    honest.sends(0, chunk_of(0))
    await until(lambda: held_by(relay) == {0: chunk_of(0)})


# -- the same chunk twice ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rest", ["true", "other"])
async def test_of_two_links_with_one_chunk_the_slower_one_writes_nothing_more(relay: Party, rest: str) -> None:
    slow_here, slow = pair_of_sockets()
    relay.linked(name(7), stream_over(slow_here))
    body = encode(Have(bitmap=b""))
    frame = chunk_frame(5, chunk_of(5), kind=NoteKind.COPY)
    slow.send(Frame(FrameType.NOTE, len(body), v(0)).pack() + body + frame.header + chunk_of(5)[:6000])
    transfer = relay.transfers.active[v(0)]
    await until(lambda: begun(relay, name(7)))
    fast = stranger_at(relay, 0)
    fast.sends(5, chunk_of(5))
    await until(lambda: transfer.held.chunks.has(5))
    slow.send(chunk_of(5)[6000:] if rest == "true" else bytes(CHUNK_BYTES - 6000))
    slow.send(chunk_frame(6, chunk_of(6), kind=NoteKind.COPY).header + chunk_of(6))
    await until(lambda: transfer.held.chunks.has(6))
    assert held_by(relay) == {5: chunk_of(5), 6: chunk_of(6)}
    assert relay.transfers.rejected == {}
    slow.close()


async def test_a_chunk_that_was_forgotten_before_it_was_sent_is_skipped(relay: Party) -> None:
    seeder, child = stranger_at(relay, 0), stranger_at(relay, 7)
    seeder.sends(5, chunk_of(5), kind=NoteKind.COPY)
    seeder.sends(6, chunk_of(6), kind=NoteKind.COPY)
    await until(lambda: held_by(relay) == {5: chunk_of(5), 6: chunk_of(6)})
    with relay.path.with_suffix(".0").open("r+b") as disk:
        disk.seek(5 * CHUNK_BYTES)
        disk.write(bytes(100))
    assert relay.transfers.active[v(0)].held.chunks.recheck() == 1
    child.says(Want(indices=(5, 6)))
    await until(child.chunks)
    assert child.chunks() == [(6, chunk_of(6))]


async def test_a_chunk_whose_sender_left_in_the_middle_comes_from_another(relay: Party) -> None:
    gone_here, gone = pair_of_sockets()
    relay.linked(name(7), stream_over(gone_here))
    gone.send(chunk_frame(5, chunk_of(5)).header + bytes(6000))
    await until(lambda: begun(relay, name(7)))
    gone.close()
    await until(lambda: name(7) not in relay.transfers.links)
    stranger_at(relay, 0).sends(5, chunk_of(5))
    await until(lambda: held_by(relay) == {5: chunk_of(5)})


async def test_a_chunk_that_is_here_already_is_still_relayed_if_it_is_fresh(relay: Party) -> None:
    seeder, child = stranger_at(relay, 0), stranger_at(relay, 7)
    other = stranger_at(relay, 8)
    other.sends(5, chunk_of(5), kind=NoteKind.COPY)
    await until(lambda: held_by(relay) == {5: chunk_of(5)})
    seeder.sends(5, chunk_of(5))
    await until(child.chunks)
    assert child.chunks() == [(5, chunk_of(5))]
    assert other.chunks() == []


# -- versions that are not here ------------------------------------------------------------------------------


async def test_a_version_that_is_dropped_in_the_middle_of_a_chunk_is_touched_no_more(relay: Party) -> None:
    here, there = pair_of_sockets()
    relay.linked(SEEDER, stream_over(here))
    there.send(chunk_frame(5, chunk_of(5)).header + chunk_of(5)[:6000])
    await until(lambda: begun(relay, SEEDER))
    relay.transfers.close(v(0))
    before = relay.path.with_suffix(".0").read_bytes()
    body = encode(Have(bitmap=b"\1"))
    there.send(chunk_of(5)[6000:] + Frame(FrameType.NOTE, len(body), v(1)).pack() + body)
    await until(lambda: relay.transfers.links[SEEDER]._early)
    assert relay.path.with_suffix(".0").read_bytes() == before
    assert relay.transfers.rejected == {}
    assert relay.transfers.links.keys() == {SEEDER}
    there.close()


async def test_all_who_opened_a_version_first_take_part(relay: Party) -> None:
    crowd = [stranger_at(relay, 100 + number, joins=False) for number in range(100)]
    for peer in crowd:
        peer.says(Complete(), version=1)
    links = relay.transfers.links
    await until(lambda: all(link._early for link in links.values()))
    transfer = relay.open(version=1)
    assert transfer.parts[0].joined == {name(100 + number) for number in range(100)}
    assert not any(link._early for link in links.values())


async def test_what_is_remembered_of_versions_to_come_is_bounded(relay: Party) -> None:
    peer, liar = stranger_at(relay, 7), stranger_at(relay, 8)
    peer.says(Have(bitmap=b"\1"), version=1)
    for version in range(1, 3 * MAX_EARLY):
        liar.says(Have(bitmap=bytes(2 * EARLY_BITMAP_BYTES)), version=version)
    remembered = relay.transfers.links[name(8)]._early
    await until(lambda: (v(3 * MAX_EARLY - 1), 0) in remembered)
    assert sorted(remembered) == [(v(n), 0) for n in range(2 * MAX_EARLY, 3 * MAX_EARLY)]
    assert set(remembered.values()) == {Have(bitmap=bytes(EARLY_BITMAP_BYTES))}
    assert relay.open(version=1).parts[0].joined == {name(7)}


# -- other frames --------------------------------------------------------------------------------------------


NOTES = [b"", b"\xc1", b"\xff" * 100, encode((99,)), b"\x92" * 5000]


@pytest.mark.parametrize(
    ("type_", "payload"),
    [*((FrameType.NOTE, note) for note in NOTES), (1, b""), (99, b""), (99, b"x"), (FrameType.HEAD, bytes(1025))],
)
async def test_a_frame_that_is_none_ends_its_link_and_no_other(relay: Party, type_: int, payload: bytes) -> None:
    other, peer = stranger_at(relay, 0), stranger_at(relay, 7)
    peer.give(Outgoing(Frame(type_, len(payload), v(0)).pack(), payload))
    await until(lambda: peer.ends)
    assert relay.transfers.links.keys() == {SEEDER}
    other.sends(1, chunk_of(1))
    await until(lambda: held_by(relay) == {1: chunk_of(1)})


def test_a_link_s_rate_is_a_mean_over_some_versions() -> None:
    stream: Any = SimpleNamespace(sent_bytes=0)
    owner: Any = None
    link = Link(owner, name(1), stream)
    for second in range(100):
        # A version goes out in one second of five.
        stream.sent_bytes += 5_000 if second % 5 == 0 else 0
        link.measure(1.0)
    assert 500 < link.bytes_per_s < 1_500
    for _ in range(50):
        link.measure(1.0)
    assert link.bytes_per_s < 10
