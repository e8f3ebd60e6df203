"""How late the learner hears of who comes and goes: gossip as sampled delays, where packets would be too many.

Checked against the packet-level simulator (sim/gossip.py) with 20 and 100 nodes, half of them public, 5 % loss, 2 s
rounds: newcomers that others can dial were known after 1.2 s at best, 1.2 and 1.2 s (median), 13 and 6.5 s (slowest of
ten); deaths after 38.5 to 41.2 s and 38.6 to 41.4 s. tests/simulation/test_capacity_news.py repeats it. A head was
everywhere within 0.9 s: small beside any transfer, and left out.
"""

from __future__ import annotations

from random import Random

from swarm.gossip.rules import GossipRules

RULES = GossipRules()

GREETING_S = 1.2
"""From a start to a record that others pass on: a hello, its answer, and the dial back."""

MISSED_SHARE = 0.15
"""Newcomers whose record was not pushed all the way at once; rounds bring it."""

MISSED_ROUNDS = 6
"""Most rounds that took."""

DEATH_SPREAD_S = 1.6
"""The last beat that was heard is up to a round old, and the watch of it as late."""


def newcomer_s(random: Random) -> float:
    """Seconds from the start of a node until the learner knows of it."""
    if random.random() < MISSED_SHARE:
        return GREETING_S + random.random() * MISSED_ROUNDS * RULES.round_s
    return GREETING_S + 0.5 * random.random()


def death_s(random: Random) -> float:
    """Seconds from the end of a node that nobody else watches until the learner takes it for dead."""
    return RULES.dead_rounds * RULES.round_s + random.uniform(-DEATH_SPREAD_S, DEATH_SPREAD_S)
