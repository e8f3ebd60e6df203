"""A process that computes rewards and plays episodes for RewardPool, which starts it without the node's secrets.

It receives one Begin, then any number of ScoreCall and StepCall (process.py).
"""

from __future__ import annotations

import io
import os
import random
import signal
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from swarm.bounded import Bounded
from swarm.environments.base import Environment, Step
from swarm.errors import UserError
from swarm.machine import limit_memory
from swarm.process import ChildChannel
from swarm.tasks import load_task
from swarm.tasks.base import RewardKind, Task, TaskOptions, random_score
from swarm.tasks.chat import load_chat_template
from swarm.tasks.turns import TurnText, completion_text
from swarm.types import MAX_PARTS, MAX_TOKENS, PART_NAME_LENGTH, Observed, Prompt, Score

MAX_FIGURE = 1e9  # Of a reward or a part of it, so that sums and squares over a step stay finite
MAX_LIVE = 1024  # Environments kept in memory, about as many as a step has open; others are played again when needed


def module_path() -> tuple[str, ...]:
    """Where this process looks for modules, and its working directory, where the user's own are."""
    return tuple(dict.fromkeys([*map(os.path.abspath, sys.path), os.getcwd()]))


class BeginRewards(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Which task, which reward, and its limits. `tokenizer` is a file among the model's small ones; "" if completions
    come as texts. `path` is where to look for modules. `memory_bytes` limits the process (RLIMIT_DATA), on Linux alone.

    The rest is for episodes, which are played only if it is known when the run `began`: a chat template that asks for
    the date is told that time, and has its own `arguments`. `chat` replaces what the environment says."""

    task: TaskOptions
    reward: RewardKind = "task"
    tokenizer: str = ""
    stop_token_ids: tuple[int, ...] = ()
    memory_bytes: int = 4 << 30
    path: tuple[str, ...] = msgspec.field(default_factory=module_path)
    began: datetime | None = None
    arguments: dict[str, bool | int | str] = {}
    chat: bool | None = None
    system_prompt: str | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One rollout to score. `token_ids` are int32, little-endian; a `text` is scored as it is instead."""

    prompt: Prompt
    token_ids: bytes = b""
    seed: int = 0
    text: str | None = None


class ScoreCall(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Completions to score, in order. None begins later than `turn_s` after the first."""

    completions: tuple[Completion, ...]
    turn_s: float


class StepCall(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The turns of an episode, as in StepWanted; the environment is to answer the last one. All turns are sent, some
    tens of kB, since a process that has lost the episode plays it again."""

    episode: str
    prompt: Prompt
    seed: int = 0
    drawn: tuple[bytes, ...] = ()


class Outcome(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A score, an environment's answer, or the `fault`. It is empty for Begin."""

    score: Score | None = None
    fault: str = ""
    observed: Observed = Observed()


class RewardReply(msgspec.Struct, frozen=True, array_like=True):
    """The outcomes of the first completions of a ScoreCall, at least one. One outcome of any other call."""

    outcomes: tuple[Outcome, ...]


class ScoredEpisode:
    """An episode that began with `prompt`, after `turns` turns. `control` is the seed of a random reward, which is
    given in the first turn, so that it depends neither on what the model says nor on how the episode ends."""

    def __init__(self, environment: Environment, text: TurnText, prompt: Prompt, control: int | None = None) -> None:
        begun = [*map(tuple, environment.reset(int(prompt.prompt_id.rpartition("-")[2])))]
        if prompt.messages and begun != [*prompt.messages]:
            raise ValueError("reset() gave other messages for the same seed: use no randomness but random.Random(seed)")
        self._environment, self._text, self._control = environment, text, control
        self._seat = self.turns = 0
        self._drawn: dict[int, array[int]] = {}
        self._parts: dict[str, float] = {}

    def step(self, drawn: bytes) -> Observed:
        """Return the environment's answer to a turn, given as token ids (int32). Raise ValueError or TypeError if the
        answer is malformed."""
        seats, tokens = self._environment.seats, array("i", drawn)
        step = self._environment.step(self._text.text_of(tokens))
        if not isinstance(step, Step):
            raise TypeError(f"step() gives a Step, not a {type(step).__name__}")
        if len(step.rewards) > seats or step.seat not in range(seats):
            raise ValueError(f"a Step of {seats} players has {len(step.rewards)} rewards and seat {step.seat} next")
        rewards = (*checked_figures({f"reward {i}": reward for i, reward in enumerate(step.rewards, 1)}).values(),)
        if self._control is not None:
            rewards = (0.0 if self.turns else random.Random(self._control).random(),)
        parts = {name: self._parts.get(name, 0.0) + value for name, value in step.parts.items()}
        self._parts = checked_figures({**self._parts, **parts})
        self._drawn[self._seat], self._seat, self.turns = tokens, step.seat, self.turns + 1
        if step.done:
            return Observed(rewards=rewards, done=True, exact=bool(step.solved), parts=self._parts)
        if not all(isinstance(text, str) for message in step.messages for text in message):
            raise TypeError("messages are (role, content) pairs of texts")
        last = self._drawn.get(step.seat)
        read = self._text.opening(step.messages) if last is None else self._text.reply(last, step.messages)
        if not 0 < len(read) <= MAX_TOKENS:
            raise ValueError(f"the messages for seat {step.seat} have {len(read)} tokens, not 1 to {MAX_TOKENS}")
        return Observed(token_ids=array("i", read).tobytes(), seat=step.seat, rewards=rewards, parts=self._parts)


class Episodes:
    """The episodes of this process, up to MAX_LIVE. If there are more, the least recently used one is dropped."""

    def __init__(self, begin: BeginRewards, began: datetime, task: Task, tokenizer: Tokenizer) -> None:
        chat, files_dir = task.chat if begin.chat is None else begin.chat, Path(begin.tokenizer).parent
        template = load_chat_template(files_dir, began=began, arguments=begin.arguments) if chat else None
        self._text = TurnText(tokenizer, template, begin.stop_token_ids, begin.system_prompt)
        self._task, self._is_control = task, begin.reward == "random"
        self.live: Bounded[str, ScoredEpisode] = Bounded(MAX_LIVE)

    def answer(self, call: StepCall, progress: Callable[[], None] = lambda: None) -> Observed:
        """Return the answer to the last turn, if there is one. Raise what the environment raises, and drop the episode.
        `progress` is called after each turn that is played again, since each has its own time limit."""
        *before, last = call.drawn or (None,)
        episode = self.live.pop(call.episode, None)
        if episode is None or episode.turns != len(before):
            control = call.seed if self._is_control else None
            episode = ScoredEpisode(self._task.environment(), self._text, call.prompt, control)
            for drawn in before:
                assert drawn is not None
                if episode.step(drawn).done:
                    raise ValueError("step() ends an episode that went on when the same turns were played before")
                progress()
        observed = episode.step(last) if last is not None else Observed()
        if not observed.done:
            self.live[call.episode] = episode
        return observed


class Rewards:
    """Handles the calls of this process; the first is Begin, which names the task."""

    def __init__(self, progress: Callable[[], None]) -> None:
        self._progress = progress

    def handle(self, call: BeginRewards | ScoreCall | StepCall) -> RewardReply:
        match call:
            case BeginRewards():
                return RewardReply((self._load(call),))
            case StepCall():
                return RewardReply((self._guarded(partial(self._step, call)),))
            case ScoreCall():
                return RewardReply((*self._scored(call),))

    def _scored(self, call: ScoreCall) -> Iterator[Outcome]:
        until = time.monotonic() + call.turn_s
        for i, completion in enumerate(call.completions):
            if i and time.monotonic() >= until:
                return
            self._progress()
            yield self._guarded(partial(self._score, completion))

    def _step(self, call: StepCall) -> Outcome:
        assert self._episodes is not None
        return Outcome(observed=self._episodes.answer(call, self._progress))

    def _guarded(self, work: Callable[[], Outcome]) -> Outcome:
        try:
            return work()
        except MemoryError:
            if self._episodes is not None:
                self._episodes.live.clear()  # They may hold the memory; each is played again when it is asked for
            limit = f"{self._begin.memory_bytes >> 20} MiB that a reward may use"
            return Outcome(fault=f"it needs more memory than the {limit}")
        except UserError as error:
            return Outcome(fault=str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a reward may raise anything
            return Outcome(fault=f"it raised {one_line(error)}")

    def _load(self, begin: BeginRewards) -> Outcome:
        sys.path[:] = begin.path
        limit_memory(begin.memory_bytes)
        self._begin = begin
        self._episodes: Episodes | None = None
        try:
            self._task = load_task(begin.task)
            self._task.ready()
            self._tokenizer = Tokenizer.from_file(begin.tokenizer) if begin.tokenizer else None
            if begin.began and self._tokenizer and self._task.player is not None:
                self._episodes = Episodes(begin, begin.began, self._task, self._tokenizer)
        except Exception as error:  # noqa: BLE001 - a user's task may raise anything
            return Outcome(fault=one_line(error))
        return Outcome()

    def _score(self, completion: Completion) -> Outcome:
        text = completion.text
        if text is None:
            assert self._tokenizer is not None
            text = completion_text(self._tokenizer, array("i", completion.token_ids), self._begin.stop_token_ids)
        if self._begin.reward == "random":
            return Outcome(score=checked(random_score(self._task, completion.prompt, text, completion.seed)))
        return Outcome(score=checked(self._task.score(completion.prompt, text)))


def main() -> None:
    # Some event loops leave descriptors open in a child; none of the node's may be reachable here.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    # Flush each line, so that a reward's author sees what it printed before it was killed.
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = ChildChannel()
    channel.serve(BeginRewards | ScoreCall | StepCall, Rewards(channel.progress).handle)


def one_line(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def checked(score: object) -> Score:
    """`score` in plain types (a reward may be a numpy number). Raises if it is not a Score of finite numbers."""
    if not isinstance(score, Score):
        raise TypeError(f"a reward is a Score, not a {type(score).__name__}")
    reward = checked_figures({"the reward": score.reward})["the reward"]
    return Score(reward=reward, exact=bool(score.exact), parts=checked_figures(score.parts))


def checked_figures(given: Mapping[str, float]) -> dict[str, float]:
    """Figures by name, in plain types. ValueError if there are too many, or one is not a finite number."""
    figures = {str(name)[:PART_NAME_LENGTH]: float(figure) for name, figure in given.items()}
    if len(figures) > MAX_PARTS:
        raise ValueError(f"a reward has {len(figures)} parts, and may have {MAX_PARTS}")
    for name, figure in figures.items():
        if not abs(figure) <= MAX_FIGURE:
            raise ValueError(f"{name} is {figure}, which is not a finite number up to {MAX_FIGURE:g}")
    return figures


if __name__ == "__main__":
    main()
