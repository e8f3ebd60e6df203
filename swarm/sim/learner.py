"""The learner of a simulated swarm: the plane's shell (rollout/api.py) and the loop of steps (node/learner.py).

Theory of operation. Handlers are what the HTTP handlers are; a question that is only paced is held open and tried
again whenever the plane has changed, until its time is over. A step takes `train_step_s` and changes nothing here,
as if no group had any variance. After the last step the newest weights are published and measured, as in a real run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarm.rollout.effects import (
    Effect,
    Evaluated,
    GenerationFailed,
    Granted,
    Judged,
    LeaseOverdue,
    NodeSilent,
    Refused,
    ScoreWanted,
)
from swarm.rollout.entries import (
    BatchTaken,
    GroupDropped,
    GroupOpened,
    RolloutAccepted,
    RolloutScored,
    SamplesLeased,
)
from swarm.sim.checkers import Holding, WatchedPlane, oldest_of
from swarm.sim.network import Reply
from swarm.sim.scenario import Scenario
from swarm.sim.world import World
from swarm.types import Lease, NodeId, Prompt, Rollout, Score, VersionId

LEARNER = "learner"

HELD_OPEN_S = 10.0
"""How long a question is held open; node/session.py asks for as much."""

REPLY_BYTES = 200
"""Size of an answer without a payload: it only has to be small against a rollout."""

Held = Callable[[bool], bool]
"""Tries to answer a held question; the argument says that its time is over. True once it is answered."""


@dataclass(slots=True, kw_only=True)
class Figures:
    """What a run shows."""

    steps: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    trained: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    evaluations: int = 0
    samples_lost: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def idle_share(self) -> float:
        """Of the time since the first batch, how much the learner waited for the next one."""
        return self.idle_s / (self.busy_s + self.idle_s)


class Learner:
    """Answers samplers, takes batches, publishes versions."""

    def __init__(self, world: World, scenario: Scenario, plane: WatchedPlane) -> None:
        self._world = world
        self._scenario = scenario
        self._plane = plane
        self._held: dict[int, tuple[NodeId, Held]] = {}
        self._questions = 0
        self._installed: dict[NodeId, VersionId] = {}
        self._training = False
        self._waiting_since: float | None = None
        self._final = False
        self.finished = False
        self.figures = Figures()

    def start(self) -> None:
        self._publish(0)
        self._evaluate()
        self._watch_silence()
        self._changed()

    # -- what samplers ask -----------------------------------------------------------------------------------

    def leases(
        self, node: NodeId, held: VersionId, capacity: int, holding: Holding, reply: Reply[Granted | Refused]
    ) -> None:
        """Leases, or why there are none; held open while the fleet is paced. `holding` is true at arrival only."""
        self._note_install(node, held)
        said: Holding | None = holding

        def attempt(over: bool) -> bool:
            nonlocal said
            known = max(held, self._installed.get(node, held))
            answer = self._plane.ask(node, known, capacity, said)
            said = None
            assert isinstance(answer, Granted | Refused)
            if isinstance(answer, Refused) and answer.reason == "paced" and not over:
                return False
            reply(answer, REPLY_BYTES)
            return True

        self._hold(node, attempt)

    def newer_version(self, node: NodeId, known: VersionId | None, reply: Reply[VersionId | None]) -> None:
        """The newest version once it is newer than `known`; None when the time is over."""

        def attempt(over: bool) -> bool:
            newest = self._plane.newest
            news = newest is not None and (known is None or newest > known)
            if news or over:
                reply(newest if news else None, REPLY_BYTES)
            return news or over

        self._hold(node, attempt)

    def beat(self, node: NodeId, installed: VersionId | None, reply: Reply[bool]) -> None:
        """A sign of life; the answer says whether the run is over."""
        self._plane.beat(node)
        if installed is not None and self._note_install(node, installed):
            self._changed()
        reply(self.finished, REPLY_BYTES)

    def rollouts(self, node: NodeId, answers: Sequence[tuple[Lease, Rollout]], reply: Reply[Counter[str]]) -> None:
        """The verdicts on a batch of answers, counted."""
        effects: list[Effect] = []
        for lease, rollout in answers:
            effects += self._plane.submit(node, lease, rollout)
        verdicts = Counter(effect.verdict for effect in effects if isinstance(effect, Judged))
        self._perform(effects)
        self._changed()
        reply(Counter(verdicts), REPLY_BYTES)

    def release(self, node: NodeId, samples: Sequence[tuple[str, int]], leaving: bool, reply: Reply[bool]) -> None:
        """Samples handed back unfinished. The open questions of a node that leaves end: they would bring it back."""
        for group_id, index in samples:
            self._plane.release(node, group_id, index)
        if leaving:
            self._held = {number: held for number, held in self._held.items() if held[0] != node}
            self._plane.leave(node)
            self._installed.pop(node, None)
        self._changed()
        reply(True, REPLY_BYTES)

    # -- steps -----------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """The plane has changed: go on with what waits for it."""
        self._take_if_ready()
        for number, (_, attempt) in list(self._held.items()):
            if attempt(False):
                del self._held[number]

    def _take_if_ready(self) -> None:
        if self._training or self._final or not self._plane.can_take():
            return
        step = self._plane.next_batch
        batch, effects = self._plane.take()
        if self._waiting_since is not None:
            self.figures.idle_s += self._world.now - self._waiting_since
        for group in batch:
            ages = [step - oldest_of(sample.rollout) for sample in group.samples if sample.rollout]
            self.figures.trained += len(ages)
            self.figures.staleness_sum += sum(ages)
            self.figures.staleness_max = max(self.figures.staleness_max, *ages)
        self._training = True
        self._perform(effects)
        self._world.note(f"step {step} takes {' '.join(group.group_id for group in batch)}")
        self._world.schedule(self._scenario.train_step_s, "trained", self._trained)

    def _trained(self) -> None:
        self._training = False
        self._waiting_since = self._world.now
        self.figures.steps += 1
        self.figures.busy_s += self._scenario.train_step_s
        step = self.figures.steps
        self._final = step == self._scenario.steps
        if step % self._scenario.publish_every_steps == 0 or self._final:
            self._publish(step)
        if self._final:
            self._plane.end("draining")
        if not self._plane.evaluating and (step % self._scenario.eval_every_steps == 0 or self._final):
            self._evaluate()
        self._changed()

    def _publish(self, step: int) -> None:
        self._plane.published(VersionId(incarnation=0, version=step))

    def _evaluate(self) -> None:
        newest = self._plane.newest
        assert newest is not None
        self._plane.evaluate(newest, [prompt(i) for i in range(self._scenario.eval_prompts)])

    def _evaluated(self, effect: Evaluated) -> None:
        self.figures.evaluations += 1
        if not self._final:
            return
        if effect.version < self.figures.steps:
            self._evaluate()
        else:
            self._plane.end("finished")
            self.finished = True

    def _watch_silence(self) -> None:
        self._perform(self._plane.tick())
        self._changed()
        due = self._plane.deadline()
        wait_s = self._scenario.beat_s if due is None else max(0.05, due - self._world.now)
        self._world.schedule(wait_s, "silence watch", self._watch_silence)

    # -- effects ---------------------------------------------------------------------------------------------

    def _perform(self, effects: Sequence[Effect]) -> None:
        wanted: list[ScoreWanted] = []
        for effect in effects:
            match effect:
                case Judged():
                    self._world.note(f"{effect.rollout_id} of {effect.node} is {effect.verdict}")
                    self.figures.verdicts[effect.verdict] += 1
                case ScoreWanted():
                    wanted.append(effect)
                case GroupDropped():
                    self._world.note(f"{effect.group_id} is dropped: {effect.reason}")
                    self.figures.dropped[effect.reason] += effect.rollouts
                case NodeSilent():
                    self._world.note(f"{effect.node} is silent with {effect.samples} samples")
                    self.figures.samples_lost += effect.samples
                    self._installed.pop(effect.node, None)
                case Evaluated():
                    self._evaluated(effect)
                case GenerationFailed() | LeaseOverdue():
                    pass
                case GroupOpened() | SamplesLeased() | RolloutAccepted() | RolloutScored() | BatchTaken():
                    pass
                case Granted() | Refused():
                    raise AssertionError("answers to a question are not effects to perform")
        if wanted:
            self._world.schedule(self._scenario.reward_s, "scored", lambda: self._score(wanted))

    def _score(self, wanted: Sequence[ScoreWanted]) -> None:
        """Rewards of one submission arrive together, or fail together."""
        effects: list[Effect] = []
        if self._world.random.random() < self._scenario.reward_failure_share:
            for group_id in dict.fromkeys(asked.group_id for asked in wanted):
                effects += self._plane.unscorable(group_id, "reward_failed")
        else:
            for asked in wanted:
                effects += self._plane.scored(asked.group_id, asked.index, Score(reward=0.0, exact=False))
        self._perform(effects)
        self._changed()

    def _note_install(self, node: NodeId, version: VersionId) -> bool:
        known = self._installed.get(node)
        self._installed[node] = version
        return version != known

    def _hold(self, node: NodeId, attempt: Held) -> None:
        if attempt(False):
            return
        self._questions += 1
        number = self._questions
        self._held[number] = (node, attempt)

        def over() -> None:
            if self._held.pop(number, None) is not None:
                attempt(True)

        self._world.schedule(HELD_OPEN_S, "question over", over)


def prompt(index: int) -> Prompt:
    """The `index`-th prompt: three token ids that name it."""
    return Prompt(prompt_id=f"p{index}", text="", answer="", token_ids=(1, index % 97, index % 89))
