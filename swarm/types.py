"""Plain data that more than one part of the swarm speaks of. No behaviour beyond reading one's own fields."""

from __future__ import annotations

from array import array
from typing import Annotated, Literal, NewType

import msgspec

from swarm.net.wire import Message

NodeId = NewType("NodeId", str)
SwarmId = NewType("SwarmId", str)
GroupId = NewType("GroupId", str)

Schedule = Literal["constant", "linear", "cosine", "wsd"]
"""How the learning rate goes after its warm-up; wsd is warm up, stay, decay."""

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e7)]

MAX_TOKENS = 131_072  # Longest prompt or completion: the largest context that current open models state
MAX_PARTS = 16
PART_NAME_LENGTH = 64
"""Rewards that one completion may have, each a column of the metrics, and the length of their names."""

Parts = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=PART_NAME_LENGTH)], float], msgspec.Meta(max_length=MAX_PARTS)
]

Role = Literal["learner", "sampler", "relay"]
Purpose = Literal["train", "eval"]
Finish = Literal["stop", "length", "failed"]
RewardFailure = Literal["zero", "redraw", "stop"]  # What becomes of a completion whose reward failed

Verdict = Literal["accepted", "stale", "future", "duplicate", "malformed", "overloaded"]


class VersionId(Message, frozen=True, order=True):
    """A policy version. `version` counts learner steps; `incarnation` rises when a published one was lost."""

    incarnation: Count
    version: Count

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.version}"


class Address(Message, frozen=True):
    """Where a node listens. `fingerprint` is the SHA-256 of its TLS certificate; empty means plain HTTP."""

    host: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:-]{1,253}\Z")]
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    fingerprint: Annotated[bytes, msgspec.Meta(max_length=32)] = b""

    @property
    def authority(self) -> str:
        """host:port, with brackets around an IPv6 host."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.fingerprint else 'http'}://{self.authority}"


StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class SamplingRules(Message, frozen=True):
    """How a completion must be drawn. top_p 1 and no truncation, so that log-probs are the policy's own.

    It ends with a stop token, or with the token after which its text holds a string of `stop`; either is part of it.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)]
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    stop_token_ids: Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]
    stop: Annotated[tuple[StopString, ...], msgspec.Meta(max_length=16)] = ()


class SampleSpec(Message, frozen=True):
    """One sample of a group: its place and the seed of its randomness. `attempt` counts its failures before this
    lease, so that the news of one failure is not counted twice."""

    index: Annotated[int, msgspec.Meta(ge=0, le=65_535)]
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    attempt: Count = 0


class Lease(Message, frozen=True):
    """The learner's permission to one sampler to produce certain samples of one prompt.

    `time_limit_s` is a duration from receipt: samplers and learner never compare clocks.
    """

    swarm: Id
    node: Id
    purpose: Purpose
    group_id: Id
    prompt_token_ids: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1, max_length=MAX_TOKENS)]
    samples: Annotated[tuple[SampleSpec, ...], msgspec.Meta(min_length=1, max_length=4096)]
    rules: SamplingRules
    min_version: VersionId
    time_limit_s: Seconds


class Span(Message, frozen=True):
    """Tokens start..end (exclusive) of a completion were drawn by this version."""

    version: VersionId
    start: Count
    end: Count


class Rollout(Message, frozen=True):
    """One completion. Arrays are little-endian bytes: int32 ids, float32 behaviour log-probs, one mask byte a token.

    A failed generation has finish "failed", no tokens and a reason; it is never trained on.
    """

    group_id: Id
    index: Count
    token_ids: Annotated[bytes, msgspec.Meta(max_length=4 * MAX_TOKENS)]
    logprobs: Annotated[bytes, msgspec.Meta(max_length=4 * MAX_TOKENS)]
    loss_mask: Annotated[bytes, msgspec.Meta(max_length=MAX_TOKENS)]
    spans: Annotated[tuple[Span, ...], msgspec.Meta(max_length=1024)]
    finish: Finish
    reason: Annotated[str, msgspec.Meta(max_length=200)] = ""

    @property
    def rollout_id(self) -> str:
        return f"{self.group_id}/{self.index}"

    @property
    def length(self) -> int:
        """Completion tokens."""
        return len(self.token_ids) // 4

    @property
    def oldest(self) -> int | None:
        """The version number of its oldest token; None for a failed generation.

        Staleness counts versions and ignores the incarnation: a version lost and made again is as old as before.
        """
        return min((span.version.version for span in self.spans), default=None)

    def tokens(self) -> array[int]:
        """The token ids, unpacked."""
        return array("i", self.token_ids)


class Prompt(Message, frozen=True):
    """A question of a task. `text` is what the model sees, between the marks of a chat if it is one; `answer` only the
    reward sees. `messages`: a chat that begins with more than one question, as (role, content); `text` is its last."""

    prompt_id: Id
    text: str
    answer: str
    token_ids: tuple[int, ...] = ()
    messages: tuple[tuple[str, str], ...] = ()


class Score(Message, frozen=True):
    """What a reward function says of one completion. `parts`: rewards that were weighted and summed, by name, as they
    were before."""

    reward: float
    exact: bool
    parts: Parts = msgspec.field(default_factory=dict)


class Unscored(Message, frozen=True):
    """In place of a score: why the reward of a completion could not be computed."""

    reason: str
