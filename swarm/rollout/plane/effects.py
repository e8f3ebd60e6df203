"""What the rollout plane wants done or made known: the core returns effects, and its shell performs them."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.rollout.journal.entries import GroupDropped, Record, RolloutReturned, TurnTaken
from swarm.rollout.messages import Refusal
from swarm.rollout.plane.episodes import Episode
from swarm.rollout.plane.groups import Group
from swarm.rollout.plane.rules import is_fresh
from swarm.types import GroupId, Lease, NodeId, Observed, Prompt, Rollout, Score, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """Send these leases."""

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
    """The verdict on one submitted rollout. `counted_as` is the verdict, with these exceptions: "failed" if the
    accepted answer says that generation failed, "handed" if it is a part of one, and "bound_lowered" if a stale rollout
    is too old for the present bound alone, not for that of its group's opening.
    """

    rollout_id: str
    node: NodeId
    verdict: Verdict
    detail: str
    counted_as: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreWanted:
    """Compute the reward of this accepted rollout of `node`, then call `scored` or `refused`."""

    group_id: GroupId
    index: int
    node: NodeId
    prompt: Prompt
    rollout: Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWanted:
    """Have the environment of an `episode` answer its last turn, then call `observed`.

    `drawn` are the token ids (int32) of all its turns in order; with nothing drawn it is to begin. `episode` names this
    attempt, and no other in this life of the learner. `newest` is the last turn, and `node` drew it."""

    group_id: GroupId
    index: int
    episode: str
    prompt: Prompt
    drawn: tuple[bytes, ...]
    node: NodeId | None = None
    newest: Rollout | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The answer to a question that is no part of the run."""

    group_id: GroupId
    rollout: Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSilent:
    """A node missed three beats; its `samples` may be leased again. `lost`: as many answers could be drawn of them."""

    node: NodeId
    samples: int
    lost: float = 0.0


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
    answers are from `version` to `newest`, in `groups`. `unaudited`: some could not be drawn again that should have
    been."""

    version: int
    newest: int
    scores: tuple[tuple[Score, ...], ...]
    groups: tuple[Group, ...] = field(default=(), compare=False)
    unaudited: bool = True


@dataclass(slots=True, kw_only=True)
class AuditResult:
    """What an audit found: samplers that were `caught`, and why; rollouts whose claims are not believed, by group and
    index, each with the log-probs to train with, float32 [tokens]; and how many could not be audited."""

    caught: dict[NodeId, str] = field(default_factory=dict)
    recomputed: dict[tuple[GroupId, int], tuple[Rollout, bytes]] = field(default_factory=dict)
    unaudited: int = 0


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


def score_wanted(group: Group, rollout: Rollout, node: NodeId) -> ScoreWanted:
    return ScoreWanted(group_id=group.group_id, index=rollout.index, node=node, prompt=group.prompt, rollout=rollout)


def step_wanted(group: Group, index: int, episode: Episode) -> StepWanted:
    return StepWanted(
        group_id=group.group_id,
        index=index,
        episode=episode.name,
        prompt=group.prompt,
        drawn=tuple(one.token_ids for _, _, one in episode.drawn),
        node=episode.drawn[-1][1] if episode.drawn else None,
        newest=episode.drawn[-1][2] if episode.drawn else None,
    )


def beginnings(group: Group, only: int | None = None) -> list[StepWanted]:
    """Return what environments are to begin with, for the group's episodes that have not begun, or for one of them. An
    environment is asked once for each attempt."""
    begins = group.episodes is not None and group.episodes.begins
    asked = [(i, one.episode) for i, one in enumerate(group.samples) if only in (None, i) and one.rollout is None]
    return [step_wanted(group, i, one) for i, one in asked if begins and one and one.thinking and not one.drawn]


def turn_taken(group: Group, episode: Episode) -> list[Effect]:
    """Return the record of the last turn of an episode that goes on."""
    if group.purpose != "train" or not episode.drawn:
        return []
    _, node, drawn = episode.drawn[-1]
    return [TurnTaken(number=group.order, turn=episode.turn - 1, node=node, drawn=drawn, said=episode.said)]


def part_taken(group: Group, part: Rollout, node: NodeId, *, at: int) -> list[TurnTaken]:
    """Return the record of a part that `node` has handed over: a turn whose number is the token `at` which it
    begins."""
    is_recorded = group.purpose == "train"
    return [TurnTaken(number=group.order, turn=at, node=node, drawn=part, said=Observed())] if is_recorded else []


def returned(group: Group, index: int) -> list[RolloutReturned]:
    """Return the record of giving up a sample's answer, or the turns of its episode, if any of that was recorded."""
    sample = group.samples[index]
    turns = sample.episode.turn - sample.episode.thinking if sample.episode is not None else 0
    is_recorded = group.purpose == "train" and (bool(sample.rollout or sample.begun) or turns > 0)
    return [RolloutReturned(number=group.order, index=index)] if is_recorded else []


def dropped(group: Group, reason: str, next_batch: int, max_staleness: int) -> GroupDropped:
    """The end of a group that no batch will have. If only a lowered bound makes it stale, the reason says so."""
    if reason == "stale" and is_fresh(group.oldest_version, next_batch, group.bound):
        reason = "bound_lowered"
    return GroupDropped(
        number=group.order if group.purpose == "train" else None,
        group_id=group.group_id,
        reason=reason,
        rollouts=group.answered,
        nodes=group.authors,
        oldest=group.oldest_version,
        next_batch=next_batch,
        max_staleness=max_staleness,
    )
