"""A node's own record: what it says of itself, issued anew whenever that changes and before it expires."""

from __future__ import annotations

from swarm.gossip.effects import Effect, GenerationRaised
from swarm.gossip.records import MAX_SEQUENCE, Profile, Reachability, Record, SignedRecord, sign_record
from swarm.signing import SigningKey
from swarm.types import Address, Role, SwarmId, VersionId
from swarm.wire import PROTOCOL


class Owner:
    """Signs and numbers the records of one key. `generation` must be higher than in every former life.

    `incarnation` is what a learner publishes under: generation - 1, or that of the life whose run it resumes.
    """

    def __init__(
        self,
        key: SigningKey,
        swarm: SwarmId,
        role: Role,
        *,
        generation: int,
        addresses: tuple[Address, ...],
        round_s: float = 0.0,
        incarnation: int | None = None,
    ) -> None:
        self._key = key
        self._swarm = swarm
        self.role = role
        self._generation = generation
        self.incarnation = generation - 1 if incarnation is None else incarnation
        self._sequence = -1
        self._round_s = round_s
        self.addresses = addresses
        # The learner is what everybody dials: it needs no proof that it can be reached.
        self.reachability: Reachability = "public" if role == "learner" else "leaf"
        self.profile = Profile()
        self.issue()

    def issue(self) -> list[Effect]:
        """A new record with what is true now."""
        effects: list[Effect] = []
        self._sequence += 1
        if self._sequence > MAX_SEQUENCE:
            effects += self._raise_generation(self._generation + 1)
        self.signed = self._sign()
        return effects

    def refute(self, claimed: SignedRecord) -> list[Effect]:
        """Go past `claimed`, a record by our own key that others hold dead, or that this life never issued: then the
        state directory was restored from a copy, and the generation has to rise past that of the former life, which
        may have said more than this record."""
        if claimed.order < self.signed.order:
            return []
        if claimed.body == self.signed.body:
            return self.issue()
        return self._raise_generation(claimed.record.generation + 1) + self.issue()

    def outlive(self, version: VersionId) -> list[Effect]:
        """Go past `version`, which this life cannot stand by: it is newer than what this life has published, so another
        one that its disk forgot has published it, or its weights cannot be made again."""
        if self.role != "learner" or version.incarnation < self.incarnation:
            return []
        return self._raise_generation(max(version.incarnation + 2, self._generation + 1)) + self.issue()

    def _raise_generation(self, generation: int) -> list[Effect]:
        # At the end of its numbers a key cannot refute any more; its owner has to make a new one.
        self._generation = min(generation, MAX_SEQUENCE)
        self.incarnation = self._generation - 1
        self._sequence = 0
        return [GenerationRaised(generation=self._generation)]

    def _sign(self) -> SignedRecord:
        record = Record(
            key=self._key.public_bytes,
            swarm=self._swarm,
            generation=self._generation,
            sequence=self._sequence,
            role=self.role,
            reachability=self.reachability,
            addresses=self.addresses,
            protocol=PROTOCOL,
            profile=self.profile,
            round_s=self._round_s,
        )
        return sign_record(record, self._key)
