"""What outsiders were told and what the trainers did, over all lives of the learner, held against what is on record.

Theory of operation. Each method is called when something becomes visible from outside: a lease or a verdict is sent, a
version is announced, a step is trained. What it rests on must then be committed, and stays true for ever: a step that
is trained again consumes the same rollouts in the same order and gives the same weights, and what was acknowledged is
still on record at the end (I3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from swarm.types import Lease, NodeId, Rollout, VersionId
from tests.simulator.rollouts.ledger import Ledger


class Lineage:
    """Promises of all lives. `breach(rule, what)` is called when one is broken."""

    def __init__(self, ledger: Ledger, breach: Callable[[str, str], NoReturn]) -> None:
        self._ledger = ledger
        self._breach = breach
        self._acknowledged: dict[tuple[int, int], Rollout] = {}
        self._weights: list[bytes] = []

    def granted(self, node: NodeId, leases: Sequence[Lease]) -> None:
        """Leases are sent."""
        for lease in leases:
            if lease.purpose == "train":
                number = number_of(lease.group_id)
                known = number < len(self._ledger.groups)
                self._require(known, f"{lease.group_id} is leased and its opening is not on record")
                given = {(one.index, one.node) for one in self._ledger.groups[number].leases}
                on_record = all((spec.index, node) in given for spec in lease.samples)
                self._require(on_record, f"a lease of {lease.group_id} for {node} is not on record")

    def acknowledged(self, rollouts: Sequence[Rollout]) -> None:
        """The acceptance of answers for training is sent."""
        for rollout in rollouts:
            place = number_of(rollout.group_id), rollout.index
            self._acknowledged[place] = rollout
            self._require(self._is_recorded(place), f"{rollout.rollout_id} is acknowledged and not on record")

    def announced(self, version: VersionId) -> None:
        """Samplers may hear of a version."""
        published = self._ledger.published
        on_record = published is not None and published.version >= version
        self._require(on_record, f"version {version} is announced and not on record")

    def trained(self, step: int, weights: bytes) -> None:
        """Step `step` has ended, for the first time or again, with these weights."""
        self._require(step < len(self._ledger.batches), f"step {step} was trained and its batch is not on record")
        if step == len(self._weights):
            self._weights.append(weights)
        self._require(self._weights[step] == weights, f"step {step} was trained again on something else")
        published = self._ledger.published
        if published is not None and published.version.version == step + 1:
            self._require(published.content == weights, f"version {step + 1} is not what was published")

    def settle(self) -> None:
        """At the end: each step was trained, and all that was acknowledged is on record."""
        steps = len(self._ledger.batches)
        self._require(steps == len(self._weights), f"{steps} batches were taken and {len(self._weights)} trained")
        lost = [place for place in self._acknowledged if not self._is_recorded(place)]
        self._require(not lost, f"{len(lost)} acknowledged rollouts are lost: {lost[:1]}")

    def _is_recorded(self, place: tuple[int, int]) -> bool:
        number, index = place
        if number >= len(self._ledger.groups):
            return False
        group, rollout = self._ledger.groups[number], self._acknowledged[place]
        found = group.rollouts.get(index)
        return (found is not None and found[1] is rollout) or any(one is rollout for one in group.returned)

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            self._breach("I3", what)


def number_of(group_id: str) -> int:
    """The number of a group for training."""
    return int(group_id.removeprefix("t"))
