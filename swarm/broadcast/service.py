"""The learner's data plane: it encodes and signs versions in threads, announces them, and deals their chunks."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from aiohttp import web

from swarm.broadcast.announcing import DIRECT_BYTES, forwarders_of, parts_of
from swarm.broadcast.coding import coding_pool, spare_threads
from swarm.broadcast.encoding import Encoders
from swarm.broadcast.forest.courier import TreeCourier
from swarm.broadcast.forest.planner import PeerProfile, Planning, PlanOf, VersionPlan, is_for_mesh, plan_of
from swarm.broadcast.frames import FrameType
from swarm.broadcast.mesh.seeder import Seeder
from swarm.broadcast.notes import ADDRESSES, Courier, Member, NoteKind, Roster
from swarm.broadcast.publishing import PublishedVersions
from swarm.broadcast.serving import VersionServer
from swarm.broadcast.store.disk import DiskFull
from swarm.broadcast.store.store import BegunVersion, HeldVersion
from swarm.broadcast.transfers import MAX_ACTIVE, Link, Transfer, Transfers
from swarm.broadcast.uplinks import Uplinks
from swarm.broadcast.version.codec import FULL_RATIO
from swarm.broadcast.version.manifest import SEGMENT_TABLE_BYTES, Layout, needs_base, trained_spans
from swarm.errors import ProtocolError
from swarm.net.links import NO_VERSION, Links, Station
from swarm.net.signing import SigningKey
from swarm.net.stream import Frame, Incoming
from swarm.types import NodeId, VersionId
from swarm.wire import encode

PLAN_S = 10.0  # From one plan to the next while nothing is sent: planning for 1,000 nodes takes a moment
ROSTER_S = 0.25  # How often the links are looked at; changes within this time go out together
MAX_SHOWN = 8  # Versions whose spreading `status` shows
MAX_LINKS = 2000  # Links that `status` names: more than a screen can draw


@dataclass(slots=True, kw_only=True)
class Spreading:
    """How one version spreads. `complete_s` are seconds since its announcement, by receiver. `sent_bytes` is set once
    the transfer is over."""

    encoded_bytes: int
    codecs: dict[str, int]
    announced_at: float
    complete_s: dict[NodeId, float] = field(default_factory=dict)
    sent_bytes: int = 0


class BroadcastService:
    """The learner's side. `run` goes on for as long as receivers are served."""

    def __init__(
        self,
        directory: Path,
        key: SigningKey,
        station: Station,
        *,
        plan_of: PlanOf = plan_of,
    ) -> None:
        self._directory = directory
        self._key = key
        self._station = station
        self._planning = Planning(station.me, plan_of)
        self._uplinks = Uplinks()
        self._pool = coding_pool()
        self._encoders = Encoders(spare_threads(), self._pool, directory)
        self._versions: PublishedVersions | None = None
        self._layout: Layout | None = None
        self._transfers = Transfers(
            is_leaf=lambda node: not station.public_at(node),
            on_frame=self._on_frame,
            on_link=self._on_link,
            on_complete=lambda transfer: None,
            on_fault=lambda node: self._links.bar(node),
            on_peer_complete=self._on_peer_complete,
        )
        self._links = Links(station, open_link=self._transfers.open_link, admits=lambda node: True)
        self._members: dict[NodeId, Member] = {}
        self._rosters: dict[NodeId, Roster] = {}  # What each link was told; and of the trees, in `_routes`
        self._planned: dict[NodeId, PeerProfile] = {}  # What the newest plan counts on
        self._plan_at = 0.0
        self._told_plan: VersionPlan | None = None
        self._routes: dict[NodeId, tuple[object, ...]] = {}
        self._spreading: dict[VersionId, Spreading] = {}
        self._server = VersionServer(
            lambda: self._versions.store if self._versions else None,
            lambda: self._versions.weights if self._versions else None,
            self._pool,
            station,
        )
        self.newest: HeldVersion | None = None

    async def open(self, layout: Layout) -> None:
        """Set the layout of every version to come, and go on sending what a former process published from the same
        directory with the same key."""
        self._layout = layout
        self._versions = await asyncio.to_thread(PublishedVersions, self._directory, self._key, layout)
        if (newest := self._versions.newest) is not None:
            self._begin(newest, resumed=True)

    async def encode(self, staging: Path, version: VersionId) -> HeldVersion:
        """Encode the staged weights and sign the head. The staging file must not change meanwhile; afterwards it holds
        other bytes. Segments that are encoded are dealt meanwhile, but nobody has the version before it is announced.
        """
        assert self._versions is not None
        loop = asyncio.get_running_loop()
        # With too many versions under way a delta would only lengthen the queue. Publish in full and drop the others.
        late = sum(not self._is_delivered(version) for version in self._transfers.active)
        full = late >= MAX_ACTIVE - 1
        size = self._chunk_bytes(full=full)
        await self._encoders.start(self._versions.weights.layout.total_bytes)

        def begun(so_far: BegunVersion, sealed: bytes) -> None:
            loop.call_soon_threadsafe(self._begin_early, so_far, sealed)

        in_segments = not full and self.newest is not None and not self._has_trees()
        publish = partial(self._versions.publish, full=full, begun=begun if in_segments else None)
        try:
            return await asyncio.to_thread(publish, staging, version, size, self._encoders.submit)
        except DiskFull:
            self._transfers.close(version)
            raise

    async def encode_again(self, version: VersionId) -> HeldVersion:
        """Encode the newest version's weights again, as `version`."""
        assert self._versions is not None
        size = self._chunk_bytes(full=False)
        return await asyncio.to_thread(self._versions.republish, version, size, self._encoders.submit)

    def announce(self, held: HeldVersion) -> None:
        """Deal what `encode` made. The caller must already have written down what has to survive a crash."""
        self._begin(held)

    async def run(self) -> None:
        """Keep all receivers up to date about one another, until cancelled."""
        try:
            while True:
                self._follow_links()
                await asyncio.sleep(ROSTER_S)
        finally:
            await self._links.close()
            await self._encoders.stop()
            for version in list(self._transfers.active):
                self._transfers.close(version)

    async def accept(self, incoming: Incoming) -> None:
        await self._links.accept(incoming)

    @property
    def uplink_bytes_per_s(self) -> float:
        """The rate of sent weights in the best second, which is forgotten slowly. 0 means unknown."""
        return self._transfers.uplink_bytes_per_s

    def complete_s(self, node: NodeId, version: VersionId) -> float | None:
        """Return the seconds from the announcement of `version`, one of the last few, until `node` held all of it."""
        found = self._spreading.get(version)
        return found.complete_s.get(node) if found is not None else None

    @property
    def raw_weights(self) -> Path | None:
        """The file with the newest version's weights, in layout order, or None if it does not hold all of them."""
        if self._versions is None or self.newest is None:
            return None
        weights = self._versions.weights
        return weights.path if weights.version == self.newest.head.version else None

    @property
    def version_bytes(self) -> int:
        """Encoded bytes of the newest version; 0 before the first."""
        return self.newest.table.encoded_bytes if self.newest is not None else 0

    def routes(self) -> list[web.RouteDef]:
        return self._server.routes()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def status(self, seen: Callable[[VersionId], dict[str, Any]] = lambda version: {}) -> dict[str, Any]:
        """Return what `status` says of the data plane; docs/protocol.md describes the keys. `seen` says what else is
        known of a version."""
        return {
            "topology": self._topology(),
            "links": self._sends(),
            "streams": len(self._transfers.links),
            "stream_bytes_sent": self._transfers.sent_bytes,
            "up_bytes_per_s": round(sum(link.bytes_per_s for link in self._transfers.links.values())),
            "uplink_bytes_per_s": round(self._transfers.uplink_bytes_per_s),
            "uplinks": {
                node: round(rate) for node, rate in self._uplinks.of(islice(self._transfers.links, MAX_LINKS)).items()
            },
            "broadcasts": {
                str(version): {**self._spread(version), **seen(version)}
                for version in sorted(self._spreading)[-MAX_SHOWN:]
            },
        }

    # -- parts -----------------------------------------------------------------------------------------------

    def _topology(self) -> str:
        if not self._transfers.links:
            return "nobody takes part"
        if all(member.is_leaf for member in self._members.values()):
            return "star: everything goes over the learner's uplink, because nobody can be dialled; add one relay"
        return self._planning.plan.scheme if self._planning.plan is not None else "nothing published"

    def _sends(self) -> list[tuple[NodeId, NodeId, int | None, str | None]]:
        """Return who sends to whom by the plan, how fast (of the learner's links alone), and the version under way."""
        plan, me, links = self._planning.plan, self._station.me, self._transfers.links
        pairs = ((parent, child) for tree in (plan.trees if plan else ()) for child, parent in tree.items())
        if plan is None or not plan.trees:
            # In a mesh each sends what it was dealt to all others; two leaves cannot reach one another.
            dialled = {me, *(node for node in links if self._station.public_at(node))}
            every = ((one, to) for one in (me, *links) for to in links if one != to)
            pairs = (pair for pair in every if not dialled.isdisjoint(pair))
        newest = max(self._transfers.active, default=NO_VERSION)
        done = self._spreading[newest].complete_s if newest in self._spreading else {}
        return [
            (
                sender,
                node,
                round(links[node].bytes_per_s) if sender == me and node in links else None,
                str(newest) if newest != NO_VERSION and node not in done else None,
            )
            for sender, node in dict.fromkeys(islice(pairs, MAX_LINKS))
        ]

    def _begin(self, held: HeldVersion, *, resumed: bool = False) -> None:
        version = held.head.version
        self._retire(held)
        begun = self._transfers.active.get(version)
        self._spreading[version] = Spreading(
            encoded_bytes=held.table.encoded_bytes,
            codecs=dict(Counter(entry.codec for entry in held.table.regions)),
            announced_at=time.monotonic(),
        )
        while len(self._spreading) > MAX_SHOWN:
            del self._spreading[min(self._spreading)]
        if begun is None:
            self._plan(held.table.encoded_bytes, held.table.chunk_bytes)
            self._route(version)
        self._announce(held)
        self._transfers.open(held, partial(self._courier, version, resumed=resumed))
        self.newest = held

    def _begin_early(self, so_far: BegunVersion, sealed: bytes) -> None:
        """Deal the first segments of a version that is still being encoded."""
        if (told := self._whom_to_tell_early(so_far.version, len(sealed))) is None:
            return
        if so_far.version not in self._transfers.active:
            if len(self._transfers.active) >= MAX_ACTIVE:
                return
            self._plan(self._expected_bytes(full=so_far.base is None), so_far.table.chunk_bytes)
            self._route(so_far.version)
        for node, kind in told.items():
            number = len(so_far.table.cuts) - 1
            self._transfers.links[node].send(FrameType.SEGMENT, so_far.version, sealed, kind=kind, index=number)
        self._transfers.open(so_far, partial(self._courier, so_far.version))

    def _whom_to_tell_early(self, version: VersionId, nbytes: int) -> dict[NodeId, NoteKind] | None:
        """Return the nodes that get a segment's table, and whether they pass it on. None if that would cost too much:
        then it comes with the rest."""
        links = self._transfers.links
        if nbytes > SEGMENT_TABLE_BYTES or self._has_trees():
            return None
        publics = self._publics()
        if not publics or len(links) * nbytes <= DIRECT_BYTES:
            return dict.fromkeys(links, NoteKind.COPY)
        # Another among equals for each version, because one of them may keep it to itself.
        return {max(publics, key=lambda node: (publics[node], hash((node, version)))): NoteKind.FRESH}

    def _has_trees(self) -> bool:
        """Return True if the next version goes down trees: their routes come before its chunks, and in segments that
        wait behind the first one all parents would seem to be silent."""
        plan = self._planning.plan
        if plan is not None and plan.trees:
            return True
        return self._layout is not None and not is_for_mesh(
            [*self._profiles().values()], self._expected_bytes(full=False)
        )

    def _plan(self, encoded_bytes: int, chunk_bytes: int) -> None:
        self._planned, uplink = self._profiles(), self._transfers.uplink_bytes_per_s
        self._planning.begin(self._planned, uplink, encoded_bytes, chunk_bytes, now=time.monotonic())

    def _route(self, version: VersionId) -> None:
        """Tell all nodes with whom to link, and their parts in a version: the links take a round trip, so they come
        first."""
        self._send_rosters(self._planned)
        self._routes = {}
        self._send_routes([version])

    def _courier(self, version: VersionId, count: int, have: bytes, *, resumed: bool = False) -> Courier:
        plan = self._planning.plan
        if plan is None or plan.scheme == "mesh":
            elders = [one for one in self._transfers.couriers(version) if isinstance(one, Seeder)]
            return Seeder(count, now=time.monotonic(), resumed=resumed, after=elders[-1] if elders else None)
        routes, random = plan.routes_of(self._station.me), self._station.random
        return TreeCourier(count=count, learner=self._station.me, routes=routes, held=have, random=random)

    def _announce(self, held: HeldVersion) -> None:
        """Send head and table ahead of all chunks, so that receivers get their first byte without asking."""
        links = self._transfers.links
        publics = self._publics()
        if not publics or len(links) * len(held.table_bytes) <= DIRECT_BYTES:
            for link in links.values():
                self._announce_directly(link, held)
            return
        version = held.head.version
        for link in links.values():
            link.send(FrameType.HEAD, version, held.sealed_head)
        spans, plan = parts_of(len(held.table_bytes)), self._planning.plan
        routes = plan.routes_of(self._station.me) if plan is not None and plan.trees else None
        for index, (span, forwarder) in enumerate(zip(spans, forwarders_of(len(spans), publics), strict=True)):
            part = held.table_bytes[span.at]
            if routes is not None:
                self._transfers.send_part(version, index, part, routes)
            else:
                links[forwarder].send(FrameType.TABLE, version, part, kind=NoteKind.FRESH, index=index)

    @staticmethod
    def _announce_directly(link: Link, held: HeldVersion) -> None:
        link.send(FrameType.HEAD, held.head.version, held.sealed_head)
        for index, span in enumerate(parts_of(len(held.table_bytes))):
            link.send(FrameType.TABLE, held.head.version, held.table_bytes[span.at], index=index)

    def _retire(self, newer: HeldVersion) -> None:
        """Stop dealing versions that everybody has, or that nobody needs any more."""
        elders = [version for version in self._transfers.active if version < newer.version]
        kept = [version for version in elders if not self._is_delivered(version) and needs_base(newer.table)]
        for version in set(elders).difference(kept[1 - MAX_ACTIVE :]):
            self._close(version)

    def _close(self, version: VersionId) -> None:
        if (spreading := self._spreading.get(version)) is not None:
            spreading.sent_bytes = self._transfers.active[version].sent_bytes
        self._transfers.close(version)

    def _is_delivered(self, version: VersionId) -> bool:
        """Return True if every linked node has said that it holds the version."""
        found = self._spreading.get(version)
        return found is not None and all(node in found.complete_s for node in self._transfers.links)

    def _chunk_bytes(self, *, full: bool) -> int:
        return self._planning.chunk_bytes(self._profiles(), self._expected_bytes(full=full))

    def _expected_bytes(self, *, full: bool) -> int:
        assert self._layout is not None
        if self.newest is None:
            return int(FULL_RATIO * self._layout.total_bytes)
        trained = sum(span.nbytes for span in trained_spans(self._layout.tensors))
        return int(FULL_RATIO * trained) if full else self.version_bytes

    def _profiles(self) -> dict[NodeId, PeerProfile]:
        public_at, uplinks = self._station.public_at, self._uplinks.of(sorted(self._transfers.links))
        return {
            node: PeerProfile(node=node, public=bool(public_at(node)), uplink_bytes_per_s=uplink)
            for node, uplink in uplinks.items()
        }

    def _publics(self) -> dict[NodeId, float]:
        """Return the uplinks of the linked publics."""
        return {node: profile.uplink_bytes_per_s for node, profile in self._profiles().items() if profile.public}

    def _on_link(self, node: NodeId, up: bool) -> None:
        if not up:
            return
        for told in (self._rosters, self._routes):
            told.pop(node, None)
        # Its roster comes first: without it a receiver does not know its part in a version.
        self._follow_links()
        for transfer in self._transfers.active.values():
            if isinstance(transfer.held, HeldVersion):
                self._announce_directly(self._transfers.links[node], transfer.held)

    def _follow_links(self) -> None:
        """Tell receivers about one another. Adapt the trees to who is linked and who falls behind."""
        profiles, now = self._profiles(), time.monotonic()
        idle = all(map(self._is_delivered, self._transfers.active))
        for node in self._uplinks.due(self._transfers.links, idle=idle, now=now):
            self._transfers.links[node].send(FrameType.PROBE, NO_VERSION, b"")
        known = self._uplinks.asked_all(profiles)
        if idle and known and profiles != self._planned and now >= self._plan_at and self._has_trees():
            # The links of trees take a while to open, so they are there before a version needs them.
            self._plan_at = now + PLAN_S
            self._plan(self._expected_bytes(full=False), self._chunk_bytes(full=False))
        changed = self._planning.follow(profiles)
        for courier in self._transfers.couriers():
            if isinstance(courier, TreeCourier) and (slower := self._planning.relieve(courier.complaints(), now=now)):
                self._uplinks.lower(slower, now=now)
                changed = True
        if changed or not self._routes.keys() >= profiles.keys():
            self._send_routes(self._transfers.active)
        self._send_rosters(profiles)

    def _send_rosters(self, profiles: Mapping[NodeId, PeerProfile]) -> None:
        """Tell each node which nodes to link with, if that changed."""
        plan, public_at = self._planning.plan, self._station.public_at
        members = {node: Member(node=node, addresses=tuple(public_at(node)[:ADDRESSES])) for node in profiles}
        if members == self._members and plan is self._told_plan and self._rosters.keys() >= profiles.keys():
            return
        self._members, self._told_plan = members, plan
        rosters = self._planning.rosters(members)
        for node, link in self._transfers.links.items():
            if rosters[node] != self._rosters.get(node):
                link.send(FrameType.ROSTER, NO_VERSION, encode(rosters[node]))
        self._rosters = rosters

    def _send_routes(self, versions: Iterable[VersionId]) -> None:
        """If there are trees, tell each node its part in them, if it changed; and give the learner its own."""
        plan = self._planning.plan
        if plan is None or not plan.trees:
            return
        for node, link in self._transfers.links.items():
            routes = plan.routes_of(node)
            place = (routes.parents, routes.children)  # without the pace, which changes for everybody at once
            if place != self._routes.get(node):
                self._routes[node] = place
                for version in versions:
                    link.send(FrameType.ROUTES, version, encode(routes))
        for courier in self._transfers.couriers():
            if isinstance(courier, TreeCourier):
                courier.set_routes(plan.routes_of(self._station.me), now=time.monotonic())
        self._transfers.stir()

    def _on_peer_complete(self, node: NodeId, version: VersionId) -> None:
        if (spreading := self._spreading.get(version)) is not None:
            spreading.complete_s.setdefault(node, time.monotonic() - spreading.announced_at)

    def _on_frame(self, node: NodeId, frame: Frame, payload: bytes) -> None:
        if frame.type != FrameType.FILLER:
            raise ProtocolError("receivers announce nothing")
        if not self._uplinks.came(node, frame.size, now=time.monotonic()):
            raise ProtocolError("more of a probe than was asked for")

    def _spread(self, version: VersionId) -> dict[str, Any]:
        assert self._layout is not None
        spreading = self._spreading[version]
        transfer = self._transfers.active.get(version)
        seeders = [part.courier for part in transfer.parts if isinstance(part.courier, Seeder)] if transfer else []
        return {
            "raw_bytes": self._layout.total_bytes,
            "encoded_bytes": spreading.encoded_bytes,
            "sent_bytes": transfer.sent_bytes if transfer is not None else spreading.sent_bytes,
            "codecs": spreading.codecs,
            "complete": len(spreading.complete_s),
            "last_complete_s": round(max(spreading.complete_s.values(), default=0.0), 4),
            "repairs": sum(seeder.repairs for seeder in seeders) if seeders else None,
            "progress": self._progress(transfer, spreading) if transfer is not None else {},
        }

    def _progress(self, transfer: Transfer, spreading: Spreading) -> dict[NodeId, float]:
        """Return which share of a version under way each receiver holds that does not have it all, as far as known."""
        count = sum(len(part.chunks) for part in transfer.parts)
        couriers = [part.courier for part in transfer.parts if isinstance(part.courier, Seeder | TreeCourier)]
        missing = self._transfers.links.keys() - spreading.complete_s.keys()
        held = {node: sum(courier.held_by(node) for courier in couriers) for node in missing}
        return {node: round(chunks / count, 3) for node, chunks in held.items() if chunks}
