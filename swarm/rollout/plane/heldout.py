"""A round of held-out prompts: which ones are unanswered, and their scores.

There is one round at a time, and its samples go before training ones: a round that ended many versions later than it
began would measure none of them. What a round costs is its samples, and how many these are the user sets
(`eval_prompts`, `eval_every_steps`); docs/decisions/0019-rounds-of-one-version.md has the figures. At S = 0 training
goes first and a round gets what is left, because samplers wait there while the learner trains.

A round must not cost more time than its samples. An engine that draws a batch at once needs as long for two samples as
for sixteen. So a few held-out samples never form a separate batch while more work is to come (`RolloutPlane._fill`),
and a node that must install newer weights before it can train gets none.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.rollout.plane.effects import Evaluated
from swarm.rollout.plane.groups import Group
from swarm.types import GroupId, Score, VersionId

WRONG = Score(reward=0.0, exact=False)  # For a prompt that cannot be answered: dropping must not raise the share


class HeldOutRound:
    """One round at a time, named by the learner's `life` and its number. Each prompt gets `samples` samples."""

    def __init__(self, life: int, *, samples: int) -> None:
        self._life = life
        self._samples = samples
        self._rounds = 0
        self._scores: dict[GroupId, tuple[Score, ...] | None] = {}
        self._version = self._newest = 0
        self._answered: list[Group] = []

    @property
    def open(self) -> bool:
        return bool(self._scores)

    def begin(self, version: VersionId, prompts: int) -> list[GroupId]:
        """Return the names of the groups of so many prompts, for samplers that hold `version` or a newer one."""
        assert not self._scores
        assert prompts
        self._rounds += 1
        self._version = self._newest = version.version
        self._answered = []
        names = [GroupId(f"e{self._life}.{self._rounds}-{order}") for order in range(prompts)]
        self._scores = dict.fromkeys(names)
        return names

    def scored(self, group: Group) -> list[Evaluated]:
        """Enter the scores of a prompt; one that was dropped is answered wrongly. Return the round's outcome after the
        last one."""
        if group.group_id not in self._scores:
            return []
        self._newest = max(self._newest, group.newest if group.complete else 0)
        scores = [sample.score for sample in group.samples if sample.score is not None]
        self._scores[group.group_id] = tuple(scores) if group.complete else (WRONG,) * self._samples
        if group.complete:
            self._answered.append(group)
        found = [scores for scores in self._scores.values() if scores is not None]
        if len(found) < len(self._scores):
            return []
        self._scores = {}
        groups = tuple(self._answered)
        return [Evaluated(version=self._version, newest=self._newest, scores=tuple(found), groups=groups)]


def held_out_figures(scores: Sequence[Sequence[Score]]) -> dict[str, float]:
    """Return the figures of a round from the scores of the k samples of each prompt.

    `pass_at_1` is the share of right samples, `pass_at_k` the share of prompts with at least one right sample: the
    unbiased estimators of arXiv 2107.03374, equation 1, for n = k samples. `exact_match` is pass_at_1 under the name
    that targets and metrics.jsonl use.
    """
    samples = [score for row in scores for score in row]
    right = sum(score.exact for score in samples) / len(samples)
    return {
        "exact_match": right,
        "pass_at_1": right,
        "pass_at_k": sum(any(score.exact for score in row) for row in scores) / len(scores),
        "reward": sum(score.reward for score in samples) / len(samples),
        "samples": len(samples) // len(scores),
    }
