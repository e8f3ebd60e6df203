"""Samples as an engine draws them: a completion in one go, or an episode turn by turn, played here to its end.

A learner names an environment to play, and no code: it is one of a few of this package that hide nothing. It and the
model's chat template, which came from the learner, run in a process that is bounded in memory and in time and knows
nothing of the node. The learner's own environment answers the same turns, and what differs is refused there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from swarm.errors import UserError
from swarm.rollout.plane.episodes import Episode, EpisodeRules
from swarm.sampler.client import TimedLease
from swarm.sampler.engine import Generated, Job, Sampled
from swarm.tasks import load_task
from swarm.tasks.base import TaskOptions
from swarm.types import GroupId, Lease, NodeId, Play, Prompt, Rollout, SampleSpec, Unscored

if TYPE_CHECKING:
    from swarm.tasks.reward_pool import RewardPool

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")  # Of a model's: what turns are written with
PLAYED = frozenset({"frozen-lake"})
"""For one player from whom they hide nothing, and made of options and a seed by arithmetic alone."""

STEP_S = 20.0  # For an environment that answers in milliseconds, on a machine that its owner uses as well
MEMORY_MB = 1024  # Five times what a process takes with the largest tokenizers


class Stage:
    """The environment of a run, in a process of its own from the first episode on, which cannot read the files
    `secrets` where the system allows that, as with the engine's. `directory` holds FILES."""

    def __init__(self, directory: Path, secrets: Sequence[Path]) -> None:
        self._directory, self._secrets = directory, secrets
        self.pool: RewardPool | None = None

    def begin(self, lease: Lease, play: Play) -> Prompt:
        """Return the episode's name for the process. UserError or ValueError if it is not to be played here."""
        check_playable(play.task)
        if self.pool is None:
            # A light installation, which imports this too, has no tokenizers.
            from swarm.tasks.reward_pool import EpisodeOptions, RewardPool

            given = msgspec.json.decode(play.arguments or "{}", type=dict[str, bool | int | str])
            began = datetime.fromisoformat(play.began) if play.began else datetime.min  # Without a template no one asks
            self.pool = RewardPool(
                task=TaskOptions(name=play.task),
                reward="task",
                tokenizer=self._directory / FILES[0],
                stop_token_ids=lease.rules.stop_token_ids,
                timeout_s=STEP_S,
                memory_mb=MEMORY_MB,
                episodes=EpisodeOptions(began=began, arguments=given, chat=play.is_chat),
                secrets=self._secrets,
            )
        return Prompt(prompt_id=play.prompt_id, text="", answer="")


def check_playable(task: str) -> None:
    """UserError if the environment of `task` is none of PLAYED, or is not made with these options."""
    if task.partition(":")[0] not in PLAYED:
        raise UserError(f"{task!r} is played at the learner alone")
    load_task(TaskOptions(name=task))


class Game:
    """A sample under way; `rollout` is None until it has ended."""

    def __init__(self, timed: TimedLease, spec: SampleSpec, stage: Stage) -> None:
        self._lease, self._deadline, self._spec, self._stage = timed.lease, timed.deadline, spec, stage
        play = timed.lease.play
        self._rules = EpisodeRules(max_turns=play.max_turns, max_tokens=play.max_tokens) if play else None
        self._episode = Episode(name=f"{timed.lease.group_id}/{spec.index}/{timed.deadline}")
        self._prompt: Prompt | None = None
        self.rollout: Rollout | None = None

    def begin(self) -> None:
        if self._lease.play is not None:
            try:
                self._prompt = self._stage.begin(self._lease, self._lease.play)
            except (UserError, ValueError, msgspec.MsgspecError) as refused:
                self._fail(f"this node does not play it: {refused}")

    def job(self) -> Job:
        """What its next turn is drawn from."""
        rules = self._lease.rules
        if self._rules is not None:
            left = self._episode.tokens_left(self._rules)
            rules = replace(rules, max_new_tokens=min(rules.max_new_tokens, left))
        reads = self._episode.reads(self._lease.prompt_token_ids)
        left_s = max(0.0, self._deadline - time.monotonic())
        return Job(prompt_token_ids=reads, seed=self._spec.seed, rules=rules, time_limit_s=left_s)

    async def take(self, sampled: Sampled) -> None:
        """Take the turn that was drawn, and have the environment answer it."""
        turn = rollout_of(self._lease.group_id, self._spec.index, sampled)
        if self._rules is None or self._prompt is None or self._stage.pool is None or turn.finish == "failed":
            self.rollout = turn
            return
        from swarm.tasks.reward_pool import StepAsked

        self._episode.take(NodeId(""), turn)
        drawn, name = tuple(one.token_ids for _, _, one in self._episode.drawn), self._episode.name
        asked = StepAsked(episode=name, prompt=self._prompt, drawn=drawn, answered=len(drawn) - 1)
        observed = await self._stage.pool.step(asked)
        if isinstance(observed, Unscored):
            self._fail(f"the environment failed: {observed.reason}")
        elif ended := self._episode.observe(observed[0], self._rules):
            self.rollout = self._episode.rollout(GroupId(turn.group_id), turn.index, ended=ended)

    def _fail(self, why: str) -> None:
        failed = Sampled(token_ids=b"", logprobs=b"", spans=(), finish="failed", fault=why)
        self.rollout = rollout_of(self._lease.group_id, self._spec.index, failed)


async def play_together(
    games: Sequence[Game], draw: Callable[[tuple[Job, ...]], Awaitable[Generated]]
) -> tuple[list[Rollout], Generated]:
    """Draw the next turns of all games that go on, until none does. Return their rollouts, and the whole as one
    generation, whose time includes the environments'."""
    for game in games:
        game.begin()
    seconds, steps = 0.0, 0
    while going := [game for game in games if game.rollout is None]:
        generated = await draw(tuple(game.job() for game in going))
        answering = time.monotonic()
        await asyncio.gather(*(game.take(one) for game, one in zip(going, generated.samples, strict=True)))
        seconds += generated.seconds + time.monotonic() - answering
        steps += generated.steps
    ended = [game.rollout for game in games if game.rollout is not None]
    samples = tuple(Sampled(one.token_ids, one.logprobs, one.spans, one.finish) for one in ended)
    return ended, Generated(samples=samples, seconds=seconds, steps=steps)


def rollout_of(group_id: str, index: int, one: Sampled) -> Rollout:
    return Rollout(group_id, index, one.token_ids, one.logprobs, one.spans, one.finish, one.fault[:200])
