"""Samples as an engine draws them: a completion in one go, or an episode turn by turn.

A sampler that holds an episode draws its next turn and hands it in; the learner's environment answers it, and the reply
is what the next turn continues. Only the learner knows when the episode has ended.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from swarm.rollout.messages import Answer, SampleName, Stepped
from swarm.rollout.plane.begun import begun_name
from swarm.rollout.plane.episodes import seat_seed
from swarm.sampler.engine import TIME_LIMIT, Job, Sampled, failed
from swarm.types import AS_LEASED, MAX_TOKENS, Lease, Rollout, SampleSpec

Step = Callable[[Answer], Awaitable[Stepped]]
"""Hands in a turn and returns what the environment said to it."""


class Game:
    """A sample under way, whose time begins now; of an episode, what its players have read and said."""

    def __init__(self, lease: Lease, spec: SampleSpec) -> None:
        self._lease, self._spec, self._episode = lease, spec, lease.episode
        self._deadline = time.monotonic() + lease.time_limit_s
        begun = begun_name(lease.begun)
        self._turn, self._seat = (self._episode.turn, self._episode.seat) if self._episode else (begun, 0)
        self._streams = [bytearray(stream) for stream in self._episode.streams] if self._episode else []
        self._limits = self._episode.limits if self._episode else AS_LEASED
        self._drawn = b""
        self._begun = lease.begun
        self._is_cut = False
        self.name: SampleName = (lease.group_id, spec.index)

    @property
    def is_episode(self) -> bool:
        return self._episode is not None

    def job(self, portion_tokens: int = MAX_TOKENS) -> Job:
        """What is to be drawn next. A completion is handed over after `portion_tokens`, or an eighth of what there is,
        so that it changes hands a limited number of times; but not where strings end it, which could begin in one
        portion and end in the next."""
        rules, reads = self._lease.rules, self._lease.prompt_token_ids
        seed = self._spec.seed
        if self._episode is not None:
            stream = self._stream(self._seat)
            left = self._episode.max_tokens - len(stream) // 4
            rules = self._limits.on(rules)
            rules = replace(rules, max_new_tokens=min(rules.max_new_tokens, left))
            reads = (*(reads if self._seat == 0 else ()), *array("i", bytes(stream)))
            seed = seat_seed(seed, self._seat)
        else:
            begun = array("i", self._begun)
            left, portion = max(1, rules.max_new_tokens - len(begun)), max(portion_tokens, len(begun) // 8)
            self._is_cut = portion < left and not rules.stop
            rules = replace(rules, max_new_tokens=portion if self._is_cut else left)
            reads = (*reads, *begun)
        left_s = max(0.0, self._deadline - time.monotonic())
        return Job(prompt_token_ids=reads, seed=seed, rules=rules, time_limit_s=left_s)

    def answer(self, one: Sampled) -> Answer:
        """Return what was drawn, as it is handed in. Of an episode only whole turns are."""
        if self.is_episode and one.finish == "handed":
            one = failed(TIME_LIMIT)
        elif self._is_cut and one.finish == "length":
            one = replace(one, finish="handed")
        self._drawn = one.token_ids
        group_id, index = self.name
        rollout = Rollout(group_id, index, one.token_ids, one.logprobs, one.spans, one.finish, one.fault[:200])
        return Answer(rollout, self._spec.attempt, self._turn)

    def goes_on(self, said: Stepped) -> bool:
        """Take what was said to the turn that was handed in. Return whether there is another turn to draw."""
        if said.ended:
            return False
        self._stream(self._seat).extend(self._drawn)
        self._seat, self._turn, self._limits = said.seat, self._turn + 1, said.limits
        self._stream(self._seat).extend(said.token_ids)
        self._deadline = time.monotonic() + self._lease.time_limit_s
        return True

    def _stream(self, seat: int) -> bytearray:
        while len(self._streams) <= seat:
            self._streams.append(bytearray())
        return self._streams[seat]
