"""`bin/python -m tests.simulator`: one run by its seed, or many seeds over random scenarios.

    bin/python -m tests.simulator --seed 7 --scenario churn  one run and its figures; --trace prints every event
    bin/python -m tests.simulator --seeds 1000  random scenarios of seeds 0..999, up to the first that fails
    bin/python -m tests.simulator --seeds 200 --scenario unlimited-hold  no faults, and not one stale rollout (I7)
    bin/python -m tests.simulator --seed 0 --scenario tiny --crash-at 17:both  a crash before the learner's 17th effect
    bin/python -m tests.simulator --seed 0 --scenario tiny --crash-at 17:s1  a crash before the 17th action of a sampler
    bin/python -m tests.simulator --gossip --seed 7  the same for membership: a random swarm and its faults
    bin/python -m tests.simulator --broadcast --seeds 100-199  for transfers; seeds from, to; or a count

A breach is printed with the command that replays it, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace

from tests.simulator.breach import InvariantBreach
from tests.simulator.broadcast import seeds as broadcast
from tests.simulator.gossip import seeds as gossip
from tests.simulator.rollouts.cluster import Cluster
from tests.simulator.rollouts.scenario import DRAWN, NAMED, RANDOM, Crash, SamplerCrash, parse_crash, scenario_named

RunSeed = Callable[..., gossip.Figures]

REPORT_EVERY_SEEDS = 100


def main() -> int:
    parser = argparse.ArgumentParser(prog="bin/python -m tests.simulator", description="the swarm on a virtual clock")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, metavar="N", help="run this seed")
    which.add_argument(
        "--seeds", type=seeds_of, metavar="N|A-B", help="run the random scenarios of seeds 0..N-1, or A..B"
    )
    parser.add_argument("--scenario", default=RANDOM, choices=(*DRAWN, *NAMED), help="what to simulate")
    parser.add_argument(
        "--crash-at",
        type=crashes_of,
        metavar="N:WHAT,...",
        help="crash trainer, node or both before the learner's N-th effect, or s0, s1, ... before its N-th action",
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--gossip", action="store_true", help="simulate membership instead of rollouts")
    part.add_argument("--broadcast", action="store_true", help="simulate the transfer of a version instead")
    parser.add_argument("--trace", action="store_true", help="print every event")
    arguments = parser.parse_args()
    if (arguments.gossip or arguments.broadcast) and arguments.scenario != RANDOM:
        parser.error("membership and transfers have random scenarios only")
    try:
        if arguments.gossip:
            run_settling(gossip.run_seed, arguments.seed, arguments.seeds, done="whole again", trace=arguments.trace)
        elif arguments.broadcast:
            run_settling(broadcast.run_seed, arguments.seed, arguments.seeds, done="delivered", trace=arguments.trace)
        elif arguments.seed is not None:
            run_one(arguments.seed, arguments.scenario, arguments.crash_at, trace=arguments.trace)
        else:
            run_many(arguments.seeds, arguments.scenario)
    except InvariantBreach as breach:
        print(breach)
        return 1
    return 0


def run_one(seed: int, name: str, crashes: tuple[Crash | SamplerCrash, ...] | None, *, trace: bool) -> None:
    """Run one seed and print its figures."""
    scenario = scenario_named(name, seed)
    if crashes is not None:
        scenario = replace(scenario, crashes=crashes)
    cluster = Cluster(scenario, seed, tell=print if trace else None)
    figures = cluster.run()
    accepted = figures.trained + sum(figures.dropped.values())
    print(f"scenario            {name}")
    print(f"steps               {figures.steps}")
    print(f"virtual seconds     {cluster.world.now:.1f}")
    print(f"events              {cluster.world.events}")
    print(f"learner crashes     {figures.crashes} in {cluster.points} effects")
    print(f"learner idle share  {figures.idle_share:.4f}")
    print(f"mean staleness      {figures.staleness_sum / max(1, figures.trained):.3f}")
    print(f"max staleness       {figures.staleness_max}")
    print(f"evaluations         {figures.evaluations}")
    for verdict, count in sorted(figures.verdicts.items()):
        print(f"verdict {verdict:<11} {count}")
    for reason, count in sorted(figures.dropped.items()):
        print(f"discarded, {reason:<17} {count / max(1, accepted):.4f}")
    print(f"trace digest        {cluster.world.trace_digest()}")


def run_many(seeds: range, name: str) -> None:
    """Run the scenario of each seed; the first breach ends it."""
    events = 0
    for seed in seeds:
        cluster = Cluster(scenario_named(name, seed), seed)
        cluster.run()
        events += cluster.world.events
        if is_reported(seed, seeds):
            print(f"{seed - seeds.start + 1} seeds, {events} events, no breach", flush=True)


def run_settling(run: RunSeed, seed: int | None, seeds: range, *, done: str, trace: bool) -> None:
    """Run one random scenario of a part and print its figures, or many and print the slowest to settle."""
    if seed is not None:
        for name, figure in run(seed, tell=print if trace else None).items():
            print(f"{name.replace('_', ' '):<19} {figure}")
        return
    events, slowest_s = 0, 0.0
    for one in seeds:
        figures = run(one)
        events += figures["events"]
        slowest_s = max(slowest_s, figures["settle_s"])
        if is_reported(one, seeds):
            print(
                f"{one - seeds.start + 1} seeds, {events} events, {done} within {slowest_s:.0f} s, no breach",
                flush=True,
            )


def seeds_of(text: str) -> range:
    """ "N" as 0..N-1, "A-B" as A..B."""
    first, dash, last = text.partition("-")
    return range(int(first), int(last) + 1) if dash else range(int(first))


def crashes_of(text: str) -> tuple[Crash | SamplerCrash, ...]:
    """ "3:node,17:s0" as two crashes."""
    return tuple(parse_crash(one) for one in text.split(","))


def is_reported(seed: int, seeds: range) -> bool:
    """Whether to say how far it is: every REPORT_EVERY_SEEDS, and at the end."""
    return (seed - seeds.start + 1) % REPORT_EVERY_SEEDS == 0 or seed == seeds[-1]


if __name__ == "__main__":
    sys.exit(main())
