"""Questions that are no part of the run: some sampler draws one completion for each, before anything else."""

from __future__ import annotations

from swarm.rollout.plane.groups import Group, LeaseTable
from swarm.types import GroupId, Prompt, SamplingRules, VersionId

MAX_QUESTIONS = 64  # That wait for an answer: they go before the run's own samples


class Questions:
    """The questions of one `life` of the learner, as groups of one sample."""

    def __init__(self, table: LeaseTable, life: int) -> None:
        self._table, self._life = table, life
        self._asked = 0

    def ask(self, prompt: Prompt, rules: SamplingRules, version: VersionId, *, bound: int) -> GroupId | None:
        """Open a question for samplers that hold `version` or a newer one. Return None if too many wait."""
        if sum(group.purpose == "ask" for group in self._table.groups()) >= MAX_QUESTIONS:
            return None
        self._asked += 1
        group = Group(
            group_id=GroupId(f"q{self._life}.{self._asked}"),
            order=self._asked,
            purpose="ask",
            prompt=prompt,
            rules=rules,
            min_version=version,
            bound=bound,
        )
        self._table.open(group, 1)
        self._table.chances += 1
        return group.group_id

    def withdraw(self, name: GroupId) -> None:
        """Forget a question whose asker has gone."""
        if (group := self._table.group(name)) is not None:
            self._table.close(group)
