"""How near to the physical limit a version reaches many peers: the real cores on the simulator's clock.

bin/python -m benchmarks.broadcast_sim --peers 10,100,1000 --json
bin/python -m benchmarks.broadcast_sim --profile benchmarks/profiles/heterogeneous.toml --schemes mesh,forest,chain
bin/python -m benchmarks.broadcast_sim --profile benchmarks/profiles/heterogeneous.toml --kill fastest@0.5

Without a profile: uplinks log-normal (median 30 Mbit/s, sigma 0.9, drawn again outside of 5 to 200), downlinks twice
that and 50 at least, a learner of 100; 70 % leaves; 50 ms one way between any two; of the packets 1 % is lost, sent
again and costs a round trip, but slows no connection down otherwise (as BBR); 5 % of the peers die at times drawn from
the bound's span, and are missed 3 s later. The bound is the largest of the four terms for all peers as they are at the
start, the dead included, on the bare payload: headers of Ethernet, IP and TCP cost 4.6 % in the simulation, so that no
ratio can be under 1.046.

With a profile (as of benchmarks/broadcast.py, where hosts, faults and bounds are explained): no latency, no loss, no
deaths but those asked for, and a kill is noticed at once, as the kernel of a killed process tells it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from benchmarks import Figures, ended, links, listed, parser_of, said
from benchmarks.links import BYTES_PER_MBIT, LEARNER, BadProfile, Fault, Profile, bound_with_faults_s
from swarm.broadcast.forest.courier import TreeCourier
from swarm.plan.simulate.world import World
from swarm.types import NodeId
from tests.simulator.broadcast.network import PACKET_OVERHEAD, NetworkShape
from tests.simulator.broadcast.schemes import SCHEMES, bound_bytes_per_s
from tests.simulator.broadcast.seeds import draw_uplink
from tests.simulator.broadcast.swarm import BroadcastSwarm, Host

MIB = 1 << 20
LEARNER_MBIT, LEAF_SHARE = 100.0, 0.7
SEED = 1
DETECT_S = 3.0
PROBE_S = 0.02  # How often a fault looks whether its time has come
GIVE_UP_BOUNDS = 40.0  # A transfer that takes this many times the bound has failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One transfer to simulate."""

    name: str
    learner: Host
    peers: list[Host]
    size_bytes: int
    shape: NetworkShape
    bound_s: float
    detect_s: float
    scheme: str | None = None
    not_for: frozenset[NodeId] = frozenset()


def run(case: Case, befall: Callable[[BroadcastSwarm, Random], None]) -> Figures:
    """Simulate it; `befall` schedules what goes wrong."""
    began = time.process_time()
    draw = Random(f"{case.name} {SEED}")
    world = World(draw)
    given: Figures = {"size_bytes": case.size_bytes, "scheme": case.scheme, "detect_s": case.detect_s}
    swarm = BroadcastSwarm(world, case.shape, case.learner, case.peers, **given)
    swarm.start()
    befall(swarm, draw)
    whole = swarm.run(GIVE_UP_BOUNDS * case.bound_s, not_for=case.not_for)
    waited = [member for member in swarm.live_peers() if member.host.node not in case.not_for]
    times = sorted(member.completed_at for member in waited if member.completed_at is not None)
    trees = [member.courier for member in waited if isinstance(member.courier, TreeCourier)]
    last_s = times[-1] if whole else None
    return {
        "scheme": swarm.plan.scheme,
        "peers": len(case.peers),
        "live_peers": len(waited),
        "size_bytes": case.size_bytes,
        "chunk_bytes": swarm.chunk_bytes,
        "last_peer_s": last_s,
        "first_peer_s": times[0] if times else None,
        "half_of_peers_s": times[len(times) // 2] if times else None,
        "bound_s": case.bound_s,
        "ratio": last_s / case.bound_s if last_s is not None else None,
        "learner_copies": swarm.network.sent_bytes(case.learner.node) / case.size_bytes,
        "duplicate_share": swarm.duplicates / (swarm.count * len(case.peers)),
        "pulled_share": sum(tree.pulled for tree in trees) / (swarm.count * len(case.peers)),
        "events": world.events,
        "cpu_s": time.process_time() - began,
    }


# -- many peers ----------------------------------------------------------------------------------------------------


def random_case(options: argparse.Namespace, peers: int, scheme: str) -> Case:
    """The swarm that the targets speak of."""
    draw = Random(f"hosts {peers} {SEED}")
    leaves = round(LEAF_SHARE * peers)
    public = [False] * leaves + [True] * (peers - leaves)
    draw.shuffle(public)
    ups = [draw_uplink(draw) for _ in public]
    hosts = [
        _host_of(f"peer-{number}", up, max(2 * up, 50 * BYTES_PER_MBIT), one)
        for number, (up, one) in enumerate(zip(ups, public, strict=True))
    ]
    learner = _host_of("learner", LEARNER_MBIT * BYTES_PER_MBIT, math.inf, True)
    size_bytes = round(options.size_mib * MIB)
    slowest = min(host.down_bytes_per_s for host in hosts)
    rate = bound_bytes_per_s(learner.up_bytes_per_s, [host.profile for host in hosts], slowest_downlink=slowest)
    return Case(
        name=f"{peers} peers",
        learner=learner,
        peers=hosts,
        size_bytes=size_bytes,
        shape=NetworkShape(latency_s=options.latency, loss_share=options.loss, overhead=PACKET_OVERHEAD),
        bound_s=size_bytes / rate,
        detect_s=DETECT_S,
        scheme=None if scheme == "relay" else scheme_named(scheme),
    )


def _host_of(name: str, up: float, down: float, public: bool) -> Host:
    return Host(node=NodeId(name), public=public, up_bytes_per_s=up, down_bytes_per_s=down)


def die(share: float, bound_s: float, swarm: BroadcastSwarm, draw: Random) -> None:
    """So many of the peers die while the transfer would last at best."""
    peers = [member.host.node for member in swarm.live_peers()]
    for node in draw.sample(peers, round(share * len(peers))):
        swarm.world.schedule(draw.uniform(0, bound_s), f"death {node}", partial(swarm.kill, node))


# -- a profile -----------------------------------------------------------------------------------------------------


def profile_case(options: argparse.Namespace, profile: Profile, faults: list[Fault], scheme: str) -> Case:
    """The same hosts as in the namespaces."""
    hosts = {
        number: _host_of(
            f"host-{number}", link.up_mbit * BYTES_PER_MBIT, link.down_mbit * BYTES_PER_MBIT, link.reachable
        )
        for number, link in profile.hosts.items()
    }
    size_bytes = round(options.size_mib * MIB)
    return Case(
        name=profile.name,
        learner=hosts[LEARNER],
        peers=[hosts[number] for number in profile.peers],
        size_bytes=size_bytes,
        shape=NetworkShape(overhead=PACKET_OVERHEAD),
        bound_s=bound_with_faults_s(size_bytes, profile, faults),
        detect_s=0.0,
        scheme=None if scheme == "relay" else scheme_named(scheme),
        not_for=frozenset(hosts[fault.host].node for fault in faults if fault.kind == "stall"),
    )


def befall_all(faults: list[Fault], swarm: BroadcastSwarm, draw: Random) -> None:
    for fault in faults:
        _await(swarm, fault)


def _await(swarm: BroadcastSwarm, fault: Fault) -> None:
    """Bring it about when the median peer has received its fraction."""
    missing = statistics.median(member.missing for member in swarm.live_peers())
    if 1 - missing / swarm.count < fault.fraction:
        swarm.world.schedule(PROBE_S, "probe", lambda: _await(swarm, fault))
        return
    node = NodeId(f"host-{fault.host}")
    if fault.kind == "kill":
        swarm.kill(node)
        return
    stalled = links.STALLED_MBIT * BYTES_PER_MBIT
    down = stalled if fault.kind == "stall" else None
    swarm.network.set_rates(node, up_bytes_per_s=stalled, down_bytes_per_s=down)


def scheme_named(text: str) -> str:
    if text in SCHEMES:
        return text
    raise BadProfile(f"no scheme is named {text!r}: relay, {', '.join(SCHEMES)}")


# -- command line --------------------------------------------------------------------------------------------------


def rows_of(options: argparse.Namespace) -> list[Figures]:
    """Runs what is asked for, printing each row as it comes."""
    rows = []
    if options.profile is None:
        for peers in options.peers:
            for scheme in options.schemes:
                case = random_case(options, peers, scheme)
                rows.append(said(run(case, partial(die, options.dying, case.bound_s))))
        return rows
    profile = links.read_profile(options.profile)
    faults = links.read_faults(options, profile)
    for scheme in options.schemes:
        rows.append(said(run(profile_case(options, profile, faults, scheme), partial(befall_all, faults))))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--peers", type=listed(int), default=[10, 100, 1000], help="how many, several with commas")
    parser.add_argument("--size-mib", type=float, default=128.0, help="encoded size of the version")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds one way")
    parser.add_argument("--loss", type=float, default=0.01, help="share of packets")
    parser.add_argument("--dying", type=float, default=0.05, help="share of peers that die")
    links.add_flags(parser, help="without latency, loss or deaths")
    parser.add_argument("--schemes", type=listed(str), default=["relay"], help=f"of relay,{','.join(SCHEMES)}")
    options = parser.parse_args(arguments)
    try:
        rows = rows_of(options)
    except BadProfile as error:
        print(error, file=sys.stderr)
        return 2
    return ended(options, {"rows": rows}, met=all(row["ratio"] is not None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
