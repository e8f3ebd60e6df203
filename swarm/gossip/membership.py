"""Who is in the swarm: the core of gossip, for publics and leaves alike.

Theory of operation. A *public* keeps a table of all publics. Every round it calls a few of them with a digest of the
table. The answer holds what the caller lacks (records, younger beats) and names what the other side lacks, which
follows in a second call. News (a node, an address, a head, a refutation) is pushed on at once; a renewed record travels
with the rounds. A public replaces its partners one by one, so connections stay open and in time it calls every public.
A *leaf* only dials out. It polls its homes, which hold the poll open until there is a newer head or the learner has
moved. Now and then it asks a random public for others.

The order matters. A caller is heard before its digest is merged: it is authenticated, so its beat is now. Records are
admitted before ages, since an age without a record is of no use. The answer is made last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from random import Random

from swarm.errors import ProtocolError
from swarm.gossip.calls import MAX_FAILURES, Home, Homes, Partners
from swarm.gossip.records import (
    ENTRY_BYTES,
    Doubled,
    Effect,
    Exchange,
    ExchangeReply,
    GossipRules,
    Greet,
    Owner,
    Post,
    Reachability,
    Rejected,
    SignedRecord,
    Wake,
)
from swarm.gossip.table import CHANGES, Peer, Table
from swarm.gossip.view import View, answer_to, fitting, seen_in
from swarm.net.hosts import caller_of, network_of
from swarm.net.limits import Meter, RateLimits
from swarm.types import Address, NodeId, VersionId

FIRST_GREET_S, MAX_GREET_S = 1.0, 300.0  # Pause between tries to reach a bootstrap while no node is known; it doubles
SIGNATURE_US, RECORD_US, ENTRY_US = 150, 10, 2
"""What it takes to check a signature, to read a record, and to look at an entry of a digest or of the own table."""

WORK = RateLimits(requests_per_s=10_000, burst=40_000)
"""Of such microseconds each network of callers gets 1 % of the time, and so does each node whose answers are taken in.
A partner among 1,000 publics, all of which renew their records once a minute, needs half of that; the burst is a
message as large as any. Keys are free, so callers are counted by their network."""

OVERTAKEN_YOUNG, OVERTAKEN = 3, 6
"""Records of our own key, issued by another process, that are gone past in one record's life. A former life that the
disk forgot may be met once or twice, depending on whom one hears first; a process that is alive answers each time."""

HELLO_S = 10.0  # By then a hello is answered or has failed


class Membership:
    """One node's view. `read_record` raises ProtocolError, and so do `open_record` and `open_head`, which check
    signatures too."""

    def __init__(
        self,
        owner: Owner,
        rules: GossipRules,
        table: Table,
        *,
        read_record: Callable[[bytes], SignedRecord],
        open_record: Callable[[bytes], SignedRecord],
        open_head: Callable[[bytes], VersionId],
        random: Random,
        now: float,
    ) -> None:
        self.view = View(owner, rules, table)
        self.homes = Homes(rules, random)
        self.rules = rules
        self._owner = owner
        self._table = table
        self._leases = self.view.leases
        self._partners = Partners(rules, random)
        self._read_record = read_record
        self._open_record = open_record
        self._open_head = open_head
        self._random = random
        self._work = Meter(WORK)
        self._began = now
        self._overtaken: list[float] = []
        self._fresh: dict[bytes, SignedRecord] = {}
        self._push_at: float | None = None
        self._late_until = -math.inf
        self._planned: float | None = None
        self._greet_wait_s = FIRST_GREET_S
        self._round_at = now
        self._greet_at = now
        self._reissue_at = now + self._period(rules.reissue_rounds)
        self._revive_at = now + self._period(rules.dead_try_rounds)
        # The first bootstrap may have known little: a leaf with one home must not wait a minute for others.
        self._refresh_at = now + self._period(rules.scarce_rounds)

    # -- time ------------------------------------------------------------------------------------------------

    def deadline(self) -> float:
        """Return when to call `tick` next."""
        times = [self._round_at, self._reissue_at, self._greet_at]
        times += [self._push_at] if self._push_at is not None else []
        times += [self._revive_at] if self.view.is_public else [self._refresh_at, *self.homes.deadlines()]
        self._planned = min(times)
        return self._planned

    def tick(self, *, now: float) -> list[Effect]:
        rules = self.rules
        if self._planned is not None and now - self._planned > rules.round_s:
            # This node runs late, and beats may lie unread in its sockets. Wait twice as long before declaring deaths.
            self._late_until = now + rules.dead_rounds * rules.round_s
        effects: list[Effect] = []
        if now >= self._reissue_at:
            self._reissue_at = now + self._period(rules.reissue_rounds)
            # Leaves come and go too often to issue a record each time.
            self._owner.leaves = len(self._leases)
            effects += self._owner.issue()
        if now >= self._round_at:
            self._round_at = now + self._period(1)
            effects += self._round(now)
        if now >= self._greet_at:
            # The outcome sets the next time. Two hellos at once would fail twice and so double the wait twice.
            self._greet_at = now + max(HELLO_S, self._greet_period(now))
            effects += [Greet()] if self._has_to_greet(now) else []
        if self.view.is_public and now >= self._revive_at:
            self._revive_at = now + self._period(rules.dead_try_rounds)
            effects += self._revive(now)
        if not self.view.is_public:
            effects += self._leaf_calls(now)
        if self._push_at is not None and now >= self._push_at:
            effects += self._push(now)
        return effects

    def _round(self, now: float) -> list[Effect]:
        patience = 2.0 if now < self._late_until else 1.0
        effects: list[Effect] = []
        self._table.pardon(now=now)
        if self.view.is_public:
            effects += self._table.expire(now=now, patience=patience)
        else:
            self._table.forget_old(now=now)
        gone = self._leases.expire(now=now, patience=patience)
        if self.view.is_public:
            self._partners.next_round()
            message = self.view.round_message(now)
            called = self._partners.some(self.rules.fanout, self.view.at_least(self.rules.fanout, now))
            effects += [self._call(peer, message, now) for peer in called]
        return effects + gone

    def _revive(self, now: float) -> list[Effect]:
        """Call a dead node. It answers if it was only on the other side of a partition."""
        stones = [stone for stone in self._table.dead.values() if stone.addresses]
        if not stones:
            return []
        stone = self._random.choice(stones)
        message = self.view.round_message(now)
        return [self._post(stone.signed.node, stone.addresses, message, now)]

    def _has_to_greet(self, now: float) -> bool:
        """Return True if this node should call a bootstrap: a leaf if it can reach no public, and a few publics at a
        time, to look across a partition. More would overload the bootstraps."""
        if not self.view.is_public:
            return not self.view.usable(now)
        return self._random.random() * len(self._table) < self.rules.greeters

    # -- a leaf's calls --------------------------------------------------------------------------------------

    def _leaf_calls(self, now: float) -> list[Effect]:
        learner = self.view.learner()
        last_resort = learner.node if learner is not None else None
        # Before the choice: a home that is no longer known can never be polled, and would stay due for ever.
        self.homes.keep(lambda node: self._table.find(node) is not None)
        self.homes.choose(self.view.home_candidates(now), last_resort=last_resort, now=now)
        effects: list[Effect] = []
        for home in self.homes.due(now=now):
            if (peer := self._table.find(home.node)) is not None:
                effects.append(self._poll(home, peer, now))
        if now >= self._refresh_at:
            asked = self.view.some(1, self._random, now=now)
            effects += [self._call(peer, self.view.refresh_message(now), now) for peer in asked]
            # If it knows too few to choose homes from, it asks again soon.
            enough = asked and len(self._table) > self.rules.homes
            self._refresh_at = now + self._period(self.rules.refresh_rounds if enough else self.rules.scarce_rounds)
        return effects

    def _poll(self, home: Home, peer: Peer, now: float) -> Effect:
        message = self.view.poll_message(
            tells_record=home.told != self.view.own.order,
            tells_head=home.knows != self.view.newest,
            # A first poll is not held, so that a leaf learns at once whether this home serves it. Later ones vary: a
            # head answers all polls of all leaves at once, and without variation they would stay in step for ever.
            hold_s=self._vary(self.rules.hold_s) if home.served else self.rules.hold_s / 100,
        )
        home.told = self.view.own.order
        home.poll = self._call(peer, message, now)
        return home.poll

    # -- being called ----------------------------------------------------------------------------------------

    def affords(self, host: str, message: Exchange, *, now: float) -> bool:
        """Return False if the callers from the network of `host` have used up their time. They should call later."""
        # Unless nothing is asked, the answer walks the whole table.
        entries = len(message.digest) // ENTRY_BYTES + (len(self._table) if message.asks else 0)
        heads = message.head not in (b"", self.view.head)
        cost = ENTRY_US * entries + RECORD_US * len(message.records) + SIGNATURE_US * heads
        return not self._work.take(network_of(host), now=now, cost=cost)

    def receive(self, caller: NodeId, message: Exchange, *, host: str, now: float) -> list[Effect]:
        """Take in what an authenticated `caller` at `host` says. Call `answer` afterwards, at once or when a held poll
        ends."""
        effects: list[Effect] = []
        self._hear(caller, now)
        if message.hold_s > 0 and self._table.find(caller) is None:
            self._leases.renew(caller, network=network_of(host), now=now)
        latest = now - self.rules.transit_s
        effects += self._take_in(message.records, message.digest, latest, now, direct=(caller, now), host=host)
        self._table.prove(caller, lambda address: caller_of(address.host) == caller_of(host))
        return effects + self._hear_head(message.head, now)

    def holds(self, message: Exchange) -> bool:
        """Return True if a poll has to wait, because its caller lacks nothing."""
        return message.hold_s > 0 and not self.view.has_newer_head(message) and not self.view.has_moved_learner(message)

    def answer(self, caller: NodeId, message: Exchange, *, now: float) -> ExchangeReply:
        """Return what `caller` lacks."""
        return answer_to(self.view, caller, message, random=self._random, now=now)

    # -- calling ---------------------------------------------------------------------------------------------

    def introduced(self, signed: SignedRecord, address: Address, *, now: float) -> list[Effect]:
        """Take the hello of a bootstrap at `address`, and ask it for the others."""
        self._greet_wait_s = FIRST_GREET_S
        if signed.node == self.view.own.node:
            return []
        effects = self._take_in((signed.sealed,), b"", now, now, direct=(signed.node, now), called=address.host)
        self._hear(signed.node, now)
        self._table.prove(signed.node, lambda claimed: claimed == address)
        # Greet again soon if it taught nothing: it may be a leaf, and the call that follows may be lost.
        self._greet_at = now + max(HELLO_S, self._greet_period(now))
        message = self.view.round_message(now) if self.view.is_public else self.view.refresh_message(now)
        return [*effects, self._post(signed.node, (address,), message, now)]

    def answered(self, call: Post, reply: ExchangeReply, *, now: float) -> list[Effect]:
        """Take the answer to a call."""
        sent_at = call.sent_at
        self._hear(call.node, sent_at)
        home = self.homes.polled_by(call)
        if home is not None:
            self.homes.answered(home, full=reply.full, held_s=now - sent_at, now=now)
            home.told = -1 if self.view.own.prefix in reply.wanted else home.told
        direct, called = (call.node, sent_at), call.address.host
        effects = self._take_in(reply.records, reply.digest, sent_at, now, direct=direct, called=called)
        self._table.prove(call.node, lambda address: address == call.address)
        effects += self._hear_head(reply.head, now) + self._refute(reply.refute, now)
        if home is not None:
            home.knows = self.view.newest if reply.head == self.view.head else call.message.newest
        return effects + self._send_wanted(call, reply.wanted, now)

    def failed(self, call: Post, *, now: float) -> list[Effect]:
        """Note that a call failed: the other node may be dead, or only the connection."""
        peer = self._table.find(call.node)
        if peer is not None:
            peer.failed(self.rules.round_s, now=now)
        if (home := self.homes.polled_by(call)) is not None:
            patience = MAX_FAILURES if peer is not None and peer.proven else 1
            self.homes.failed(home, took_s=now - call.sent_at, patience=patience, now=now)
        if call.message.asks and not self.view.is_public:
            self._refresh_at = min(self._refresh_at, now + self._period(1))
        return []

    def greet_failed(self, *, now: float) -> None:
        """Note that no bootstrap answered. Wait longer each time while no other node can be reached."""
        self._greet_wait_s = min(MAX_GREET_S, 2 * self._greet_wait_s)
        self._greet_at = now + self._greet_period(now)

    # -- what this node says of itself -----------------------------------------------------------------------

    def take_head(self, sealed: bytes, *, now: float) -> list[Effect]:
        """Take a signed head, published by this node or passed on by another."""
        if not sealed or sealed == self.view.head:
            return []
        try:
            version = self._open_head(sealed)
        except ProtocolError:
            return [Rejected(reason="bad_head")]
        if self.view.newest is not None and version <= self.view.newest:
            return []
        self.view.newest, self.view.head = version, sealed
        return [Wake(), *(self._push(now, head=True) if self.view.is_public else [])]

    def set_held(self, version: VersionId | None, *, now: float) -> None:
        """Say within a sixth of the usual time which version this node holds: it changes with every publication."""
        if version != self._owner.held:
            self._owner.held = version
            soon = self.rules.reissue_rounds * self.rules.round_s / 6
            self._reissue_at = min(self._reissue_at, now + soon)

    def set_reachability(
        self, reachability: Reachability, addresses: tuple[Address, ...], *, now: float
    ) -> list[Effect]:
        """Become public at proven addresses, or a leaf again, and say so at once."""
        if (reachability, addresses) == (self._owner.reachability, self._owner.addresses):
            return []
        was_public = self.view.is_public
        self._owner.reachability, self._owner.addresses = reachability, addresses
        effects = self._owner.issue()
        self._fresh[self.view.own.prefix] = self.view.own
        if self.view.is_public:
            self.homes.homes.clear()
            self._round_at = now
        return effects + (self._push(now) if self.view.is_public or was_public else [])

    def leave(self, *, now: float) -> list[Effect]:
        """Tell a few others, so that they need not wait until this node is declared dead."""
        homes = [self._table.find(home.node) for home in self.homes.homes]
        told = [peer for peer in homes if peer] or self.view.some(self.rules.push_fanout, self._random, now=now)
        self._owner.reachability = "gone"
        effects = self._owner.issue()
        message = self.view.push_message([self.view.own], now)
        return [*effects, *(self._call(peer, message, now) for peer in told)]

    # -- records and beats -----------------------------------------------------------------------------------

    def _hear(self, node: NodeId, heard_at: float) -> None:
        if (peer := self._table.find(node)) is not None:
            peer.heard(heard_at)

    def _take_in(
        self,
        sealed: Iterable[bytes],
        digest: bytes,
        latest: float,
        now: float,
        *,
        direct: tuple[NodeId, float],
        host: str = "",
        called: str = "",
    ) -> list[Effect]:
        """Take in records, and the beats of a digest whose ages count back from `latest`. `direct` is the speaker and
        when it spoke. A record without an age brings no beat, so it makes no unknown node known. Signatures are checked
        of what would change something, as far as the network of the caller at `host`, or the node that was `called`,
        has time left; the rest will be offered again."""
        effects: list[Effect] = []
        try:
            beats = {prefix: heard_at for prefix, (_, heard_at) in seen_in(digest, latest=latest).items()}
        except ProtocolError:
            effects.append(Rejected(reason="malformed_digest"))
            beats = {}
        speaker, spoke_at = direct
        there = caller_of(host or called)
        fresh: list[SignedRecord] = []
        for one in sealed:
            try:
                signed = self._read_record(one)
                heard_at = spoke_at if signed.node == speaker else beats.get(signed.prefix, -math.inf)
                is_there = signed.node == speaker and there in {caller_of(at.host) for at in signed.record.addresses}
                verdict = self._table.judge(signed, heard_at, is_there=is_there, now=now)
                if self._wants(signed, verdict):
                    if self._work.take(network_of(host) if host else speaker, now=now, cost=SIGNATURE_US):
                        effects.append(Rejected(reason="over_budget"))
                        continue
                    self._open_record(one)
            except ProtocolError:
                # Ignore the rest: an honest node passes on only records that open, and signatures cost time.
                effects.append(Rejected(reason="bad_record"))
                break
            if signed.node == self.view.own.node:
                effects += self._overtake(signed, now) if signed.body != self.view.own.body else []
            elif self._admit(signed, heard_at, verdict, now, effects):
                fresh.append(signed)
        for prefix, heard_at in beats.items():
            peer = self._table.by_prefix.get(prefix)
            if peer is not None and heard_at > peer.heard_at:
                peer.heard_at = heard_at
        self._push_later(fresh, now)
        return effects

    def _wants(self, signed: SignedRecord, verdict: str) -> bool:
        """Return True if a record would change something."""
        if signed.node == (own := self.view.own).node:
            return signed.body != own.body and signed.order >= own.order
        return self._leases.wants(signed) or verdict in CHANGES

    def _admit(self, signed: SignedRecord, heard_at: float, verdict: str, now: float, effects: list[Effect]) -> bool:
        self._leases.tell(signed)
        effects += self._table.admit(signed, heard_at, verdict, now=now)
        if verdict == "new":
            self._make_room(signed.node)
        if verdict in ("new", "changed"):
            self._leases.end(signed.node)
            effects += [Wake()] if signed.record.role == "learner" else []
        return verdict in ("new", "changed", "gone")

    def _make_room(self, new: NodeId) -> None:
        """On a leaf that knows enough publics, forget the stalest that is neither a home nor the learner nor new."""
        if self.view.is_public or len(self._table) <= self.rules.leaf_publics:
            return
        kept = {new, *(home.node for home in self.homes.homes)}
        spare = [p for p in self._table if p.signed.node not in kept and p.signed.record.role != "learner"]
        if spare:
            self._table.forget(min(spare, key=lambda peer: peer.heard_at))

    def _refute(self, sealed: bytes, now: float) -> list[Effect]:
        """Answer a node that believes this one dead: it has to hear of a higher order."""
        if not sealed:
            return []
        try:
            claimed = self._open_record(sealed)
        except ProtocolError:
            return [Rejected(reason="bad_record")]
        return self._overtake(claimed, now) if claimed.node == self.view.own.node else []

    def _hear_head(self, sealed: bytes, now: float) -> list[Effect]:
        before = self.view.newest
        effects = self.take_head(sealed, now=now)
        newest = self.view.newest
        return effects if newest is None or newest == before else self._owner.outlive(newest) + effects

    def _overtake(self, claimed: SignedRecord, now: float) -> list[Effect]:
        """Go past a record of our own key. Its signature proves that it was issued, perhaps by a former life."""
        if claimed.order < self.view.own.order:
            return []
        if claimed.body != self.view.own.body and self._owner.role != "learner":
            life_s = self.rules.life_rounds * self.rules.round_s
            self._overtaken = [at for at in self._overtaken if at > now - life_s]
            # A process that only just came is the first to give way.
            if len(self._overtaken) >= (OVERTAKEN_YOUNG if now - self._began < life_s else OVERTAKEN):
                return [Doubled()]
            self._overtaken.append(now)
        effects = self._owner.refute(claimed)
        self._push_later([self.view.own], now)
        return effects

    # -- sending ---------------------------------------------------------------------------------------------

    def _push_later(self, fresh: list[SignedRecord], now: float) -> None:
        """Push on what is new, together with whatever else changes within a moment."""
        if fresh and self.view.is_public:
            self._fresh.update((signed.prefix, signed) for signed in fresh)
            self._push_at = self._push_at or now + self.rules.push_delay_s

    def _push(self, now: float, *, head: bool = False) -> list[Effect]:
        records = fitting(self._fresh.values())
        for signed in records:
            del self._fresh[signed.prefix]
        self._push_at = now + self.rules.push_delay_s if self._fresh else None
        message = self.view.push_message(records, now, head=self.view.head if head else b"")
        told = self._partners.some(self.rules.push_fanout, self.view.at_least(self.rules.push_fanout, now))
        return [self._call(peer, message, now) for peer in told]

    def _send_wanted(self, call: Post, wanted: tuple[bytes, ...], now: float) -> list[Effect]:
        if not call.message.asks:
            return []
        records = fitting(signed for signed in map(self.view.record_of, wanted) if signed is not None)
        if not records:
            return []
        message = self.view.push_message(records, now)
        return [self._post(call.node, (call.address,), message, now)]

    def _call(self, peer: Peer, message: Exchange, now: float) -> Post:
        tries = self._table.tries
        due = tuple(a for a in peer.addresses if peer.proven or tries.is_due(a, now=now))
        call = self._post(peer.signed.node, due or peer.addresses, message, now)
        if not peer.proven:
            tries.tried(call.address, now=now)
        return call

    def _post(self, node: NodeId, addresses: tuple[Address, ...], message: Exchange, now: float) -> Post:
        """Call one of a node's addresses, chosen at random."""
        address = self._random.choice(addresses)
        # A signal takes a quarter of a round to go around the world and back.
        timeout_s = self.rules.round_s + message.hold_s
        return Post(node=node, address=address, message=message, timeout_s=timeout_s, sent_at=now)

    def _period(self, rounds: float) -> float:
        return self._vary(rounds * self.rules.round_s)

    def _greet_period(self, now: float) -> float:
        calm = self.view.usable(now)
        return self._period(self.rules.bootstrap_rounds) if calm else self._vary(self._greet_wait_s)

    def _vary(self, seconds: float) -> float:
        return seconds * self._random.uniform(1 - self.rules.jitter, 1 + self.rules.jitter)
