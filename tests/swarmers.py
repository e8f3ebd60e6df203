"""Nodes of a swarm for tests of membership: keys, records, and cores that talk to one another by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from random import Random

from swarm.broadcast.version.manifest import Head, open_head, sign_head
from swarm.gossip.membership import Membership
from swarm.gossip.records import (
    AGE_UNIT_S,
    Died,
    Effect,
    Exchange,
    ExchangeReply,
    GossipRules,
    Owner,
    Post,
    Reachability,
    Record,
    Rejected,
    SignedRecord,
    open_record,
    pack_digest,
    read_record,
    sign_record,
    unpack_digest,
)
from swarm.gossip.table import Table
from swarm.net.signing import SigningKey, swarm_id_of
from swarm.types import Address, NodeId, Role, SwarmId, VersionId
from tests.builders import v

RULES = GossipRules()
LEARNER = SigningKey.from_bytes(bytes(31) + b"\1")
THE_SWARM = swarm_id_of(LEARNER.public_bytes)
DEAD_S = RULES.dead_rounds * RULES.round_s
LIFE_S = RULES.life_rounds * RULES.round_s
ELSEWHERE = "20.255.255.1"
"""Where callers are that have no address of their own."""


@cache
def key(number: int) -> SigningKey:
    """Key 0 is the learner's."""
    return LEARNER if number == 0 else SigningKey.from_bytes(number.to_bytes(4, "big") * 8)


def address(number: int, *, port: int = 7700) -> Address:
    """Each number is in a /24 of its own."""
    return Address(host=f"20.{number >> 8 & 255}.{number & 255}.{1 + (number >> 16)}", port=port)


def anywhere(_: Address) -> bool:
    return True


def role_of(owner: SigningKey) -> Role:
    return "learner" if owner is LEARNER else "relay"


def signed(
    number: int,
    sequence: int = 0,
    *,
    generation: int = 1,
    addresses: Sequence[Address] | None = None,
    reachability: Reachability = "public",
    swarm: SwarmId = THE_SWARM,
    role: Role | None = None,
    held: VersionId | None = None,
    leaves: int = 0,
) -> SignedRecord:
    """What node `number` says of itself."""
    owner = key(number)
    record = Record(
        key=owner.public_bytes,
        swarm=swarm,
        generation=generation,
        sequence=sequence,
        role=role or role_of(owner),
        reachability=reachability,
        addresses=(address(number),) if addresses is None else tuple(addresses),
        held=held,
        leaves=leaves,
    )
    return sign_record(record, owner)


def table(rules: GossipRules = RULES, dialable: Callable[[Address], bool] = anywhere) -> Table:
    return Table(rules, dialable)


def admit(one: Table, record: SignedRecord, heard_at: float, *, now: float) -> tuple[str, list[Effect]]:
    """Have a table take in a record, and return what it made of it."""
    verdict = one.judge(record, heard_at, now=now)
    return verdict, one.admit(record, heard_at, verdict, now=now)


def open_version(sealed: bytes) -> VersionId:
    return open_head(sealed, LEARNER.public_bytes).version


@cache
def head(version: int, incarnation: int = 0, *, learner: SigningKey = LEARNER) -> bytes:
    """A head as the learner signs it."""
    named = Head(
        swarm=swarm_id_of(learner.public_bytes),
        learner_key=learner.public_bytes,
        version=v(version, incarnation),
        base=None,
        layout_digest=bytes(32),
        layout_bytes=1000,
        table_digest=bytes(32),
        table_bytes=1000,
    )
    return sign_head(named, learner)


def core(
    number: int,
    *,
    public: bool = True,
    generation: int = 1,
    rules: GossipRules = RULES,
    now: float = 0.0,
    dialable: Callable[[Address], bool] = anywhere,
) -> Membership:
    """Node `number`; a public one at `address(number)` with nothing left to push."""
    owner = Owner(
        key(number),
        THE_SWARM,
        role_of(key(number)),
        generation=generation,
        addresses=(address(number),) if number == 0 else (),
    )
    made = Membership(
        owner,
        rules,
        table(rules, dialable),
        read_record=partial(read_record, swarm=THE_SWARM),
        open_record=partial(open_record, swarm=THE_SWARM),
        open_head=open_version,
        random=Random(number),
        now=now,
    )
    if public:
        made.set_reachability("public", (address(number),), now=now)
    return made


def ages(*entries: tuple[SignedRecord, float]) -> bytes:
    """A digest that claims these ages in seconds."""
    return pack_digest((one.prefix, one.order, age_s) for one, age_s in entries)


def ages_in(digest: bytes) -> dict[bytes, float]:
    return {prefix: age * AGE_UNIT_S for prefix, _, age in unpack_digest(digest)}


def introduce(
    one: Membership, *others: SignedRecord, now: float = 0.0, age_s: float = 0.0, proven: bool = True
) -> list[Effect]:
    """Have `one` learn of `others` from a stranger, and reach them unless they are not `proven`."""
    told = Exchange(records=tuple(other.sealed for other in others), digest=ages(*((o, age_s) for o in others)), asks=0)
    effects = one.receive(key(4_000_000).node_id, told, host=ELSEWHERE, now=now)
    for other in others if proven else ():
        one.view.table.prove(other.node, anywhere)
    return effects


def call_to(number: int, *, now: float) -> Post:
    """A call of a node, as of a round."""
    message = Exchange()
    return Post(
        node=key(number).node_id, address=address(number), message=message, timeout_s=RULES.round_s, sent_at=now
    )


def calls_in(effects: Sequence[Effect]) -> list[Post]:
    return [effect for effect in effects if isinstance(effect, Post)]


def reasons(effects: Sequence[Effect]) -> list[str]:
    return [effect.reason for effect in effects if isinstance(effect, Rejected)]


def deaths(effects: Sequence[Effect]) -> list[NodeId]:
    return [effect.node for effect in effects if isinstance(effect, Died)]


def deliver(
    call: Post, source: Membership, target: Membership, *, now: float, held_s: float = 0.0
) -> tuple[list[Effect], list[Effect]]:
    """Carry a call to `target` and its answer back: what both made of it."""
    host = source.view.own.record.addresses[0].host if source.view.own.record.addresses else ELSEWHERE
    received = target.receive(source.view.own.node, call.message, host=host, now=now)
    answer = target.answer(source.view.own.node, call.message, now=now + held_s)
    return received, source.answered(call, answer, now=now + held_s)


def run_until(one: Membership, until: float, *, now: float) -> list[tuple[float, Effect]]:
    """Let time pass for a node whose calls all fail."""
    done: list[tuple[float, Effect]] = []
    while (due := max(now, one.deadline())) <= until:
        now = due
        effects = one.tick(now=now)
        for call in calls_in(effects):
            effects += one.failed(call, now=now)
        done += [(now, effect) for effect in effects]
        now = math.nextafter(now, math.inf)
    return done


def reply(**fields: object) -> ExchangeReply:
    return ExchangeReply(**fields)  # type: ignore[arg-type]
