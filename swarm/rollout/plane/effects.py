"""What the rollout plane wants done or known: the core returns these, and its shell performs them."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.rollout.journal.entries import Record
from swarm.rollout.messages import Refusal
from swarm.types import GroupId, Lease, NodeId, Prompt, Rollout, Score, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """Seal these leases and send them."""

    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """No lease now; `detail` tells a person why."""

    reason: Refusal
    retry_after_s: float
    detail: str = ""

    @property
    def may_change(self) -> bool:
        """Whether the shell holds the question open and asks again when the plane has changed."""
        return self.reason in ("paced", "standby")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The verdict on one submitted rollout. It is counted as the verdict; as "failed" if what was accepted is the news
    that a generation failed; as "bound_lowered" if the bound under which its group was opened would not make it stale.
    """

    rollout_id: str
    node: NodeId
    verdict: Verdict
    detail: str
    counted_as: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreWanted:
    """Compute the reward of this accepted rollout of `node`, then call `scored` or `unscorable`."""

    group_id: GroupId
    index: int
    node: NodeId
    prompt: Prompt
    rollout: Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSilent:
    """A node missed three beats; its `samples` may be leased again."""

    node: NodeId
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOverdue:
    """A node kept these samples, by group and index, past their time limit; they may be leased again."""

    node: NodeId
    samples: tuple[tuple[GroupId, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFailed:
    """A sampler returned a sample as failed; it may be leased again."""

    node: NodeId
    rollout_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Every held-out prompt of a round is answered and scored: the scores of the samples of each prompt."""

    version: int
    scores: tuple[tuple[Score, ...], ...]


Effect = Granted | Refused | Judged | ScoreWanted | NodeSilent | LeaseOverdue | GenerationFailed | Evaluated | Record
