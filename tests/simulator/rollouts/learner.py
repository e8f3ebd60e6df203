"""The learner of a simulated swarm: the plane's shell (rollout/api.py), the loop of steps, its crashes and recovery.

Theory of operation. Handlers are what the HTTP handlers are; a question that is only paced is held open and tried
again whenever the plane has changed, until its time is over. What an answer rests on is committed before it is sent. A
step takes `train_step_s`; the trainer is fed from the record alone, the batches of a former life first, so that
recovery is the ordinary path. After the last step the newest weights are published and measured, as in a real run.

A crash may happen before each single effect (process.py). All that a life of the node has in memory is in Life and
in the plane; what is on disk is all that the next one knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.holding import HoldingPlane
from swarm.plan.simulate.world import World
from swarm.rollout.journal.entries import (
    BoundSet,
    GroupDropped,
    Record,
    RolloutAccepted,
    VersionPublished,
)
from swarm.rollout.plane.effects import (
    Effect,
    Evaluated,
    GenerationFailed,
    Granted,
    Judged,
    LeaseOverdue,
    NodeSilent,
    Refused,
    ScoreWanted,
    StepWanted,
)
from swarm.rollout.plane.rules import is_for_publication, publication_period
from swarm.sampler.session import ASK_WAIT_S
from swarm.types import Lease, NodeId, Observed, Rollout, Score, VersionId
from swarm.wire import Digest
from tests.simulator.network import Reply
from tests.simulator.rollouts.books import Holding, oldest_of
from tests.simulator.rollouts.checkers import WatchedPlane
from tests.simulator.rollouts.disk import Disk
from tests.simulator.rollouts.lineage import Lineage
from tests.simulator.rollouts.process import Process
from tests.simulator.rollouts.scenario import Death, Scenario
from tests.simulator.rollouts.task import prompt, said
from tests.simulator.rollouts.trainer import Trainer

LEARNER = "learner"

REPLY_BYTES = 200
"""Size of an answer without a payload: it only has to be small against a rollout."""

STARTING_S = 1.0
"""A learner that is not yet ready asks to come back after so long, as rollout/api.py does."""

A = TypeVar("A")
Held = Callable[[bool], bool]
"""Tries to answer a held question; the argument says that its time is over. True once it is answered."""


@dataclass(slots=True, kw_only=True)
class Figures:
    """Counted over all lives of the learner; a step that is trained again counts once."""

    steps: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    trained: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    evaluations: int = 0
    samples_lost: int = 0
    crashes: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def step(self, ages: Sequence[int]) -> None:
        """Count a learner step on rollouts of these ages."""
        self.steps += 1
        self.trained += len(ages)
        self.staleness_sum += sum(ages)
        self.staleness_max = max(self.staleness_max, *ages)

    @property
    def idle_share(self) -> float:
        """Of the time since the first batch, how much the learner waited for the next one."""
        return self.idle_s / (self.busy_s + self.idle_s)


@dataclass(slots=True, kw_only=True)
class Life:
    """What one life of the node has in memory besides the plane.

    `held` are open questions, with who would be leased to. `made` counts the steps that the trainer has ended,
    `recorded` is the newest version whose publication is enqueued, `hurry` says that one is to be published at once.
    """

    held: dict[int, tuple[NodeId | None, Held]] = field(default_factory=dict)
    installed: dict[NodeId, VersionId] = field(default_factory=dict)
    made: int = 0
    recorded: int = -1
    period: int = 1
    hurry: bool = False
    training: bool = False
    waiting_since: float | None = None

    def note_install(self, node: NodeId, version: VersionId) -> bool:
        """Whether it is news that `node` holds `version`."""
        known = self.installed.get(node)
        self.installed[node] = version
        return version != known

    def forget(self, node: NodeId) -> None:
        """It goes, and its open questions with it: they would bring it back."""
        self.held = {number: held for number, held in self.held.items() if held[0] != node}
        self.installed.pop(node, None)


class Learner:
    """Answers samplers, takes batches, publishes versions, dies and comes back. `new_plane(life, S)` makes a plane."""

    def __init__(
        self,
        world: World,
        scenario: Scenario,
        plane: WatchedPlane,
        disk: Disk,
        lineage: Lineage,
        new_plane: Callable[[int, int], HoldingPlane],
    ) -> None:
        self._world = world
        self._scenario = scenario
        self._plane = plane
        self._disk = disk
        self._lineage = lineage
        self._new_plane = new_plane
        self._trainer = Trainer(world, scenario, disk)
        self._process = Process(world, scenario, disk, self._died)
        self._life = Life()
        self._trainer_up = False
        self._questions = 0
        self.finished = False
        self.figures = Figures()

    @property
    def working(self) -> bool:
        """True while neither the node nor the trainer is down or goes over old steps again."""
        return self._plane.open and self._trainer_up and self._trainer.step >= self._life.made

    def start(self) -> None:
        """A life begins: the trainer catches up with the record, then samplers are served."""
        self._process.start()
        self._trainer_up = True
        self._process.guarded(self._train_next)()

    @property
    def points(self) -> int:
        """Effects performed so far, before each of which there could have been a crash."""
        return self._process.points

    # -- what samplers ask -----------------------------------------------------------------------------------

    def leases(
        self, node: NodeId, held: VersionId, capacity: int, holding: Holding, reply: Reply[Granted | Refused]
    ) -> None:
        """Leases, or why there are none; held open while the fleet is paced. `holding` is true at arrival only."""
        said: Holding | None = holding

        def attempt(over: bool) -> bool:
            nonlocal said
            known = max(held, self._life.installed.get(node, held))
            *records, answer = self._plane.ask(node, known, capacity, said)
            said = None
            if isinstance(answer, Refused) and answer.may_change and not over:
                return False
            self._perform(records)
            self._send_answer(node, answer, reply)
            return True

        def arrived() -> None:
            if not self._plane.open:
                self._send(reply, Refused(reason="starting", retry_after_s=STARTING_S))
                return
            self._life.note_install(node, held)
            self._hold(node, attempt)

        self._process.serve(arrived)

    def newer_version(self, known: VersionId | None, reply: Reply[VersionId | None]) -> None:
        """The newest version once it is newer than `known`; None when the time is over."""

        def attempt(over: bool) -> bool:
            newest = self._plane.newest
            news = newest is not None and (known is None or newest > known)
            if news or over:
                self._send(reply, newest if news else None)
            return news or over

        self._process.serve(lambda: self._hold(None, attempt))

    def beat(self, node: NodeId, installed: VersionId | None, tokens_per_s: float, reply: Reply[bool]) -> None:
        """A sign of life; the answer says whether the run is over."""

        def arrived() -> None:
            if self._plane.open:
                self._plane.beat(node, tokens_per_s)
                if installed is not None and self._life.note_install(node, installed):
                    self._changed()
            self._send(reply, self.finished)

        self._process.serve(arrived)

    def rollouts(
        self, node: NodeId, answers: Sequence[tuple[Lease, Rollout]], reply: Reply[Sequence[Observed | None] | None]
    ) -> None:
        """What is said to a batch of answers once all of them are judged and their environments have answered; None
        asks to come back."""

        def arrived() -> None:
            if not self._plane.open:
                self._send(reply, None)
                return
            effects: list[Effect] = []
            for lease, rollout in answers:
                effects += self._plane.submit(node, lease, rollout)
            accepted = [effect.rollout for effect in effects if isinstance(effect, RolloutAccepted)]
            self._perform(effects)

            def committed(heard: Sequence[Observed | None]) -> None:
                self._lineage.acknowledged(accepted)
                self._send(reply, heard)

            def attempt(over: bool) -> bool:
                heard = [self._plane.next_of(node, *one) for one in answers]
                if None in heard:
                    return over
                self._process.once_committed(lambda: committed(heard))
                return True

            self._hold(node, attempt)
            self._changed()

        self._process.serve(arrived)

    def release(self, node: NodeId, samples: Sequence[tuple[str, int]], leaving: bool, reply: Reply[bool]) -> None:
        """Samples handed back unfinished. The open questions for leases of a node that holds nothing any more end: they
        would bring it back."""

        def arrived() -> None:
            if self._plane.open:
                for group_id, index in samples:
                    self._plane.release(node, group_id, index)
                if leaving:
                    self._life.forget(node)
                    self._plane.leave(node)
                self._changed()
            self._send(reply, True)

        self._process.serve(arrived)

    # -- what the user asks ----------------------------------------------------------------------------------

    def set_bound(self, max_staleness: int) -> None:
        """Another S. A lower one shortens the period of publication, and has a version published at once."""

        def arrived() -> None:
            if self._plane.open:
                period = publication_period(self._scenario.publish_every_steps, max_staleness)
                self._disk.enqueue([BoundSet(max_staleness=max_staleness, publish_every_steps=period)])
                self._process.once_committed(lambda: apply(period))

        def apply(period: int) -> None:
            self._life.hurry = self._life.hurry or max_staleness < self._plane.bound
            self._life.period = period
            self._perform(self._plane.set_bound(max_staleness))
            self._publish_if_due()
            self._changed()

        self._process.serve(arrived)

    def set_standby(self, nodes: Sequence[NodeId]) -> None:
        """These are leased nothing from now on, all others are."""

        def arrived() -> None:
            if self._plane.open:
                self._plane.set_standby(dict.fromkeys(nodes, "simulated"))
                self._changed()

        self._process.serve(arrived)

    # -- lives -----------------------------------------------------------------------------------------------

    def _died(self, death: Death) -> None:
        """Somebody restarts what died, after a while; the trainer goes on from its newest checkpoint."""
        self.figures.crashes += 1
        self._life.training = self._trainer_up = False
        if death != "trainer":
            self._life = Life()
            self._plane.close()
        self._trainer.restart(saves=death == "node" and self._world.random.random() < 0.5)
        down_s = self._world.random.expovariate(1 / self._scenario.mean_learner_down_s)
        if death == "trainer":
            self._process.later(down_s, "trainer restarts", self.start)
        else:
            self._world.schedule(down_s, "learner restarts", self.start)

    def _open(self) -> None:
        """The trainer has caught up with the record: serve samplers from what it says."""
        run = self._disk.ledger.run()
        life = self._life = Life(made=self._trainer.step)
        bound = self._scenario.max_staleness if run.bound is None else run.bound.max_staleness
        life.period = publication_period(self._scenario.publish_every_steps, bound)
        self._perform(self._plane.begin(self._new_plane(self._process.life, bound), self._disk.ledger, bound=bound))
        if run.published is not None:
            life.recorded, life.hurry = run.published.version.version, True
            self._announce(run.published.version)
        self._watch_silence()
        self._publish_if_due()
        if life.made == self._scenario.steps:
            self._plane.end("draining")

    # -- steps -----------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """The plane has changed: go on with what waits for it."""
        self._take_if_ready()
        for number, (_, attempt) in list(self._life.held.items()):
            if attempt(False):
                self._life.held.pop(number, None)

    def _take_if_ready(self) -> None:
        life = self._life
        idle = self.working and self._trainer.step == life.made == self._plane.next_batch
        if not idle or life.made == self._scenario.steps:
            return
        if self._plane.can_take():
            _, effects = self._plane.take()
            if life.waiting_since is not None:
                self.figures.idle_s += self._world.now - life.waiting_since
            self._perform(effects)
            self._process.once_committed(self._train_next)

    def _train_next(self) -> None:
        """Feed the trainer the next batch on record; once there is none a life that begins opens the plane."""
        self._process.point()
        step, life = self._trainer.step, self._life
        if life.training or not self._trainer_up:
            return
        if step == len(self._disk.ledger.batches):
            if not self._plane.open:
                self._open()
            elif life.hurry:
                self._publish_if_due()
            self._take_if_ready()
            return
        batch = self._disk.ledger.batch(step)
        life.training = True
        self._world.note(f"step {step} takes {' '.join(one.rollout.rollout_id for one in batch)}")
        if step == self.figures.steps:
            self.figures.step([step - oldest_of(one.rollout) for one in batch])
        self._trainer.train(batch, self._process.guarded(lambda: self._trained(step)))

    def _trained(self, step: int) -> None:
        life = self._life
        life.training = False
        self._lineage.trained(step, self._trainer.weights)
        if self._plane.open and step == life.made:
            life.made += 1
            life.waiting_since = self._world.now
            self.figures.busy_s += self._scenario.train_step_s
            self._publish_if_due()
            self._after_step()
        self._train_next()

    def _after_step(self) -> None:
        final = self._life.made == self._scenario.steps
        if final:
            self._plane.end("draining")
        if not self._plane.evaluating and (final or self._life.made % self._scenario.eval_every_steps == 0):
            self._evaluate()
        self._changed()

    def _publish_if_due(self) -> None:
        life = self._life
        regular = is_for_publication(life.made, life.recorded, life.period, self._scenario.steps)
        due = life.hurry or life.recorded < 0 or regular
        if not due or self._trainer.step != life.made or life.made == life.recorded:
            return
        life.hurry, life.recorded = False, life.made
        version = VersionId(incarnation=0, version=life.made)
        self._disk.enqueue([VersionPublished(version=version, content=Digest(self._trainer.weights))])
        self._process.once_committed(lambda: self._announce(version))

    def _announce(self, version: VersionId) -> None:
        self._lineage.announced(version)
        first = self._plane.newest is None
        self._plane.published(version)
        if first:
            self._evaluate()
        self._changed()

    def _evaluate(self) -> None:
        newest = self._plane.newest
        assert newest is not None
        self._plane.evaluate(newest, [prompt(i) for i in range(self._scenario.eval_prompts)])

    def _evaluated(self, effect: Evaluated) -> None:
        self.figures.evaluations += 1
        if self._life.made < self._scenario.steps:
            return
        if effect.version < self._life.made:
            self._evaluate()
        else:
            self._plane.end("finished")
            self.finished = True

    def _watch_silence(self) -> None:
        self._perform(self._plane.tick())
        self._changed()
        due = self._plane.deadline()
        wait_s = self._scenario.beat_s if due is None else max(0.05, due - self._world.now)
        self._process.later(wait_s, "silence watch", self._watch_silence)

    # -- effects ---------------------------------------------------------------------------------------------

    def _perform(self, effects: Sequence[Effect]) -> None:
        wanted: list[ScoreWanted] = []
        for effect in effects:
            self._process.point()
            match effect:
                case Judged():
                    self._world.note(f"{effect.rollout_id} of {effect.node} is {effect.verdict}")
                    self.figures.verdicts[effect.counted_as] += 1
                case ScoreWanted():
                    wanted.append(effect)
                case StepWanted():
                    self._think(effect)
                case GroupDropped():
                    self._world.note(f"{effect.group_id} is dropped: {effect.reason}")
                    self.figures.dropped[effect.reason] += effect.rollouts
                    if effect.number is not None:
                        self._disk.enqueue([effect])
                case NodeSilent():
                    self._world.note(f"{effect.node} is silent with {effect.samples} samples")
                    self.figures.samples_lost += effect.samples
                    self._life.installed.pop(effect.node, None)
                case Evaluated():
                    self._evaluated(effect)
                case GenerationFailed() | LeaseOverdue():
                    pass
                case _ if isinstance(effect, Record):
                    self._disk.enqueue([effect])
                case Granted() | Refused():
                    raise AssertionError("answers to a question are not effects to perform")
        if wanted:
            self._process.later(self._scenario.reward_s, "scored", lambda: self._score(wanted))

    def _score(self, wanted: Sequence[ScoreWanted]) -> None:
        """Rewards of one submission arrive together; the first answer may be refused, as no seed draws it."""
        effects: list[Effect] = []
        refused = int(self._world.random.random() < self._scenario.refused_share)
        for asked in wanted[:refused]:
            effects += self._plane.refused(asked.group_id, asked.index)
        for asked in wanted[refused:]:
            score = Score(reward=float(asked.rollout.length % 2), exact=False)
            effects += self._plane.scored(asked.group_id, asked.index, score)
        self._perform(effects)
        self._changed()

    def _think(self, wanted: StepWanted) -> None:
        def answered() -> None:
            turn = len(wanted.drawn) - 1
            effects = self._plane.observed(wanted, said(wanted.group_id, wanted.index, turn, self._scenario.turns))
            accepted = [effect.rollout for effect in effects if isinstance(effect, RolloutAccepted)]
            self._perform(effects)
            self._process.once_committed(lambda: self._lineage.acknowledged(accepted))
            self._changed()

        self._process.later(self._world.random.expovariate(1 / self._scenario.think_s), "thought", answered)

    def _send_answer(self, node: NodeId, answer: Effect, reply: Reply[Granted | Refused]) -> None:
        """A refusal rests on nothing and is sent at once, leases once they are on record."""
        assert isinstance(answer, Granted | Refused)
        if isinstance(answer, Refused):
            self._send(reply, answer)
            return

        def committed() -> None:
            self._lineage.granted(node, answer.leases)
            self._send(reply, answer)

        self._process.once_committed(committed)

    def _send(self, reply: Reply[A], answer: A) -> None:
        self._process.point()
        reply(answer, REPLY_BYTES)

    def _hold(self, node: NodeId | None, attempt: Held) -> None:
        if attempt(False):
            return
        self._questions += 1
        number = self._questions
        self._life.held[number] = (node, attempt)

        def over() -> None:
            if self._life.held.pop(number, None) is not None:
                attempt(True)

        self._process.later(ASK_WAIT_S, "question over", over)
