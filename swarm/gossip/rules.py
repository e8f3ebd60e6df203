"""The constants of membership. All durations are multiples of the round, so that one number sets the pace.

The learner chooses `round_s`; whoever joins takes it from the hello, because nodes of different pace would take one
another for dead. docs/membership.md gives the figures behind each value.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.types import Seconds
from swarm.wire import CONTROL_BODY_BYTES

GOSSIP_BODY_BYTES = 64 * 1024
"""Largest body of gossip, either way: the digest of the largest table (57,344 bytes) and some records."""

MAX_PUBLICS = 4096
"""Publics that a node knows, dead ones included: their digest fits a body, their records take 1.5 MB."""

MAX_PER_SUBNET = 64
"""Publics of one /24 (IPv4) or /48 (IPv6): one cheap block of addresses must not fill the table."""

MAX_LEAVES = 1024
"""Leaves that one home serves: 1,024 held polls are 110 requests a second at the default pace, a quarter of a core."""

MAX_BANNED = 1024
"""Keys that equivocated; the oldest is forgotten first. Their owner can make new keys anyway."""

assert GOSSIP_BODY_BYTES <= CONTROL_BODY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipRules:
    """Times in seconds. Only `round_s` is ever set."""

    round_s: Seconds = 2.0

    fanout: int = 2
    """Peers of one round. At 30 % loss and with stalls of 5 s no beat at 100 publics was older than 18 s; with one peer
    a round that was 33 s, too near the 40 s of a death, for a quarter less traffic."""

    partners: int = 8
    partner_rounds: int = 8
    """A public calls the same eight, of which it exchanges one every 16 s: connections stay open, and a call takes
    0.5 kB besides its bodies instead of 2.5 kB."""

    push_fanout: int = 4
    """Peers that something new is pushed on to at once: 99 % of 100 publics know in about a second, the rounds do the
    rest. With 3 the last leaf of 1,000 hears of a head a second later, and nothing is saved."""

    jitter: float = 0.2
    """Share by which every period varies, so that nodes started together drift apart."""

    suspect_rounds: int = 8
    dead_rounds: int = 20
    """By the age of a beat: dead after 40 s, of which a stall of 5 s and 30 % loss make at most 18."""

    reissue_rounds: int = 30
    life_rounds: int = 90
    """A record is issued anew every 60 s and void after 180 s without: whatever others claim of its beats."""

    tombstone_rounds: int = 1800
    """A dead node is remembered for an hour: no older record of it comes back, and a partition of that length heals."""

    bootstrap_rounds: int = 30
    dead_try_rounds: int = 15
    """A bootstrap every 60 s and a dead node every 30 s are called for no other reason than to heal partitions."""

    greeters: int = 8
    """So many publics do so in that time, however many there are: 500 would take 75 KB/s of the only bootstrap."""

    homes: int = 3
    hold_rounds: float = 4.0
    """A leaf has three polls held open for 8 s each. At 10 % loss each way a poll hands a head over three times in
    four: three miss it for one leaf in 60, which then asks again within 10 s. Four polls of 10 s would bring the last
    leaf of 1,000 from 7 to 3 s, for 570 bytes a second instead of 490."""

    lease_rounds: int = 18
    """A home takes a leaf for gone 36 s after its last poll: three lost in a row, at most 12 s each."""

    refresh_rounds: int = 30
    """Every 60 s a leaf asks a random public for others, so that no set of homes can keep it to themselves."""

    leaf_publics: int = 32
    """Publics that a leaf knows: three homes and ten times as many to choose from."""

    scarce_rounds: int = 5
    """It asks every 10 s at first, while it knows too few to fill its homes, and when it could reach none: in a young
    swarm the bootstrap knew hardly anybody, and 8 % of 1,000 leaves sat on one home for a minute."""

    refreshed: int = 12
    """Of these it asks about the 12 that it has heard of least lately: all have their turn within a record's life."""

    @property
    def call_s(self) -> float:
        """Time limit of a call, beyond what it asks to be held: four round trips around the world."""
        return self.round_s

    @property
    def transit_s(self) -> float:
        """Added to the ages in a request, whose time on the way nobody measures; answers add their round trip."""
        return 0.5 * self.round_s

    @property
    def push_delay_s(self) -> float:
        """What changes within this time is pushed on together."""
        return 0.05 * self.round_s

    @property
    def hold_s(self) -> float:
        """How long a poll is held on average."""
        return self.hold_rounds * self.round_s

    @property
    def longest_hold_s(self) -> float:
        return (1 + self.jitter) * self.hold_s
