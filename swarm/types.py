"""Plain data that several parts of the swarm share, with no behaviour beyond reading its own fields."""

from __future__ import annotations

from array import array
from itertools import groupby
from typing import Annotated, Literal, NewType

import msgspec

from swarm.wire import Message

NodeId = NewType("NodeId", str)
SwarmId = NewType("SwarmId", str)
GroupId = NewType("GroupId", str)

OptimizerStates = Literal["float32", "8bit", "host"]  # How and where AdamW keeps its two moments
Selection = Literal["uniform", "frontier"]  # Of prompts
Schedule = Literal["constant", "linear", "cosine", "wsd"]  # Of the learning rate; wsd: warm up, stay, decay
Freshness = Literal["adaptive", "off"]  # Groups open as late as the fleet allows, or as early as the bound allows
Normalisation = Literal["tokens", "rollouts", "constant"]  # Divisor of the loss of a minibatch
Credit = Literal["episode", "turn"]  # Whether an episode has one advantage, or one for each turn
ObjectiveName = Literal[
    "grpo", "gspo", "decoupled_ppo", "icepop", "cispo", "tis"
]  # The formulas are in learner/objective.py

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Nickname = Annotated[str, msgspec.Meta(max_length=32)]  # Chosen by a node's owner; only ever displayed
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e7)]

MAX_TOKENS = 131_072  # Of a prompt or completion: the largest context of current open models
MAX_TURNS = 512  # Of an episode: a long game of chess, or an afternoon of a coding agent
MAX_ABOUT = 160  # Characters in which a run's owner says what it is for
MAX_SEATS = 64  # Players of an episode, or conversations of a program that plays it
MAX_PARTS = 16  # Rewards of one completion, each a column of the metrics
PART_NAME_LENGTH = 64

Parts = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=PART_NAME_LENGTH)], float], msgspec.Meta(max_length=MAX_PARTS)
]

Role = Literal["learner", "sampler", "relay"]
Purpose = Literal["train", "eval", "ask"]
Finish = Literal["stop", "length", "failed", "handed"]
BasePrecision = Literal["bf16", "nf4"]
Rounding = Literal["none", "fp8", "int8", "int4"]
"""The format to which an engine rounds its matrices at each install; other weights keep the engine's number format."""
Verdict = Literal["accepted", "stale", "future", "duplicate", "malformed", "barred", "overloaded"]


def printable(words: str) -> str:
    """Make text from other nodes safe for a terminal or a log: one line, without escapes or direction marks."""
    # Nearly all text is, and testing the whole string takes a hundredth of the time.
    return words if words.isprintable() else "".join(c if c.isprintable() else "?" for c in words)


def quoted(words: str) -> str:
    """Return text from another node in quotation marks, so that it cannot be taken for a line of our own."""
    return '"' + printable(words).replace('"', "'") + '"'


class VersionId(Message, frozen=True, order=True):
    """A policy version. `version` counts learner steps; `incarnation` rises when a published version was lost."""

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
    """How to draw a completion. top_p is 1 and nothing is truncated, so the log-probs are the policy's own.

    A completion ends with a stop token, or with the token that completes one of the strings `stop`. That last token is
    part of it.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)]
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    stop_token_ids: Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]
    stop: Annotated[tuple[StopString, ...], msgspec.Meta(max_length=16)] = ()


class SampleSpec(Message, frozen=True):
    """One sample of a group, with its index and random seed. `attempt` counts how often it failed or was withdrawn
    before this lease, so that no failure is counted twice."""

    index: Annotated[int, msgspec.Meta(ge=0, le=65_535)]
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    attempt: Count = 0


class TurnLimits(Message, frozen=True):
    """What the next turn of an episode may be besides its lease's rules: shorter (0: not), or ended by more strings."""

    max_new_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)] = 0
    stop: Annotated[tuple[StopString, ...], msgspec.Meta(max_length=4)] = ()

    def on(self, rules: SamplingRules) -> SamplingRules:
        most = min(self.max_new_tokens or MAX_TOKENS, rules.max_new_tokens)
        return msgspec.structs.replace(rules, max_new_tokens=most, stop=(*rules.stop, *self.stop))


AS_LEASED = TurnLimits()


class EpisodeProgress(Message, frozen=True):
    """The state of an episode: player `seat` draws turn number `turn` next. `streams` are the token ids (int32) that
    each player has read and drawn, the first player's without the prompt. None may be longer than `max_tokens`."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    turn: Count = 0
    seat: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEATS - 1)] = 0
    streams: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(max_length=4 * MAX_TOKENS)], ...], msgspec.Meta(max_length=MAX_SEATS)
    ] = ()
    limits: TurnLimits = AS_LEASED


class Lease(Message, frozen=True):
    """The learner's permission for one sampler to draw certain samples of one prompt.

    `time_limit_s` counts from receipt: samplers and learner never compare clocks. With `episode`, each sample is an
    episode that goes on from there, and the limit is that of a turn. The first tokens of a completion that others
    handed over are `begun` (int32); what follows them is wanted.
    """

    purpose: Purpose
    group_id: Id
    prompt_token_ids: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1, max_length=MAX_TOKENS)]
    samples: Annotated[tuple[SampleSpec, ...], msgspec.Meta(min_length=1, max_length=4096)]
    rules: SamplingRules
    min_version: VersionId
    time_limit_s: Seconds
    episode: EpisodeProgress | None = None
    begun: Annotated[bytes, msgspec.Meta(max_length=4 * MAX_TOKENS)] = b""


class Span(Message, frozen=True):
    """This version drew tokens start..end (exclusive) of a completion; at `node`, if others drew the rest of it."""

    version: VersionId
    start: Count
    end: Count
    node: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Turn(Message, frozen=True):
    """Tokens start..end (exclusive) of an episode, which `node` drew in one go as player `seat`. `reward` is what the
    environment gave this player from then until its next turn."""

    start: Count
    end: Count
    node: Annotated[str, msgspec.Meta(max_length=64)] = ""
    reward: float = 0.0
    seat: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEATS - 1)] = 0


class Rollout(Message, frozen=True):
    """One completion. Arrays are little-endian bytes: int32 ids, float32 behaviour log-probs.

    A failed generation has finish "failed", no tokens and a reason; it is never trained on. One that its sampler could
    not end has finish "handed": others draw what follows.

    An episode of several turns lists them in order. Its other tokens are the environment's: no span covers them, and
    their log-probs are 0. The tokens are stored player by player, and `seats` are the indices at which each player's
    begin. The first player's tokens follow the prompt; another player reads no prompt. An episode that reached a limit
    of turns or tokens finished with "length".
    """

    group_id: Id
    index: Count
    token_ids: Annotated[bytes, msgspec.Meta(max_length=4 * MAX_TOKENS)]
    logprobs: Annotated[bytes, msgspec.Meta(max_length=4 * MAX_TOKENS)]
    spans: Annotated[tuple[Span, ...], msgspec.Meta(max_length=1024)]
    finish: Finish
    reason: Annotated[str, msgspec.Meta(max_length=200)] = ""
    turns: Annotated[tuple[Turn, ...], msgspec.Meta(max_length=MAX_TURNS)] = ()
    seats: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_SEATS)] = ()

    @property
    def rollout_id(self) -> str:
        return f"{self.group_id}/{self.index}"

    @property
    def length(self) -> int:
        """The number of completion tokens, including an environment's."""
        return len(self.token_ids) // 4

    @property
    def drawn(self) -> int:
        """The number of tokens that samplers drew."""
        return sum(turn.end - turn.start for turn in self.turns) if self.turns else self.length

    @property
    def oldest(self) -> int | None:
        """The version number of its oldest token; None for a failed generation. Staleness ignores the incarnation: a
        version that was lost and computed again is as old as before."""
        return min((span.version.version for span in self.spans), default=None)

    def tokens(self) -> array[int]:
        return array("i", self.token_ids)

    def turns_by(self, author: str) -> tuple[Turn, ...]:
        """The turns of an episode, or what each node drew of a completion that `author` ended."""
        if self.turns:
            return self.turns
        runs = [list(run) for _, run in groupby(self.spans, key=lambda span: span.node)]
        return tuple(Turn(start=run[0].start, end=run[-1].end, node=run[0].node or author) for run in runs)


class Prompt(Message, frozen=True):
    """A question of a task. The model reads `text`, inside the chat template if there is one; only the reward reads
    `answer`. For a chat of several turns, `messages` are (role, content) pairs, and `text` is the last content.
    `row` is the JSON of the row of data, for a reward that is a function of the user's."""

    prompt_id: Id
    text: str
    answer: str
    token_ids: tuple[int, ...] = ()
    messages: tuple[tuple[str, str], ...] = ()
    row: str = ""


class Score(Message, frozen=True):
    """A reward function's result for one completion. `parts`: the summed rewards by name, unweighted."""

    reward: float
    exact: bool
    parts: Parts = msgspec.field(default_factory=dict)


class Observed(Message, frozen=True):
    """An environment's answer to a turn, or its beginning. Player `seat` is next, and reads `token_ids`, which are
    appended to its stream. `rewards` are by player; missing ones are 0. At the end it is `done`, and `exact` if it was
    solved. `parts` are figures of the episode so far, such as the number of tool errors. `limits` are the next turn's.
    """

    token_ids: Annotated[bytes, msgspec.Meta(max_length=4 * MAX_TOKENS)] = b""
    seat: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEATS - 1)] = 0
    rewards: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_SEATS)] = ()
    done: bool = False
    exact: bool = False
    parts: Parts = msgspec.field(default_factory=dict)
    limits: TurnLimits = AS_LEASED


class Unscored(Message, frozen=True):
    """The reason why a completion has no reward. `genuine`: whether its sampler's seed draws it, or None if unknown."""

    reason: str
    genuine: bool | None = None
