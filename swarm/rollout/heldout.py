"""A round of held-out prompts: which ones are answered, and the scores once all are."""

from __future__ import annotations

from swarm.rollout.effects import Evaluated
from swarm.types import GroupId, Score

WRONG = Score(reward=0.0, exact=False)
"""A held-out prompt that cannot be answered counts as wrong: the share must not rise by dropping."""


class HeldOutRound:
    """One round at a time. `life` keeps the names of rounds apart that different lives of a learner began."""

    def __init__(self, life: int) -> None:
        self._life = life
        self._rounds = 0
        self._scores: dict[GroupId, Score | None] = {}
        self._version = 0

    @property
    def open(self) -> bool:
        return bool(self._scores)

    def begin(self, version: int, prompts: int) -> list[GroupId]:
        """Names for the groups of a new round, one a prompt."""
        assert not self._scores
        assert prompts
        self._rounds += 1
        self._version = version
        self._scores = dict.fromkeys(GroupId(f"e{self._life}.{self._rounds}-{i}") for i in range(prompts))
        return list(self._scores)

    def scored(self, group_id: GroupId, score: Score | None) -> list[Evaluated]:
        """Enter a score, None for a prompt that was dropped; the round's end if that was the last."""
        if group_id not in self._scores:
            return []
        self._scores[group_id] = score or WRONG
        scores = [found for found in self._scores.values() if found is not None]
        if len(scores) < len(self._scores):
            return []
        self._scores = {}
        return [Evaluated(version=self._version, scores=tuple(scores))]
