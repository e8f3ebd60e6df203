"""An episode under way: what its players have read and said, and whose turn it is.

A sample of a task with an environment is an episode, and one lease. The sampler that has it draws a turn, sends it, and
gets what the environment says to it, which is what the next turn continues. It is *thinking* while the environment is
to answer. Each answered turn is recorded, so after the loss of its sampler another one goes on from the last of them,
and so does the next life of the learner. Its environment remembers no more than the texts of its turns, so a process
that dies is no loss. A finished episode becomes one rollout.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import structs

from swarm.types import (
    MAX_PARTS,
    MAX_SEATS,
    MAX_TOKENS,
    EpisodeProgress,
    GroupId,
    NodeId,
    Observed,
    Rollout,
    Score,
    Span,
    Turn,
)
from swarm.wire import digest

MAX_SPANS = 960  # A rollout takes 1,024, and a turn has as many as versions are within the bound
NOTHING = Score(reward=0.0, exact=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRules:
    """The limits of an episode: turns of all its players, and tokens of each player's stream, the environment's
    included. With `begins`, a program plays: it says first what is read, and all streams are one player's, each with
    the whole reward."""

    max_turns: int
    max_tokens: int
    begins: bool = False


@dataclass(slots=True)
class PlayerStream:
    """What one player has read and said, after the prompt if it is the first one."""

    token_ids: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    spans: list[Span] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.token_ids) // 4

    def read(self, token_ids: bytes) -> None:
        self.token_ids += token_ids
        self.logprobs += bytes(len(token_ids))

    def say(self, seat: int, node: NodeId, drawn: Rollout) -> None:
        start = self.length
        self.token_ids += drawn.token_ids
        self.logprobs += drawn.logprobs
        self.spans += [moved(span, start) for span in drawn.spans]
        self.turns.append(Turn(start=start, end=self.length, node=node, seat=seat))

    def reward(self, reward: float) -> None:
        """Credit the last turn. What a player gets before its first turn is nobody's doing."""
        if self.turns:
            last = self.turns[-1]
            self.turns[-1] = structs.replace(last, reward=last.reward + reward)


@dataclass(slots=True, kw_only=True)
class Episode:
    """One attempt at a sample; `name` is no other's in this life of the learner, and leases of it are of the sample's
    `attempt` or a later one. `drawn` are the turns in order; `seat` is
    the player whose turn is next, and `said` what the environment said last."""

    name: str
    attempt: int = 0
    seat: int = 0
    thinking: bool = False
    said: Observed = field(default_factory=Observed)
    drawn: list[tuple[int, NodeId, Rollout]] = field(default_factory=list)
    streams: list[PlayerStream] = field(default_factory=lambda: [PlayerStream()])
    score: Score = field(default_factory=lambda: NOTHING)
    oldest: int | None = None

    @property
    def turn(self) -> int:
        return len(self.drawn)

    @property
    def begun(self) -> bool:
        """Whether its next turn reads more than the group's prompt."""
        return bool(self.drawn) or any(stream.token_ids for stream in self.streams) or self.seat > 0

    @property
    def nodes(self) -> list[NodeId]:
        """Who drew its turns, in order."""
        return [node for _, node, _ in self.drawn]

    def progress(self, rules: EpisodeRules) -> EpisodeProgress:
        """Return what a sampler needs to draw the next turn."""
        streams = tuple(bytes(one.token_ids) for one in self.streams) if self.begun else ()
        return EpisodeProgress(
            max_tokens=rules.max_tokens, turn=self.turn, seat=self.seat, streams=streams, limits=self.said.limits
        )

    def tokens_left(self, rules: EpisodeRules) -> int:
        return rules.max_tokens - self.streams[self.seat].length

    def take(self, node: NodeId, rollout: Rollout) -> None:
        """Take the turn that `node` drew."""
        self.thinking = True
        self.oldest = min(one for one in (self.oldest, rollout.oldest) if one is not None)
        self.drawn.append((self.seat, node, rollout))

    def observe(self, observed: Observed, rules: EpisodeRules) -> str:
        """Take the environment's answer to the last turn, or how it begins. Return how the episode has ended ("stop" or
        "length"); "" if it goes on."""
        self.thinking, self.said = False, observed
        if self.drawn:
            seat, node, rollout = self.drawn[-1]
            self.streams[seat].say(seat, node, rollout)
        for seat, reward in enumerate(observed.rewards):
            self._stream(seat).reward(reward)
        stream = self._stream(observed.seat)
        self.seat = observed.seat
        self.score = structs.replace(self.score, exact=observed.exact, parts=observed.parts)
        fits = stream.length + len(observed.token_ids) // 4 < rules.max_tokens
        # What a Rollout takes: all players' tokens together, and versions
        fits &= sum(one.length for one in self.streams if one is not stream) + rules.max_tokens <= MAX_TOKENS
        fits &= sum(len(one.spans) for one in self.streams) <= MAX_SPANS
        fits &= self.seat == 0 or bool(stream.token_ids or observed.token_ids)  # Nothing predicts a first token
        if fits:
            stream.read(observed.token_ids)
        if observed.done:
            return "stop"
        if fits and self.turn < rules.max_turns:
            return ""
        if rules.begins:
            self._share()
        return "length"

    def _share(self) -> None:
        """Give each conversation of a program that a limit ended all that any of them was given."""
        every = [sum(turn.reward for turn in stream.turns) for stream in self.streams]
        for stream, own in zip(self.streams, every, strict=True):
            stream.reward(sum(every) - own)

    def void(self) -> None:
        """Take back all rewards, since the environment has failed."""
        for stream in self.streams:
            stream.turns = [structs.replace(turn, reward=0.0) for turn in stream.turns]
        self.score = NOTHING

    def rollout(self, group_id: GroupId, index: int, *, ended: str) -> Rollout:
        """Return the finished episode, its players' streams one after the other."""
        token_ids, logprobs = bytearray(), bytearray()
        spans: list[Span] = []
        turns: list[Turn] = []
        seats: list[int] = []
        for stream in self.streams:
            at = len(token_ids) // 4
            seats.append(at)
            spans += [moved(span, at) for span in stream.spans]
            turns += [structs.replace(one, start=one.start + at, end=one.end + at) for one in stream.turns]
            token_ids += stream.token_ids
            logprobs += stream.logprobs
        return Rollout(
            group_id=group_id,
            index=index,
            token_ids=bytes(token_ids),
            logprobs=bytes(logprobs),
            spans=tuple(spans),
            finish="stop" if ended == "stop" else "length",
            turns=tuple(turns),
            seats=tuple(seats) if len(seats) > 1 else (),
        )

    def scored(self, rules: EpisodeRules) -> Score:
        """Return what the first player that moved was given, and the others' as parts."""
        returns = {n: sum(one.reward for one in each.turns) for n, each in enumerate(self.streams) if each.turns}
        first, *others = [*returns][:1] if rules.begins else returns
        parts = {**self.score.parts, **{f"reward_of_player_{seat + 1}": returns[seat] for seat in others}}
        return structs.replace(self.score, reward=returns[first], parts=dict([*parts.items()][:MAX_PARTS]))

    def _stream(self, seat: int) -> PlayerStream:
        assert seat < MAX_SEATS
        while len(self.streams) <= seat:
            self.streams.append(PlayerStream())
        return self.streams[seat]


def moved(span: Span, by: int) -> Span:
    return structs.replace(span, start=span.start + by, end=span.end + by)


def part_of(rollout: Rollout, turn: Turn) -> Rollout:
    """Return a turn of an episode as a rollout of its own."""
    start, end = turn.start, turn.end
    spans = (
        Span(version=one.version, start=max(one.start, start) - start, end=min(one.end, end) - start)
        for one in rollout.spans
        if one.start < end and one.end > start
    )
    return structs.replace(
        rollout,
        token_ids=rollout.token_ids[4 * start : 4 * end],
        logprobs=rollout.logprobs[4 * start : 4 * end],
        spans=tuple(spans),
        turns=(),
        seats=(),
    )


def reads_of(rollout: Rollout, turn: Turn, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Return all that a turn of an episode was to continue. `prompt` is the group's."""
    begin = rollout.seats[turn.seat] if rollout.seats else 0
    return (*(prompt if turn.seat == 0 else ()), *rollout.tokens()[begin : turn.start])


def seat_seed(seed: int, seat: int) -> int:
    """Return the seed of a player's turns: another one for each, since their streams have the same positions."""
    return int.from_bytes(digest(f"{seed}/{seat}".encode())[:8], "little") >> 1 if seat else seed
