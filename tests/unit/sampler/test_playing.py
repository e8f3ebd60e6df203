"""Episodes that a sampler plays: all turns under one lease, in step with one another, and nothing that a learner might
choose is imported."""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from swarm.environments.frozen_lake import FrozenLake
from swarm.learner.tiny import tiny_tokenizer
from swarm.sampler.client import TimedLease
from swarm.sampler.engine import Generated, Job, Sampled
from swarm.sampler.playing import Game, Stage, play_together
from swarm.tasks.reward_child import Episode, StepAsked
from swarm.tasks.turns import TurnText
from swarm.types import Observed, Play, Rollout, SamplingRules, Span, Unscored
from tests.builders import STOP, floats, ints, lease, v

TOKENIZER = tiny_tokenizer().backend_tokenizer
TEXT = TurnText(TOKENIZER, None, [STOP])
PLAY = Play(task="frozen-lake", prompt_id="episode-7", max_turns=10, max_tokens=500)
RULES = SamplingRules(temperature=1.0, max_new_tokens=2, stop_token_ids=(STOP,))


class Acting:
    """Stands for the processes: the environment answers at once, in here. `broken` is why it does not."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.asked: list[StepAsked] = []
        self._episodes: dict[str, Episode] = {}

    async def step(self, asked: StepAsked) -> tuple[Observed, ...] | Unscored:
        self.asked.append(asked)
        if self.broken:
            return Unscored(reason=self.broken)
        if asked.answered == 0:
            self._episodes[asked.episode] = Episode(FrozenLake(), TEXT, asked.prompt)
        return (self._episodes[asked.episode].step(asked.drawn[-1]),)


class Engine:
    """Draws the words that are given, one each turn, and notes what it was asked for."""

    def __init__(self, *words: str) -> None:
        self._words = list(words)
        self.asked: list[tuple[Job, ...]] = []

    async def __call__(self, jobs: tuple[Job, ...]) -> Generated:
        turn = len(self.asked)
        self.asked.append(jobs)
        word = self._words[min(turn, len(self._words) - 1)]
        drawn = [*TOKENIZER.encode(word, add_special_tokens=False).ids, STOP]
        samples = tuple(
            Sampled(ints(*drawn), floats(*[-0.5] * len(drawn)), (Span(v(turn), 0, len(drawn)),), "stop") for _ in jobs
        )
        return Generated(samples=samples, seconds=2.0, steps=2)


def stage(directory: Path, pool: Acting | None = None) -> Stage:
    made = Stage(directory, ())
    made.pool = cast(Any, pool or Acting())
    return made


def games(stage: Stage, play: Play | None, count: int = 1, *, deadline_s: float = 60.0) -> list[Game]:
    opening = TEXT.opening(FrozenLake().reset(7))
    leased = replace(lease(indices=range(count), rules=RULES), play=play, prompt_token_ids=tuple(opening))
    timed = TimedLease(lease=leased, deadline=time.monotonic() + deadline_s)
    return [Game(timed, spec, stage) for spec in leased.samples]


def answer_to_a_wall() -> list[int]:
    lake = FrozenLake()
    lake.reset(7)
    return TEXT.reply([STOP], lake.step("0").messages)


def is_solved(way: Sequence[str]) -> bool:
    lake = FrozenLake()
    lake.reset(7)
    return next((step.solved for step in map(lake.step, way) if step.done), False)


def logprobs(rollout: Rollout) -> list[float]:
    return list(array("f", rollout.logprobs))


async def test_an_episode_is_one_rollout_with_its_turns_and_the_environments_words_are_nobodys(tmp_path: Path) -> None:
    engine = Engine("0")  # To the left, where the player begins: an edge
    (rollout,), generated = await play_together(games(stage(tmp_path), replace(PLAY, max_turns=3)), engine)
    board = answer_to_a_wall()
    move = [*TOKENIZER.encode("0", add_special_tokens=False).ids, STOP]
    drawn = {turn.start: turn.end for turn in rollout.turns}
    assert len(rollout.turns) == 3
    assert all(list(rollout.tokens()[start:end]) == move for start, end in drawn.items())
    assert list(rollout.tokens()[: rollout.turns[2].end]) == [*move, *board, *move, *board, *move]
    assert [(span.version, span.start, span.end) for span in rollout.spans] == [
        (v(turn), start, end) for turn, (start, end) in enumerate(drawn.items())
    ]
    assert [at for at, one in enumerate(logprobs(rollout)) if one] == [
        at for s, e in drawn.items() for at in range(s, e)
    ]
    assert (rollout.finish, rollout.seats, {turn.node for turn in rollout.turns}) == ("length", (), {""})
    assert generated.seconds >= 6.0
    assert generated.steps == 6


async def test_each_turn_continues_all_that_was_read_and_said_from_the_samples_own_seed(tmp_path: Path) -> None:
    engine = Engine("0")
    (game, other) = games(stage(tmp_path), replace(PLAY, max_turns=2), 2)
    (rollout, _), _ = await play_together([game, other], engine)
    first, second = engine.asked
    assert [job.seed for job in first] == [job.seed for job in second] == [0, 1]
    read = rollout.tokens()[: rollout.turns[1].start]
    assert second[0].prompt_token_ids == (*first[0].prompt_token_ids, *read)


async def test_turns_of_all_episodes_are_drawn_together_and_a_plain_sample_is_drawn_once(tmp_path: Path) -> None:
    engine, made = Engine("0"), stage(tmp_path)
    short, long, plain = (games(made, play)[0] for play in (replace(PLAY, max_turns=2), PLAY, None))
    rollouts, generated = await play_together([short, plain, long], engine)
    assert [len(jobs) for jobs in engine.asked] == [3, 2, *[1] * 8]
    assert [len(rollout.turns) for rollout in rollouts] == [2, 0, 10]
    assert rollouts[1].length == 2
    assert [one.token_ids for one in generated.samples] == [one.token_ids for one in rollouts]


async def test_an_episode_that_is_over_ends_with_stop(tmp_path: Path) -> None:
    moves = next(
        way for way in chain.from_iterable(product("0123", repeat=n) for n in (4, 5, 6, 7, 8)) if is_solved(way)
    )
    (rollout,), _ = await play_together(games(stage(tmp_path), PLAY), Engine(*moves))
    assert rollout.finish == "stop"
    assert sum(turn.reward for turn in rollout.turns) == pytest.approx(1.0)
    assert rollout.turns[-1].end == rollout.length


async def test_tokens_of_an_episode_are_limited_and_its_last_turn_gets_what_is_left(tmp_path: Path) -> None:
    engine = Engine("0")
    reply = len(answer_to_a_wall())
    (rollout,), _ = await play_together(games(stage(tmp_path), replace(PLAY, max_tokens=2 + reply + 1)), engine)
    assert [jobs[0].rules.max_new_tokens for jobs in engine.asked] == [2, 1]
    assert (rollout.finish, len(rollout.turns)) == ("length", 2)


def test_the_environments_process_is_kept_from_the_nodes_secrets(tmp_path: Path) -> None:
    """As the engine's is (test_confine.py); without the word, a process would not be confined at all."""
    made = Stage(tmp_path, [tmp_path / "node.key", tmp_path / "token"])
    made.begin(lease(), PLAY)
    assert made.pool is not None
    (process,) = made.pool._workers
    assert process._child._arguments == ("confined", str(tmp_path / "node.key"), str(tmp_path / "token"))


async def test_an_environment_that_fails_fails_the_sample(tmp_path: Path) -> None:
    (rollout,), _ = await play_together(games(stage(tmp_path, Acting("it burnt")), PLAY), Engine("0"))
    assert (rollout.finish, rollout.reason) == ("failed", "the environment failed: it burnt")
    assert rollout.turns == ()


async def test_a_turn_that_was_not_drawn_in_time_fails_the_whole_sample(tmp_path: Path) -> None:
    class Late(Engine):
        async def __call__(self, jobs: tuple[Job, ...]) -> Generated:
            done = await super().__call__(jobs)
            late = Sampled(b"", b"", (), "failed", "time limit")
            return done if len(self.asked) == 1 else Generated(samples=(late,), seconds=1.0, steps=1)

    (rollout,), _ = await play_together(games(stage(tmp_path), PLAY, deadline_s=-1.0), Late("0"))
    assert (rollout.finish, rollout.reason, rollout.length) == ("failed", "time limit", 0)


@pytest.mark.parametrize(
    "play",
    [
        replace(PLAY, task="python:evil_module:Game"),
        replace(PLAY, task="gymnasium:evil_module/Game-v0"),
        replace(PLAY, task="swarm.environments.frozen_lake:FrozenLake"),
        replace(PLAY, task="copy"),
        replace(PLAY, task="gymnasium:FrozenLake-v1"),
        replace(PLAY, task="search:file=/etc/passwd"),
        replace(PLAY, task="frozen-lake:slippery=true"),
        replace(PLAY, task="frozen-lake:size=99"),
        replace(PLAY, began="yesterday"),
        replace(PLAY, arguments="[1]"),
    ],
    ids=lambda play: f"{play.task} {play.prompt_id} {play.began} {play.arguments}",
)
async def test_what_is_not_to_be_played_here_fails_before_anything_is_drawn_or_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, play: Play
) -> None:
    (tmp_path / "evil_module.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    engine = Engine("0")
    (rollout,), generated = await play_together(games(Stage(tmp_path, ()), play), engine)
    assert rollout.finish == "failed"
    assert rollout.reason.startswith("this node does not play it: ")
    assert (engine.asked, generated.steps) == ([], 0)
    assert "evil_module" not in sys.modules
