"""What a receiver keeps of what others send it, whom it is linked with, and what the learner tells it."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from swarm.broadcast.announcing import EARLY_BYTES, ENTRY_BYTES, PART_BYTES, EarlyParts, parts_of
from swarm.broadcast.coding import in_thread
from swarm.broadcast.forest.planner import MESH_PEERS, PeerProfile, Planning, VersionPlan
from swarm.broadcast.frames import CAPS, FrameType
from swarm.broadcast.mesh.forwarder import Forwarder
from swarm.broadcast.notes import ADDRESSES, MAX_MEMBERS, Member, NoteKind, Roster, Routing
from swarm.broadcast.receiver import catchup, neighbours
from swarm.broadcast.receiver.catchup import CatchUp, Download, Piece
from swarm.broadcast.receiver.receiver import Receiver
from swarm.broadcast.service import BroadcastService
from swarm.broadcast.store.base_model import BaseModel
from swarm.broadcast.store.store import HeldVersion, SignedVersion
from swarm.broadcast.store.weight_map import WeightMap, open_weights
from swarm.broadcast.version.manifest import TABLE_BYTES
from swarm.errors import PeerUnreachable, ProtocolError
from swarm.net.client import HttpPeer, PeerClient, Progress
from swarm.net.hosts import is_dialable
from swarm.net.links import NO_VERSION
from swarm.net.pace import Pace
from swarm.net.stream import Frame, Stream
from swarm.types import Address, NodeId, VersionId
from swarm.wire import decode, encode
from tests.builders import ALICE, BOB, KEY, MIXED_LAYOUT, OTHER_KEY, v
from tests.publishers import Publisher, hand_over, receiver_store
from tests.simulator.broadcast.schemes import planner_named
from tests.unit.broadcast.store.test_base_model import save
from tests.unit.net.test_links import station_of
from tests.unit.net.test_stream import VirtualLoop
from tests.unit.wires import PATIENCE_S, many_turns, pair_of_sockets, until

T = TypeVar("T")


def test_a_part_of_the_largest_table_fits_into_its_frame() -> None:
    assert max(span.nbytes for span in parts_of(TABLE_BYTES)) == PART_BYTES == CAPS[FrameType.TABLE]


def test_a_part_that_overtook_its_head_is_handed_out_once() -> None:
    early = EarlyParts()
    for version, index, part, sender in ((2, 1, b"b", BOB), (1, 0, b"old", ALICE), (3, 0, b"new", ALICE)):
        early.put(v(version), index, part, sender)
    assert early.take(v(2)) == [(1, b"b", BOB)]
    assert early.take(v(2)) == early.take(v(1)) == []
    assert early.take(v(3)) == [(0, b"new", ALICE)]


@pytest.mark.parametrize("nbytes", [PART_BYTES, 0], ids=["largest", "empty"])
def test_a_flood_of_invented_parts_drives_out_itself_alone(nbytes: int) -> None:
    early = EarlyParts()
    for index in range(4):
        early.put(v(7), index, b"\0", BOB)
    for number in range(3 * EARLY_BYTES // (nbytes + ENTRY_BYTES)):
        early.put(v(2**40 + number), 0, bytes(nbytes), ALICE)
        assert len(early._sent[ALICE]) * (nbytes + ENTRY_BYTES) <= EARLY_BYTES
    assert [index for index, _, _ in early.take(v(7))] == [0, 1, 2, 3]


def swarm_of(count: int, *, publics: int) -> tuple[dict[NodeId, PeerProfile], dict[NodeId, Member]]:
    """A swarm whose ids and addresses are as long as they may be."""
    addresses = tuple(Address(host="h" * 253, port=65_535, fingerprint=bytes(32)) for _ in range(ADDRESSES))
    nodes = [NodeId(f"{number:064x}") for number in range(count)]
    profiles = {
        node: PeerProfile(node=node, public=number < publics, uplink_bytes_per_s=1e9 if number < publics else 1e5)
        for number, node in enumerate(nodes)
    }
    return profiles, {
        node: Member(node=node, addresses=addresses if number < publics else ()) for number, node in enumerate(nodes)
    }


@pytest.mark.parametrize("scheme", [None, "mesh", "star"])
@pytest.mark.parametrize("planned", [False, True])
def test_no_roster_is_larger_than_receivers_take(scheme: str | None, planned: bool) -> None:
    """One public with a fast uplink would be everybody's parent; whatever is left out is left out on both sides."""
    publics = 1 if scheme is None else 600
    profiles, members = swarm_of(600, publics=publics)
    planning = Planning(NodeId("learner"), planner_named(scheme))
    if planned:
        planning.begin(profiles, 1e6, 10**8, 10**6, now=0.0)
    rosters = planning.rosters(members)
    assert planned or publics == 1 or {len(roster.members) for roster in rosters.values()} == {1}, (
        "no links without one"
    )
    for node, roster in rosters.items():
        assert decode(encode(roster), Roster, cap_bytes=CAPS[FrameType.ROSTER]) == roster
        assert members[node] in roster.members
        assert all(members[node] in rosters[NodeId(other.node)].members for other in roster.members)
        if planned and planning.plan is not None:
            decode(encode(planning.plan.routes_of(node)), Routing, cap_bytes=CAPS[FrameType.ROUTES])


def test_routes_of_a_node_with_as_many_children_as_can_be_fit_into_their_frame() -> None:
    profiles, _ = swarm_of(2 * MAX_MEMBERS + 1, publics=2 * MAX_MEMBERS + 1)
    hub, *others = profiles
    learner = PeerProfile(node=NodeId("learner"), public=True, uplink_bytes_per_s=1e6)
    tree = {hub: learner.node, **dict.fromkeys(others, hub)}
    plan = VersionPlan(scheme="forest", chunk_bytes=1 << 16, learner=learner, peers=profiles, trees=(tree,) * 16)
    routing = decode(encode(plan.routes_of(hub)), Routing, cap_bytes=CAPS[FrameType.ROUTES])
    assert {len(row) for row in routing.children} == {MAX_MEMBERS}


# -- whom a node asks -----------------------------------------------------------------------------------------


async def ask(peer: HttpPeer, progress: Progress) -> bytes:
    return await peer.get("/", cap_bytes=1, timeout_s=60.0, progress=progress)


class Asked:
    """A peer whose answer, or failure, takes `seconds` over a line of 256 kbit/s, or of `bytes_per_s`; it is silent for
    ever if it has none."""

    def __init__(self, answer: bytes | Exception | None, seconds: int = 0, bytes_per_s: int = 32_000) -> None:
        self._answer, self._seconds, self._bytes_per_s = answer, seconds, bytes_per_s
        self.asked = 0

    async def get(
        self, path: str, *, cap_bytes: int, timeout_s: float, progress: Progress = lambda size: None
    ) -> bytes:
        self.asked += 1
        for second in range(self._seconds):
            await asyncio.sleep(1.0)
            progress((second + 1) * self._bytes_per_s)
        if self._answer is None:
            await asyncio.Event().wait()
        if isinstance(self._answer, Exception):
            raise self._answer
        assert self._answer is not None
        return self._answer

    async def post(self, path: str, body: bytes, *, cap_bytes: int, timeout_s: float) -> bytes:
        raise NotImplementedError


def by_virtual_time(what: Coroutine[Any, Any, T], within_s: float = 60.0) -> tuple[T, float]:
    """What it returns, and after how many seconds."""

    async def timed() -> tuple[T, float]:
        began = asyncio.get_running_loop().time()
        return await asyncio.wait_for(what, within_s), asyncio.get_running_loop().time() - began

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(timed())


def test_while_a_peer_is_silent_the_learner_is_asked_and_after_a_failure_the_next_peer() -> None:
    failing, silent, never, learner = Asked(PeerUnreachable("")), Asked(None), Asked(b"late"), Asked(b"it")
    assert by_virtual_time(neighbours.first_of([failing, silent, never, learner], ask))[0] == b"it"
    assert [one.asked for one in (failing, silent, never, learner)] == [1, 1, 0, 1]
    unasked = Asked(b"")
    assert by_virtual_time(neighbours.first_of([failing, failing, never, unasked], ask))[0] == b"late"
    assert unasked.asked == 0
    assert by_virtual_time(neighbours.first_of([failing], ask))[0] is None


def test_a_slow_line_is_not_taken_for_a_silent_peer() -> None:
    unasked = Asked(b"")
    assert by_virtual_time(neighbours.first_of([Asked(b"it", 30), *[unasked] * 33], ask))[0] == b"it"
    assert unasked.asked == 0


@pytest.mark.parametrize(
    ("answer", "seconds", "bytes_per_s", "held_up_s", "asked"),
    [(b"late", 59, 1, 0, 1), (ProtocolError("a lie"), 20, 32_000, 20, 2)],
    ids=["drip", "send slowly and then fail"],
)
def test_several_that_are_as_good_as_silent_hold_a_fetch_up_no_longer_than_one(
    answer: bytes | Exception, seconds: int, bytes_per_s: int, held_up_s: int, asked: int
) -> None:
    learner, others = Asked(b"it"), [Asked(answer, seconds, bytes_per_s) for _ in range(9)]
    found, took_s = by_virtual_time(neighbours.first_of([*others, learner], ask))
    assert (found, learner.asked) == (b"it", 1)
    assert took_s == pytest.approx(held_up_s + neighbours.SILENT_S)
    assert [one.asked for one in others] == [1] * asked + [0] * (9 - asked)


def test_while_one_is_silent_no_more_than_two_are_asked() -> None:
    silent, others = Asked(None), [Asked(None) for _ in range(33)]
    with pytest.raises(TimeoutError):
        by_virtual_time(neighbours.first_of([silent, *others], ask), 50.0)
    assert [one.asked for one in others] == [0] * 32 + [1]


@pytest.mark.parametrize(("answer", "helped"), [(b"it", False), (None, True)], ids=["slow", "silent"])
def test_the_learner_helps_only_while_all_peers_are_silent(
    answer: bytes | None, helped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 12 pieces takes a home line 14 s, in which something of it always comes. Silent peers have room for
    16: they are asked twice for some before the learner's turn comes. It gives these too."""
    learner = Asked(b"it")

    async def at_once(take: Callable[[bytes], bool], body: bytes, *, pool: Executor) -> bool:
        return take(body)  # The virtual clock would run while a thread does it

    monkeypatch.setattr(catchup, "in_thread", at_once)
    pieces = [Piece(path="/", expected_bytes=1, cap_bytes=1, take=lambda body: True) for _ in range(12)]
    peers = [Asked(answer, 0 if answer is None else 14) for _ in range(4)]
    with ThreadPoolExecutor(1) as pool:
        assert by_virtual_time(Download(pieces, pool).run(peers, [learner], patient=True), 50.0)[0]
    assert (learner.asked > 0) == helped


# -- a receiver that hears a learner --------------------------------------------------------------------------

HERE = Address(host="127.0.0.1", port=1)
LISTED = Member(node=OTHER_KEY.node_id)


def _nobody(node: NodeId, address: Address) -> PeerClient:
    raise PeerUnreachable("there is nobody else")


class Hearer:
    """A receiver, and what its learner says to it."""

    def __init__(self, directory: Path, base: BaseModel | None = None, *, lan: bool = True) -> None:
        receiver_store(directory)
        self.station = station_of(
            OTHER_KEY, _nobody, dialable=lambda address: is_dialable(address.host, lan=lan), lan=lambda: lan
        )
        self.pool = ThreadPoolExecutor(2)
        self.said: list[str] = []
        self.receiver = Receiver(
            directory, KEY.public_bytes, self.station, pool=self.pool, say=self.said.append, base=base
        )

    def announce(self, held: HeldVersion) -> None:
        version, table = held.head.version, held.table_bytes
        self._say(Frame(FrameType.HEAD, 0, version), held.sealed_head)
        for index, span in enumerate(parts_of(len(table))):
            self._say(Frame(FrameType.TABLE, 0, version, index=index), table[span.at])

    def list(self, *members: Member) -> None:
        self._say(Frame(FrameType.ROSTER, 0, NO_VERSION), encode(Roster(members=members)))

    def _say(self, frame: Frame, payload: bytes) -> None:
        self.receiver.opening.on_frame(KEY.node_id, frame, payload)

    def part_in(self, held: HeldVersion) -> Forwarder | None:
        courier = next(iter(self.receiver._transfers.couriers(held.head.version)), None)
        assert courier is None or isinstance(courier, Forwarder)
        return courier

    async def takes_part_as_leaf(self, held: HeldVersion) -> bool:
        """What it is, once it takes part."""
        await until(lambda: self.part_in(held))
        return cast(Forwarder, self.part_in(held))._leaf


@asynccontextmanager
async def running(hearer: Hearer) -> AsyncIterator[Hearer]:
    task = asyncio.create_task(hearer.receiver.run())
    await until(lambda: hearer.receiver.upkeep.weights is not None)
    try:
        yield hearer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        hearer.pool.shutdown()


@pytest.fixture
async def hearer(tmp_path: Path) -> AsyncIterator[Hearer]:
    async with running(Hearer(tmp_path / "receiver")) as found:
        yield found


@pytest.fixture
def first(tmp_path: Path) -> HeldVersion:
    return Publisher(tmp_path / "learner").publish(0)


async def test_the_links_of_trees_are_opened_before_a_version_needs_them(hearer: Hearer, tmp_path: Path) -> None:
    said: dict[NodeId, list[Roster]] = {NodeId(f"node{number:028}"): [] for number in range(MESH_PEERS + 1)}

    def link(node: NodeId) -> Any:
        def send(type_: int, version: VersionId, payload: bytes) -> None:
            if type_ == FrameType.ROSTER:
                said[node].append(decode(payload, Roster, cap_bytes=CAPS[FrameType.ROSTER]))

        return SimpleNamespace(send=send)

    service = BroadcastService(tmp_path / "service", KEY, replace(hearer.station, public_at=lambda node: [HERE]))
    await service.open(MIXED_LAYOUT)
    service._transfers.links.update((node, link(node)) for node in said)
    service._follow_links()
    assert all(len(rosters[-1].members) == 1 for rosters in said.values()), "they are being probed"
    service._uplinks._ask_at.update(dict.fromkeys(said, math.inf))
    service._follow_links()
    assert all(len(rosters[-1].members) > 1 for rosters in said.values())
    service.close()


@pytest.mark.parametrize(("mbit", "scheme"), [(2.0, "forest"), (50.0, "mesh")])
async def test_a_version_for_slow_lines_is_not_sent_in_segments(
    hearer: Hearer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mbit: float, scheme: str
) -> None:
    nodes = [NodeId(f"node{number:028}") for number in range(16)]
    service = BroadcastService(tmp_path / "service", KEY, replace(hearer.station, public_at=lambda node: [HERE]))
    assert not service._has_trees(), "there is nothing to publish yet"
    await service.open(MIXED_LAYOUT)
    link: Any = SimpleNamespace(send=lambda type_, version, payload: None)
    service._transfers.links.update(dict.fromkeys(nodes, link))
    monkeypatch.setattr(service._uplinks, "of", lambda of: dict.fromkeys(of, mbit * 1e6 / 8))
    assert service._has_trees() is (scheme == "forest")
    service._plan(16 << 20, 16 << 10)
    assert service._planning.plan is not None
    assert service._planning.plan.scheme == scheme
    service.close()


async def test_a_probe_shows_what_a_receiver_can_send_and_no_more_is_taken(hearer: Hearer, tmp_path: Path) -> None:
    service = BroadcastService(tmp_path / "service", KEY, hearer.station)
    here, there = pair_of_sockets()
    stream, sender = (Stream(sock, upload=Pace(None), download=Pace(None)) for sock in (here, there))
    stream.start(service._transfers.open_link(OTHER_KEY.node_id, stream))
    sender.start(hearer.receiver._transfers.open_link(KEY.node_id, sender))

    def rate() -> float:
        service._follow_links()
        return service._uplinks.of([OTHER_KEY.node_id])[OTHER_KEY.node_id]

    await until(lambda: rate() > 0)
    assert list(service._transfers.links) == [OTHER_KEY.node_id]
    link = hearer.receiver._transfers.links[KEY.node_id]
    link.fill()
    assert link.pull() is None, "whoever asks again at once gets nothing"
    link.send(FrameType.FILLER, NO_VERSION, b"one byte more")
    await until(lambda: not service._transfers.links)
    service.close()


@pytest.mark.parametrize("addresses", [(), (HERE,)], ids=["leaf", "public"])
async def test_a_version_waits_for_the_roster(
    hearer: Hearer, first: HeldVersion, addresses: tuple[Address, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "LISTED_S", PATIENCE_S)
    asked = asyncio.Event()
    is_leaf_itself = hearer.receiver._neighbours.is_leaf_itself

    async def noting() -> bool:
        asked.set()
        return await is_leaf_itself()

    monkeypatch.setattr(hearer.receiver._neighbours, "is_leaf_itself", noting)
    hearer.announce(first)
    hearer.list(Member(node=ALICE))
    await asyncio.wait_for(asked.wait(), PATIENCE_S)
    await many_turns()
    assert hearer.part_in(first) is None
    hearer.list(Member(node=ALICE), Member(node=OTHER_KEY.node_id, addresses=addresses))
    assert await hearer.takes_part_as_leaf(first) is not bool(addresses)


async def test_a_node_that_nobody_lists_takes_part_as_a_leaf(
    hearer: Hearer, first: HeldVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "LISTED_S", 0.1)
    hearer.announce(first)
    assert await hearer.takes_part_as_leaf(first)


async def test_links_to_those_who_left_the_roster_end_but_not_the_learners(
    hearer: Hearer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "DROPPED_S", 0.05)
    ended: list[set[NodeId]] = []
    monkeypatch.setattr(hearer.receiver._neighbours.links, "end_others", lambda wanted: ended.append(set(wanted)))
    hearer.list(Member(node=ALICE), Member(node=BOB))
    hearer.list(Member(node=BOB))
    await until(lambda: ended)
    assert ended == [{KEY.node_id, BOB}]


OPEN, PRIVATE, NEVER = "8.8.8.8", "192.168.1.1", "169.254.169.254"
HALF_PINNED = Address(host="8.8.4.4", port=80, fingerprint=bytes(5))


@pytest.mark.parametrize("lan", [False, True])
async def test_a_roster_aims_nobody_at_addresses_that_no_stranger_may_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lan: bool
) -> None:
    hearer = Hearer(tmp_path / "receiver", lan=lan)
    found, dialled, called = hearer.receiver._neighbours, list[str](), list[str]()
    station = replace(hearer.station, peer_at=lambda node, address: called.append(address.host))  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(found, "_station", station)

    def dial(wanted: dict[NodeId, Callable[[], list[Address]]]) -> None:
        dialled.extend(address.host for ways in wanted.values() for address in ways())

    monkeypatch.setattr(found.links, "dial", dial)
    several = (*(Address(host=host, port=80) for host in (NEVER, PRIVATE, OPEN)), HALF_PINNED)
    alone = [Member(node=NodeId(f"f{address.host}"), addresses=(address,)) for address in several]
    hearer.list(LISTED, *alone, Member(node=NodeId("g"), addresses=several))
    found.publics()
    assert set(dialled) == ({OPEN, PRIVATE} if lan else {OPEN})
    assert called == []
    await found.close()
    hearer.pool.shutdown()


VICTIM = "8.8.4.4"


class Addressed(Asked):
    """A peer that gives the right object if it is the honest one, and counts the calls at its host."""

    def __init__(self, address: Address, calls: Counter[str]) -> None:
        super().__init__(b"right" if address.host != VICTIM else PeerUnreachable("nothing listens there"))
        self._host, self._calls = address.host, calls

    async def get(self, path: str, **rest: Any) -> bytes:
        self._calls[self._host] += 1
        return await super().get(path, **rest)


@asynccontextmanager
async def placed(tmp_path: Path, **station: Any) -> AsyncIterator[tuple[Hearer, Counter[str]]]:
    """A receiver with this `station` that dials nobody, and the calls at each host."""
    hearer, calls = Hearer(tmp_path / "receiver"), Counter[str]()
    at = replace(hearer.station, peer_at=lambda node, address: Addressed(address, calls), **station)  # type: ignore[arg-type,return-value]
    found = neighbours.Neighbours(at, lambda node, stream: pytest.fail("no link"))
    found.links.dial = lambda wanted: None  # type: ignore[method-assign]
    for part in (hearer.receiver, hearer.receiver.opening, hearer.receiver.upkeep):
        part._neighbours = found
    yield hearer, calls
    await hearer.receiver._neighbours.close()
    hearer.pool.shutdown()


async def fetch(found: neighbours.Neighbours) -> bytes:
    return (await found.fetch(bytes(32), 1 << 20, lambda data: data, "it"))[0]


async def download(found: neighbours.Neighbours) -> bool:
    pieces = [Piece(path="/", expected_bytes=1, cap_bytes=1, take=lambda body: True) for _ in range(40)]
    with ThreadPoolExecutor(1) as pool:
        return await Download(pieces, pool).run(found.publics(), [], patient=True)


async def test_a_roster_of_one_victims_ports_has_it_never_called_and_an_honest_public_is_asked(tmp_path: Path) -> None:
    """All members but one name the victim. One of them is linked, from where it really is."""
    honest, liar = NodeId("honest"), NodeId("f7")
    members = [Member(node=NodeId(f"f{n}"), addresses=(Address(host=VICTIM, port=1 + n),)) for n in range(255)]
    linked_at = {honest: "8.8.8.8", liar: "9.9.9.9"}
    async with placed(tmp_path, linked_at=linked_at) as (hearer, calls):
        hearer.list(*members, Member(node=honest, addresses=(Address(host="8.8.8.8", port=7700),)))
        for _ in range(30):
            assert await fetch(hearer.receiver._neighbours) == b"right"
            assert await download(hearer.receiver._neighbours)
    assert calls == {"8.8.8.8": 30 + 30 * 40}


async def test_all_nodes_of_a_laboratory_are_asked_and_who_is_not_linked_yet_is_waited_for(tmp_path: Path) -> None:
    """They share an address. Before any link is there, those are asked that gossip has proven."""
    lab = [Member(node=NodeId(f"f{n}"), addresses=(Address(host="8.8.8.8", port=7700 + n),)) for n in range(4)]
    linked_at: dict[NodeId, str] = {}
    proven = (NodeId("proven"), Address(host="9.9.9.9", port=7700))
    async with placed(tmp_path, linked_at=linked_at, publics=lambda: [proven]) as (hearer, calls):
        found = hearer.receiver._neighbours
        assert not found.none_is_public(), "the roster may name publics, so the learner is spared"
        hearer.list(Member(node=OTHER_KEY.node_id, addresses=(HERE,)))
        assert found.none_is_public()
        hearer.list(*lab)
        assert await fetch(found) == b"right"
        assert calls == {"9.9.9.9": 1}
        assert not found.none_is_public()
        linked_at.update(dict.fromkeys((member.node for member in lab), "8.8.8.8"))
        assert len(found.publics()) == 4
        assert await download(found)
    assert calls == {"9.9.9.9": 1, "8.8.8.8": 40}


async def test_a_learner_that_names_a_victim_as_itself_has_it_called_seldom_and_is_asked_where_it_is_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, linked_at = 1000.0, dict[NodeId, str]()
    monkeypatch.setattr(neighbours, "time", SimpleNamespace(monotonic=lambda: now))
    named = [Address(host=VICTIM, port=80), Address(host="learner.example", port=7700)]
    async with placed(tmp_path, linked_at=linked_at, learner=lambda: (KEY.node_id, named)) as (hearer, calls):
        found = hearer.receiver._neighbours
        for _ in range(100):
            now += 1.0
            with suppress(PeerUnreachable):
                assert await fetch(found) == b"right"
        assert 0 < calls[VICTIM] <= 4 + 100 / neighbours.MAX_WAIT_S
        assert calls["learner.example"] >= 100 / neighbours.MAX_WAIT_S - 1, "its other address has its turn"
        calls.clear()
        linked_at[KEY.node_id] = "learner.example"
        for _ in range(100):
            assert await fetch(found) == b"right"
        assert calls == {"learner.example": 100}


async def test_nobody_leads_a_node_back_to_an_older_version(tmp_path: Path) -> None:
    """Not the learner's line, nor a relay, nor gossip, and also not after a restart."""
    old, held = Publisher(tmp_path / "learner").publish_up_to(1)
    store = receiver_store(tmp_path / "receiver")
    weights = open_weights(store)
    for version in (old, held):
        weights.apply(hand_over(store, version))
    weights.close()
    async with running(Hearer(tmp_path / "receiver")) as hearer:
        for _ in range(2):
            hearer.announce(old)
            assert hearer.receiver.opening._announced.empty()
            hearer.announce(held)
            await until(lambda: hearer.receiver.upkeep.target is not None)
        assert hearer.receiver.upkeep.version == v(1)
        with pytest.raises(ProtocolError, match="only the learner announces"):
            hearer.receiver.opening.on_frame(ALICE, Frame(FrameType.HEAD, 0, v(2)), held.sealed_head)
    assert hearer.said == []


async def test_a_table_that_a_slow_peer_keeps_to_itself_holds_up_no_newer_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = Publisher(tmp_path / "learner").publish_up_to(2)
    asked, given_up = asyncio.Event(), asyncio.Event()

    async def fetch(*given: object) -> None:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    monkeypatch.setattr("swarm.broadcast.announcing.TABLE_S", 0.01)
    async with running(Hearer(tmp_path / "receiver")) as hearer:
        monkeypatch.setattr(hearer.receiver._neighbours, "fetch", fetch)
        hearer.list(LISTED)
        hearer.announce(first)
        await until(lambda: hearer.receiver.upkeep.target is not None)
        hearer._say(Frame(FrameType.HEAD, 0, second.head.version), second.sealed_head)
        await asked.wait()
        assert not given_up.is_set()
        hearer.announce(third)
        await until(lambda: hearer.receiver.upkeep.target == hearer.receiver.upkeep.store.find(v(2)))  # type: ignore[union-attr]
        assert given_up.is_set()


@pytest.mark.parametrize(
    ("sender", "kind", "goes_on"),
    [(ALICE, NoteKind.FRESH, True), (BOB, NoteKind.FRESH, False), (KEY.node_id, NoteKind.COPY, False)],
    ids=["parent", "another child", "learner, on a new link"],
)
async def test_in_trees_a_part_of_a_table_goes_on_once_from_its_parent_to_its_children(
    hearer: Hearer, first: HeldVersion, sender: NodeId, kind: NoteKind, goes_on: bool
) -> None:
    version, span = first.head.version, parts_of(len(first.table_bytes))[0]
    sent: dict[NodeId, list[tuple[int, int, int]]] = {BOB: [], NodeId("other"): []}

    def link(to: NodeId) -> Any:
        def send(type_: int, version: VersionId, payload: bytes, *, kind: int, index: int) -> None:
            sent[to].append((type_, kind, index))

        return SimpleNamespace(send=send)

    hearer.receiver._transfers.links.update((node, link(node)) for node in sent)
    routes = Routing(parents=(ALICE, BOB), children=((BOB,), (NodeId("other"),)), chunks_per_s=0.0)
    hearer._say(Frame(FrameType.ROUTES, 0, version), encode(routes))
    hearer._say(Frame(FrameType.HEAD, 0, version), first.sealed_head)
    part = first.table_bytes[span.at]
    for _ in range(3):
        hearer.receiver.opening.on_frame(sender, Frame(FrameType.TABLE, len(part), version, int(kind), 0), part)
    assert sent == {BOB: [(FrameType.TABLE, NoteKind.FRESH, 0)] if goes_on else [], NodeId("other"): []}
    hearer.receiver._transfers.links.clear()


# -- a base model ---------------------------------------------------------------------------------------------


async def with_base(tmp_path: Path, publisher: Publisher, *, wrong: slice) -> tuple[Hearer, HeldVersion]:
    """A receiver with a local copy of the first version, of which a part is `wrong`."""
    first = publisher.publish(0)
    content = bytearray(publisher.history[v(0)])
    content[wrong] = bytes(byte ^ 1 for byte in content[wrong])
    base = BaseModel(save(tmp_path / "base", MIXED_LAYOUT, bytes(content)))
    return Hearer(tmp_path / "receiver", base), first


async def test_little_that_is_not_in_the_base_model_is_asked_for_and_why_in_vain_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0

    run = CatchUp.run

    async def counted(one: CatchUp, target: SignedVersion) -> None:
        nonlocal tries
        tries += 1
        await run(one, target)

    monkeypatch.setattr(CatchUp, "run", counted)
    monkeypatch.setattr("swarm.broadcast.receiver.upkeep.PATIENCE_S", 0.0)
    monkeypatch.setattr("swarm.broadcast.receiver.upkeep.RETRY_S", 0.001)
    found, first = await with_base(tmp_path, Publisher(tmp_path / "learner"), wrong=slice(70_000, 70_001))
    async with running(found) as hearer:
        hearer.list(LISTED)
        hearer.announce(first)
        await until(lambda: tries >= 4)
        assert [line for line in hearer.said if "cannot catch up" in line] == [
            "cannot catch up with version 0.0 yet: nobody gives the last 1 regions of version 0.0"
        ]
        assert hearer.part_in(first) is None


async def test_a_version_that_is_mostly_not_in_the_base_model_is_streamed(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "learner")
    found, first = await with_base(tmp_path, publisher, wrong=slice(0, None, 1000))
    async with running(found) as hearer:
        hearer.list(LISTED)
        hearer.announce(first)
        await until(lambda: hearer.part_in(first))


# -- leaving --------------------------------------------------------------------------------------------------


async def ends_with_its_thread(task: asyncio.Task[Any], begun: threading.Event, go_on: threading.Event) -> None:
    """Cancel a task whose thread has begun and does not go on yet."""
    await until(begun.is_set)
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_who_leaves_in_an_apply_waits_for_its_end(
    tmp_path: Path, first: HeldVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    apply = WeightMap.apply

    def slow_apply(weights: WeightMap, held: HeldVersion, pool: Executor) -> None:
        begun.set()
        go_on.wait(20)
        apply(weights, held, pool)

    monkeypatch.setattr(WeightMap, "apply", slow_apply)
    hearer = Hearer(tmp_path / "receiver")
    task = asyncio.create_task(hearer.receiver.run())
    await until(lambda: hearer.receiver.upkeep.weights is not None)
    assert hearer.receiver.upkeep.store is not None
    hand_over(hearer.receiver.upkeep.store, first)
    hearer.list(LISTED)
    hearer.announce(first)
    await ends_with_its_thread(task, begun, go_on)
    assert hearer.receiver.upkeep.version == v(0)
    hearer.pool.shutdown()


async def test_a_download_that_is_given_up_waits_for_what_is_being_written() -> None:
    begun, go_on, written = threading.Event(), threading.Event(), threading.Event()

    def take(body: bytes) -> bool:
        begun.set()
        go_on.wait(20)
        written.set()
        return True

    with ThreadPoolExecutor(1) as pool:
        download = Download([Piece(path="/", expected_bytes=1, cap_bytes=1, take=take)], pool)
        task = asyncio.create_task(download.run([Asked(b"what it is asked for")], (), patient=True))
        await ends_with_its_thread(task, begun, go_on)
        assert written.is_set()


async def test_who_is_cancelled_twice_waits_for_nothing() -> None:
    go_on = threading.Event()
    task = asyncio.create_task(in_thread(go_on.wait, 20))
    for _ in range(2):
        await asyncio.sleep(0.01)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
