"""Seeder and forwarder of a mesh, call by call. tests/simulation/test_broadcast.py runs whole meshes."""

from __future__ import annotations

import pytest

from swarm.broadcast.mesh import seeder as seeder_module
from swarm.broadcast.mesh.forwarder import Forwarder, Window
from swarm.broadcast.mesh.seeder import Seeder
from swarm.broadcast.notes import Complete, Credit, Have, NoteKind, Send, Want, has_bit, set_bit
from swarm.types import NodeId

SEEDER = NodeId("seeder")
STEP_S = 0.002
A, B = NodeId("a"), NodeId("b")


def forwarder(count: int, *peers: NodeId) -> Forwarder:
    relay = Forwarder(SEEDER, count, leaf=False, now=0.0)
    for peer in peers:
        relay.join(peer, leaf=False, now=0.0)
    return relay


def test_a_peer_that_wants_what_one_lacks_gets_nothing_and_breaks_nothing() -> None:
    relay = forwarder(10, A)
    relay.heard(A, Want(indices=(1, 2, 99)), now=0.0)
    assert relay.next_for(A, now=0.0) is None


def test_fresh_chunks_count_only_from_the_seeder() -> None:
    relay = forwarder(10, A, B)
    relay.arrived(A, 3, NoteKind.FRESH, None, now=0.0)
    assert relay.next_for(B, now=0.0) is None


def test_a_complete_child_is_sent_no_copies() -> None:
    relay = forwarder(10, SEEDER, A, B)
    relay.heard(B, Complete(), now=0.0)
    relay.arrived(SEEDER, 3, NoteKind.FRESH, None, now=0.0)
    assert relay.next_for(B, now=0.0) is None
    assert relay.next_for(A, now=0.0) == Send(3, NoteKind.COPY)


@pytest.mark.parametrize(("children", "slow"), [(4, 1), (7, 3)])
def test_links_that_are_slow_do_not_keep_their_relay_to_their_pace(children: int, slow: int) -> None:
    """A quarter of the others' rate: enough not to be taken for stalled."""
    peers = [NodeId(f"p{i}") for i in range(children)]
    relay = forwarder(4000, SEEDER, *peers)
    credit = index = 0
    for step in range(1, 2001):
        now = step * STEP_S
        while isinstance(note := relay.next_for(SEEDER, now=now), Credit):
            credit += note.copies
        for _ in range(min(credit, 2)):
            relay.arrived(SEEDER, index, NoteKind.FRESH, None, now=now)
            index, credit = index + 1, credit - 1
        for peer in peers:
            for _ in range(2 if peer not in peers[:slow] else step % 2):
                if isinstance(send := relay.next_for(peer, now=now), Send):
                    relay.sent(peer, send, now=now)
        if (due := relay.deadline()) is not None and due <= now:
            relay.tick(now=now)
    # The slow ones take 1,000 copies each, the others could take 4,000.
    assert index > 3000


def granting_seeder(count: int, credits: dict[str, int], *, leaves: frozenset[str] = frozenset()) -> Seeder:
    """With so much credit from each."""
    seeder = Seeder(count, now=0.0)
    for name in credits:
        seeder.join(NodeId(name), leaf=name in leaves, now=0.0)
    for name, copies in credits.items():
        seeder.heard(NodeId(name), Credit(copies=copies, forwards=4, epoch=0, copied=(), forwarded=()), now=0.0)
    return seeder


def dealt_to(seeder: Seeder, name: str, *, now: float) -> list[int]:
    """Take what the link to `name` is to carry: the chunks that it is to relay."""
    found: list[int] = []
    while (send := seeder.next_for(NodeId(name), now=now)) is not None:
        if isinstance(send, Send):
            found += [send.index] if send.kind is NoteKind.FRESH else []
            seeder.sent(NodeId(name), send, now=now)
    return found


def done(*indices: int, copies: int = 0) -> Credit:
    return Credit(copies=copies, forwards=0, epoch=0, copied=indices, forwarded=())


def test_the_last_chunks_go_to_whom_has_the_least_in_hand() -> None:
    """Both took as long over a chunk; one has nineteen in hand now, and the other none."""
    # What the third is to be sent keeps the seeder from relaying itself.
    seeder = granting_seeder(44, {"third": 1, "busy": 20, "idle": 20})
    first, second = dealt_to(seeder, "busy", now=0.0), dealt_to(seeder, "idle", now=0.0)
    assert len(first) == len(second) == 20
    for i in range(20):
        seeder.heard(NodeId("idle"), done(second[i]), now=0.02 * (i + 1))
    seeder.heard(NodeId("busy"), done(first[0], copies=2), now=0.4)
    seeder.heard(NodeId("idle"), done(copies=2), now=0.4)
    assert dealt_to(seeder, "busy", now=0.4) == []
    assert len(dealt_to(seeder, "idle", now=0.4)) == 2


def test_a_leaf_whose_link_is_full_keeps_no_public_waiting() -> None:
    seeder = granting_seeder(100, {"leaf": 50, "other": 0, "public": 10}, leaves=frozenset({"leaf", "other"}))
    assert len(dealt_to(seeder, "public", now=0.0)) > 0, "nobody took what waits for the leaf"


def test_a_window_shrinks_as_the_transfer_ends() -> None:
    window = Window(start=30, least=1, floor=4)
    assert window.grant(0.0, 100.0, 10.0) == 30
    window.out = 0
    assert window.grant(0.0, 100.0, 0.2) == 6
    window.out = 0
    assert window.grant(0.0, 100.0, 0.0) == 1


def test_a_segment_is_dealt_when_all_of_the_one_before_is() -> None:
    """Else both would send chunks to all over links that each holds for idle."""
    peer = NodeId("peer")
    first = Seeder(3, now=0.0)
    second = Seeder(3, now=0.0, after=first)
    for seeder in (first, second):
        seeder.join(peer, leaf=False, now=0.0)
        seeder.heard(peer, Have(bitmap=b"\0"), now=0.0)
        seeder.heard(peer, Credit(copies=1, forwards=0, epoch=0), now=0.0)
    assert isinstance(first.next_for(peer, now=0.0), Send)
    assert second.next_for(peer, now=0.0) is None
    first.heard(peer, Credit(copies=2, forwards=0, epoch=0, copied=(0,)), now=0.1)
    assert second.next_for(peer, now=0.1) == Send(0, NoteKind.FRESH)


def test_after_a_restart_a_chunk_is_passed_over_once_however_often_peers_say_what_they_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, looked_at = 4096, 0

    def counted(bitmap: bytes, index: int) -> bool:
        nonlocal looked_at
        looked_at += 1
        return has_bit(bitmap, index)

    monkeypatch.setattr(seeder_module, "has_bit", counted)
    seeder, honest, noisy = Seeder(count, now=0.0, resumed=True), NodeId("honest"), NodeId("noisy")
    for peer in (honest, noisy):
        seeder.join(peer, leaf=False, now=0.0)
        seeder.heard(peer, Have(bitmap=b""), now=0.0)
    for number in range(count):
        # It names one chunk more each time, and ever the same far beyond.
        held = bytearray(count // 8)
        set_bit(held, number // 2)
        seeder.heard(noisy, Have(bitmap=bytes(held) + b"\xff" * 100), now=0.0)
    assert looked_at < 3 * count
    seeder.heard(honest, Credit(copies=1, forwards=0, epoch=0), now=0.0)
    assert seeder.next_for(honest, now=0.0) == Send(count // 2, NoteKind.FRESH)
    seeder.heard(noisy, Complete(), now=0.0)
    assert not seeder._undealt
    assert looked_at < 4 * count
