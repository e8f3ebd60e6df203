"""What the rollout plane wants done or made known: the core returns effects, and its shell performs them."""

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
    """Refuse leases for now. `detail` tells a person why."""

    reason: Refusal
    retry_after_s: float
    detail: str = ""

    @property
    def may_change(self) -> bool:
        """Whether the shell holds the request open and asks again when the plane has changed."""
        return self.reason in ("paced", "standby")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The verdict on one submitted rollout. `counted_as` is the verdict, with two exceptions: "failed" if the accepted
    answer says that generation failed, and "bound_lowered" if a stale rollout is fresh under its group's opening bound.
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
class StepWanted:
    """Have the environment of an `episode` answer the turns that it has not answered, then call `observed`.

    `drawn` are the token ids (int32) of all its turns in order, of which the environment has answered `answered`. With
    nothing drawn it is to begin. `episode` names this attempt, and no other in this life of the learner. `nodes`
    drew the new turns, and `newest` is the last of them."""

    group_id: GroupId
    index: int
    episode: str
    prompt: Prompt
    drawn: tuple[bytes, ...]
    answered: int
    nodes: tuple[NodeId, ...] = ()
    newest: Rollout | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The answer to a question that is no part of the run."""

    group_id: GroupId
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
    """A sampler could not generate a sample, which may be leased again."""

    node: NodeId
    rollout_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Every held-out prompt of a round is scored or was dropped. `scores` holds the sample scores of each prompt. All
    answers are from `version` to `newest`."""

    version: int
    newest: int
    scores: tuple[tuple[Score, ...], ...]


Effect = (
    Granted
    | Refused
    | Judged
    | ScoreWanted
    | StepWanted
    | Answered
    | NodeSilent
    | LeaseOverdue
    | GenerationFailed
    | Evaluated
    | Record
)
