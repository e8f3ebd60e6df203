"""How long a version takes to reach each peer of a fleet: the broadcast's own plan, with bytes that flow like water.

Theory of operation. In a mesh every peer that lacks something is served equally, up to its own downlink: rates fill to
one level, which rises whenever a peer is done. It is bound by the sum of all uplinks, by the
learner's uplink while chunks are still dealt, and by what publics and the learner send to leaves (two leaves are never
linked). Everybody waits for the slowest downlink, unless it is so slow that relays set it aside. In trees each link has
its own rate: the least of the rate at which its parent receives that stripe, its share of the parent's uplink over all
its slots, and its share of the child's downlink over all stripes. Shares are max-min fair. Chunks are passed on whole,
hop by hop, which adds to the flow's time.

Left out: latency, loss, deaths, pulls, and that shares follow queues. docs/broadcast.md compares it with the simulation
of every chunk. Install times measured in a running swarm replace the planned ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median

from swarm.broadcast.forest.planner import PeerProfile, Tree, VersionPlan, children_of, plan_of, slots_of
from swarm.pay.fleet import Disseminate, Dissemination, Worker
from swarm.types import NodeId


def sustained(once: Disseminate, *, period_s: float) -> Disseminate:
    """Turn `once`, the plan of a single version, into the plan of one of many versions, published every `period_s`.

    A worker that needs m periods misses some versions: it starts the newest when the previous one has arrived. What it
    holds is up to m - 1 periods older, as if each version came that much later. Its line is never idle, so it moves one
    version per `install_s`, not per period.
    """

    def disseminate(workers: Sequence[Worker]) -> Dissemination:
        plan = once(workers)
        apart = [max(1, math.ceil(install_s / period_s)) for install_s in plan.install_s]
        if max(apart, default=1) == 1:
            return plan
        taken = [min(1.0, period_s / install_s) if install_s else 1.0 for install_s in plan.install_s]
        received = sum(down * share for down, share in zip(plan.down_bytes, taken, strict=True))
        return Dissemination(
            install_s=tuple(s + (m - 1) * period_s for s, m in zip(plan.install_s, apart, strict=True)),
            down_bytes=tuple(down * share for down, share in zip(plan.down_bytes, taken, strict=True)),
            up_bytes=tuple(up * share for up, share in zip(plan.up_bytes, taken, strict=True)),
            learner_up_bytes=plan.learner_up_bytes * received / sum(plan.down_bytes),
        )

    return disseminate


def measured_first(planned: Disseminate, installs_s: Mapping[str, float]) -> Disseminate:
    """Return `planned` with measured install times in place of planned ones. Standby samplers get every version too, so
    a measured time holds for any set. An unmeasured worker gets the median of its class, or of all; a plan on unknown
    uplinks is believed only if nothing was measured at all."""

    def disseminate(workers: Sequence[Worker]) -> Dissemination:
        plan = planned(workers)
        usual: dict[str | None, list[float]] = {}
        for worker in workers:
            if (measured := installs_s.get(worker.name)) is not None:
                usual.setdefault(worker.device_class, []).append(measured)
        everybody = median(installs_s.values()) if installs_s else None
        return replace(
            plan,
            install_s=tuple(
                _first(
                    installs_s.get(worker.name),
                    median(usual[worker.device_class]) if worker.device_class in usual else None,
                    everybody,
                    install_s if math.isfinite(install_s) else None,
                )
                for worker, install_s in zip(workers, plan.install_s, strict=True)
            ),
        )

    return disseminate


def _first(*values: float | None) -> float:
    return next((value for value in values if value is not None), 0.0)


WIRE_BYTES = 1514 / 1448  # Bytes of Ethernet, IP and TCP per byte of payload: links are shaped by these
CHUNK_HEADER_BYTES = 48  # Frame header, index, kind, and TLS record

ROUNDS = 12
"""Rounds of fixing the rates of trees: a link's limit is found within about as many rounds as the trees are deep."""

STEADY = 1e-3  # Rates that change by less between two rounds are final


SET_ASIDE = 0.25
"""A mesh relay sets aside children that are slower than this share of the average, and waits for all others."""

RELIEF_S = 3.0
"""Until children of a slow parent get another one: they complain, the learner gathers complaints and plans again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Seconds from publication until each peer has all bytes, and bytes on the wire: received by each peer, sent by
    each node including the learner."""

    arrival_s: dict[NodeId, float]
    up_bytes: dict[NodeId, float]
    down_bytes: float


def flow_of(plan: VersionPlan, *, encoded_bytes: float, downlinks: Mapping[NodeId, float]) -> Flow:
    """Follow a version of `encoded_bytes`. A node missing from `downlinks` (bytes/s) has an unlimited one."""
    chunk = min(plan.chunk_bytes, encoded_bytes)
    wire = WIRE_BYTES * (1 + CHUNK_HEADER_BYTES / chunk)
    caps = {node: downlinks.get(node) or math.inf for node in plan.peers}
    if plan.scheme == "mesh":
        return _mesh(plan, encoded_bytes * wire, chunk * wire, caps)
    return _trees(plan, encoded_bytes * wire, chunk * wire, caps)


def level_of(caps: Iterable[float], capacity: float) -> float:
    """Return the level to which water of `capacity` fills vessels of these caps, or inf if all are full before."""
    ascending = sorted(caps)
    left = capacity
    for at, cap in enumerate(ascending):
        if cap * (len(ascending) - at) >= left:
            return left / (len(ascending) - at)
        left -= cap
    return math.inf


# -- mesh ----------------------------------------------------------------------------------------------------------


def _mesh(plan: VersionPlan, nbytes: float, chunk: float, caps: dict[NodeId, float]) -> Flow:
    peers, learner = plan.peers, plan.learner.uplink_bytes_per_s
    if not peers:
        return Flow(arrival_s={}, up_bytes={plan.learner.node: 0.0}, down_bytes=nbytes)
    relays = {node: min(peer.uplink_bytes_per_s, caps[node]) for node, peer in peers.items()}
    leaves = {node for node, peer in peers.items() if not peer.public}
    rate = _dealt(relays, caps, learner, leaves)
    taken = {node: min(cap, rate) for node, cap in caps.items()}
    to_leaves = sum(taken[node] for node in leaves) - sum(relays[node] for node in peers if node not in leaves)
    surplus = max(rate, sum(taken.values()) - sum(relays.values()), to_leaves)
    learner_bytes = nbytes * min(surplus, learner) / rate
    up_bytes = {node: (len(peers) * nbytes - learner_bytes) * up / sum(relays.values()) for node, up in relays.items()}
    up_bytes[plan.learner.node] = learner_bytes
    everybody = learner + sum(relays.values())

    def level(waiting: Sequence[NodeId]) -> float:
        return rate if len(waiting) == len(peers) else level_of((caps[node] for node in waiting), everybody)

    last_copy_s = chunk / learner + (len(peers) - 1) * chunk * len(peers) / sum(relays.values())
    arrival_s = {node: at + last_copy_s for node, at in _filled(nbytes, caps, level).items()}
    return Flow(arrival_s=arrival_s, up_bytes=up_bytes, down_bytes=nbytes)


def _dealt(
    relays: Mapping[NodeId, float], caps: Mapping[NodeId, float], learner: float, leaves: Container[NodeId]
) -> float:
    """Return the bytes/s at which a mesh deals chunks, limited by all uplinks and by the slowest downlink not set
    aside. If some are set aside, the learner sends to relays alone, because its own links would have a queue."""
    publics = sum(uplink for node, uplink in relays.items() if node not in leaves)
    leaf_count = sum(node in leaves for node in relays)
    bound = min(learner, (learner + sum(relays.values())) / len(relays), (learner + publics) / max(1, leaf_count))
    least = SET_ASIDE * sum(min(cap, bound) for cap in caps.values()) / len(caps)
    kept = [node for node, cap in caps.items() if cap >= least]
    if len(kept) < len(caps):
        rest = sum(cap for cap in caps.values() if cap < least)
        copies = sum(relays.values()) - rest
        bound = min(learner, max(copies, 0.0) / max(1, len(kept) - 1) or learner)
        kept_leaves = sum(node in leaves for node in kept)
        bound = min(bound, (publics + bound) / kept_leaves) if kept_leaves > 1 else bound
    return min(bound, *(caps[node] for node in kept))


def _filled(
    nbytes: float, caps: dict[NodeId, float], level: Callable[[Sequence[NodeId]], float]
) -> dict[NodeId, float]:
    """Return when each node has `nbytes` if all waiting nodes are filled to the `level`. Faster nodes finish first."""
    waiting = sorted(caps, key=lambda node: caps[node])
    missing = dict.fromkeys(waiting, nbytes)
    now, full_at = 0.0, {}
    while waiting:
        height = level(waiting)
        first_s = missing[waiting[-1]] / min(height, caps[waiting[-1]])
        now += first_s
        for node in waiting:
            missing[node] -= first_s * min(height, caps[node])
        while waiting and missing[waiting[-1]] <= nbytes * 1e-9:
            full_at[waiting.pop()] = now
    return full_at


# -- trees ---------------------------------------------------------------------------------------------------------


def _trees(plan: VersionPlan, nbytes: float, chunk: float, caps: dict[NodeId, float]) -> Flow:
    stripes = len(plan.trees)
    rates, relieved_rates = _rates(plan, caps, relieved=False), _rates(plan, caps, relieved=True)
    slots = slots_of(plan.trees)
    uplinks = {plan.learner.node: plan.learner.uplink_bytes_per_s}
    uplinks.update((node, peer.uplink_bytes_per_s) for node, peer in plan.peers.items())
    arrival_s = dict.fromkeys(plan.peers, 0.0)
    up_bytes = dict.fromkeys(uplinks, 0.0)
    chunks = math.ceil(nbytes / chunk)
    for stripe, tree in enumerate(plan.trees):
        # The stripe's first chunk travels hop by hop; the rest flows behind it.
        rest = chunk * (len(range(stripe, chunks, stripes)) - 1)
        begins = {plan.learner.node: 0.0}
        for child in _downwards(tree, plan.learner.node):
            parent = tree[child]
            begins[child] = begins[parent] + chunk * slots[parent] / uplinks[parent]
            if rest >= 0:
                flows_s = min(rest / rates[stripe][child], rest / relieved_rates[stripe][child] + RELIEF_S)
                arrival_s[child] = max(arrival_s[child], begins[child] + flows_s)
            up_bytes[parent] += nbytes / stripes
    return Flow(arrival_s=arrival_s, up_bytes=up_bytes, down_bytes=nbytes)


def _rates(plan: VersionPlan, caps: dict[NodeId, float], *, relieved: bool) -> list[dict[NodeId, float]]:
    """Return the bytes/s at which each peer receives each stripe. All stripes get the same share of a downlink, because
    a peer is done when the last stripe is. `relieved`: a peer with a slow downlink does not slow down its children."""
    stripes = len(plan.trees)
    most = {node: cap / stripes for node, cap in caps.items()}
    fed: dict[NodeId, list[tuple[int, NodeId]]] = {}
    for stripe, tree in enumerate(plan.trees):
        for child, parent in tree.items():
            fed.setdefault(parent, []).append((stripe, child))
    uplinks = {node: plan.peers[node].uplink_bytes_per_s for node in fed if node != plan.learner.node}
    uplinks[plan.learner.node] = plan.learner.uplink_bytes_per_s
    passed = [dict.fromkeys([plan.learner.node, *plan.peers], math.inf) for _ in plan.trees]
    rates: list[dict[NodeId, float]] = [{} for _ in plan.trees]
    for _ in range(ROUNDS):
        change = 0.0
        for parent, children in fed.items():
            wanted = [min(passed[stripe][parent], most[child]) for stripe, child in children]
            level = uplinks[parent] / len(children)
            if min(wanted) < level:
                level = level_of(wanted, uplinks[parent])
            for (stripe, child), wish in zip(children, wanted, strict=True):
                rate = min(wish, level)
                change = max(change, abs(rate - rates[stripe].get(child, 0.0)) / rate)
                rates[stripe][child] = rate
                passed[stripe][child] = min(passed[stripe][parent], level) if relieved else rate
        if change < STEADY:
            break
    return rates


def _downwards(tree: Tree, root: NodeId) -> list[NodeId]:
    """Return all peers of a tree, parents before children."""
    children = children_of(tree)
    order = list(children.get(root, ()))
    for node in order:
        order += children.get(node, ())
    return order


LEARNER = NodeId("learner of the version")
"""No worker has this name: names in a swarm have no blanks, and names in a scenario end with a number."""

MAX_SETS = 64
"""Sets whose plans are cached: a search asks for the same few again and again. A thousand workers take a megabyte."""


def disseminate_by(*, learner_uplink_bytes_per_s: float, encoded_bytes: float, apply_s: float) -> Disseminate:
    """Return a planner for versions of `encoded_bytes`, applied `apply_s` after their last byte. An unknown uplink
    counts as the median of the others, an unknown downlink as infinite."""
    learner = PeerProfile(node=LEARNER, public=True, uplink_bytes_per_s=learner_uplink_bytes_per_s)

    @lru_cache(maxsize=MAX_SETS)
    def disseminated(workers: tuple[Worker, ...]) -> Dissemination:
        profiles = [
            PeerProfile(node=NodeId(one.name), public=one.public, uplink_bytes_per_s=one.uplink_bytes_per_s)
            for one in workers
        ]
        plan = plan_of(learner, profiles, encoded_bytes=max(1, round(encoded_bytes)))
        flow = flow_of(
            plan,
            encoded_bytes=encoded_bytes,
            downlinks={NodeId(one.name): one.downlink_bytes_per_s for one in workers},
        )
        return Dissemination(
            install_s=tuple(flow.arrival_s[peer.node] + apply_s for peer in profiles),
            down_bytes=(flow.down_bytes,) * len(workers),
            up_bytes=tuple(flow.up_bytes[peer.node] for peer in profiles),
            learner_up_bytes=flow.up_bytes[LEARNER],
        )

    def disseminate(workers: Sequence[Worker]) -> Dissemination:
        return disseminated(tuple(workers))

    return disseminate
