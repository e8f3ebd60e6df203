"""Episodes on a virtual clock: the real plane, samplers at a distance, environments that think, and crashes.

Theory of operation. A sampler holds episodes, draws as many turns side by side as it has places, hands each turn in,
and goes on with what comes back; an episode that is away has no place. It has one question open at a time, as
Feed and Session do. What it draws names sample and turn, so that the checks see whose token is where. An
environment's answer follows from what was said to it. Every answer of the plane that must not be lost is read into a
ledger before anything rests on it, and a learner that crashes begins its next life from there.

Checked after every effect: a turn continues exactly what was read and said; a sample is accepted once at a time and
trained once; an accepted episode is whole, from its first turn to its last; a batch holds nothing that is too old.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import NoReturn

from msgspec.structs import replace

from swarm.plan.simulate.world import World
from swarm.rollout.journal.entries import Record, RolloutAccepted, RolloutReturned
from swarm.rollout.messages import Answer
from swarm.rollout.plane.effects import Effect, Granted, Judged, StepWanted
from swarm.rollout.plane.episodes import EpisodeRules
from swarm.rollout.plane.plane import PlaneRules, RolloutPlane
from swarm.sampler.feeding import Room, room_of, spare_of
from swarm.types import Lease, NodeId, Observed, Prompt, Rollout, SamplingRules, Span, VersionId
from tests.simulator.rollouts.ledger import Ledger

STOP, VOCABULARY = 1, 1 << 20
MAX_TURNS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeScenario:
    """`turns` of an episode, exactly, or up to so many if they are `uneven`. Times are means in seconds."""

    samplers: int = 3
    places: int = 16
    turns: int = 8
    uneven: bool = False
    draw_s: float = 0.5
    think_s: float = 0.01
    round_trip_s: float = 0.1
    groups_per_step: int = 8
    group_size: int = 8
    max_staleness: int = 4
    step_s: float = 0.2
    steps: int = 30
    beat_s: float = 2.0
    crashes_per_s: float = 0.0
    learner_crashes_per_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Figures:
    steps: int = 0
    episodes: int = 0
    turns: int = 0
    moved: int = 0
    crashes: int = 0
    idle_share: float = 0.0


class Breach(AssertionError):
    """An invariant is broken; the message says how to see it again."""


class EpisodeSwarm:
    """One run. `ended` says for how many turns the episode of a group and index goes on."""

    def __init__(self, scenario: EpisodeScenario, seed: int) -> None:
        self.scenario = scenario
        self.seed = seed
        self.world = World(Random(seed))
        self.figures = Figures()
        self.version = 0
        self._ledger = Ledger(scenario.group_size, self._breach)
        self._trained: Counter[str] = Counter()
        self._live: Counter[str] = Counter()
        self._held: list[tuple[NodeId, Answer, Callable[[Observed], None]]] = []
        self._life = 0
        self._busy_since: float | None = None
        self._samplers = [
            _Sampler(self, NodeId(f"s{number}"), Random(f"{seed}/{number}")) for number in range(scenario.samplers)
        ]
        self.plane = self._new_plane()

    def run(self) -> Figures:
        self.plane.published(VersionId(incarnation=0, version=0))
        for sampler in self._samplers:
            self.world.schedule(0.0, f"{sampler.node} begins", sampler.begin)
        self._later(self.scenario.crashes_per_s, self._crash_one)
        self._later(self.scenario.learner_crashes_per_s, self._crash_learner)
        self.world.schedule(0.1, "tick", self._tick)
        self.world.run_until(lambda: self.figures.steps >= self.scenario.steps or self.world.now > 3600)
        self._require(self.figures.steps >= self.scenario.steps, "the run stands still")
        busy = sum(sampler.busy_s(self.world.now) for sampler in self._samplers)
        self.figures.idle_share = 1 - busy / sum(sampler.open_s(self.world.now) for sampler in self._samplers)
        return self.figures

    # -- the learner ------------------------------------------------------------------------------------------

    def ask(self, sampler: _Sampler, room: Room, holding: frozenset[tuple[str, int]] | None) -> Sequence[Lease]:
        held = VersionId(incarnation=0, version=self.version)
        *effects, answer = self.plane.ask(
            sampler.node, held, room.capacity, now=self.world.now, at_once=room.at_once, holding=holding
        )
        self.perform(effects)
        return answer.leases if isinstance(answer, Granted) else ()

    def step(self, node: NodeId, answer: Answer, reply: Callable[[Observed], None]) -> None:
        """Take a turn, unless it was taken before, and reply once its environment has answered."""
        effects: list[Effect] = []
        if not self.plane.is_taken(node, answer):
            judged, *effects = self.plane.submit(node, answer, now=self.world.now)
            assert isinstance(judged, Judged)
            self._require(judged.verdict in ("accepted", "duplicate", "stale"), f"{answer.sample}: {judged}")
        self._held.append((node, answer, reply))
        self.perform(effects)

    def perform(self, effects: Sequence[Effect]) -> None:
        self._ledger.read([effect for effect in effects if isinstance(effect, Record)])
        for effect in effects:
            match effect:
                case StepWanted():
                    self._think(effect)
                case RolloutAccepted():
                    self._accepted(effect)
                case RolloutReturned():
                    self._live[f"t{effect.number}/{effect.index}"] = 0
                case _:
                    pass
        self._take()
        self._reply()
        for sampler in self._samplers:
            sampler.chance()

    def _reply(self) -> None:
        held, self._held = self._held, []
        for node, answer, reply in held:
            said = self.plane.next_of(node, answer)
            if said is None:
                self._held.append((node, answer, reply))
            else:
                reply(said)

    def _think(self, wanted: StepWanted) -> None:
        life = self._life

        def answered() -> None:
            if life == self._life:
                said = self._says(wanted, len(wanted.drawn) - 1)
                self.perform(
                    self.plane.observed(wanted.group_id, wanted.index, wanted.episode, said, now=self.world.now)
                )

        self.world.schedule(self.world.random.expovariate(1 / self.scenario.think_s), "thought", answered)

    def _says(self, wanted: StepWanted, turn: int) -> Observed:
        done = turn + 1 == self.turns_of(wanted.group_id, wanted.index)
        return Observed(token_ids=array("i", [1000 + turn]).tobytes(), rewards=(1.0,), done=done, exact=done)

    def turns_of(self, group_id: str, index: int) -> int:
        scenario = self.scenario
        return Random(f"{group_id}/{index}").randint(1, scenario.turns) if scenario.uneven else scenario.turns

    def _accepted(self, record: RolloutAccepted) -> None:
        rollout = record.rollout
        name = rollout.rollout_id
        self._live[name] += 1
        self._require(self._live[name] == 1, f"{name} is accepted twice")
        expected: list[int] = []
        for turn in range(self.turns_of(rollout.group_id, rollout.index)):
            expected += [*drawn_tokens(rollout.group_id, rollout.index, turn), 1000 + turn]
        self._require(rollout.tokens().tolist() == expected, f"{name} is not what was drawn and said")
        self._require(len(rollout.turns) == self.turns_of(rollout.group_id, rollout.index), f"{name} lacks turns")
        self.figures.episodes += 1
        self.figures.turns += len(rollout.turns)
        self.figures.moved += len({turn.node for turn in rollout.turns}) > 1

    def _take(self) -> None:
        if self._busy_since is not None or not self.plane.can_take(now=self.world.now):
            return
        step = self.plane.next_batch
        batch, effects = self.plane.take()
        self._ledger.read([effect for effect in effects if isinstance(effect, Record)])
        for group in batch:
            for sample in group.samples:
                assert sample.rollout is not None
                self._trained[sample.rollout.rollout_id] += 1
                self._require(
                    self._trained[sample.rollout.rollout_id] == 1, f"{sample.rollout.rollout_id} trained twice"
                )
                age = step - min(span.version.version for span in sample.rollout.spans)
                self._require(age <= self.scenario.max_staleness, f"{sample.rollout.rollout_id} is {age} old (I1)")
        self._busy_since = self.world.now
        life = self._life
        self.world.schedule(self.scenario.step_s, "trained", lambda: self._step_done(life))

    def _step_done(self, life: int) -> None:
        if life != self._life:
            return
        self._busy_since = None
        self.figures.steps += 1
        self.version += 1
        self.plane.published(VersionId(incarnation=0, version=self.version))
        self.perform(())

    def _tick(self) -> None:
        self.perform(self.plane.tick(now=self.world.now))
        self.world.schedule(0.1, "tick", self._tick)

    def _crash_one(self) -> None:
        self.world.random.choice(self._samplers).crash()
        self.figures.crashes += 1

    def _crash_learner(self) -> None:
        """What is on record is all that the next life has; the step under way is taken again at once."""
        self._life += 1
        run = self._ledger.run()
        lost = run.next_batch - self.version
        self.version += lost
        self.figures.steps += lost
        self._busy_since = None
        self._held = []
        self.plane = self._new_plane()
        self.plane.published(VersionId(incarnation=0, version=self.version))
        for sampler in self._samplers:
            sampler.disconnected()
        self.perform(self.plane.restore(run, now=self.world.now))

    def _later(self, per_s: float, what: Callable[[], None]) -> None:
        if not per_s:
            return

        def happens() -> None:
            what()
            self._later(per_s, what)

        self.world.schedule(self.world.random.expovariate(per_s), "crash", happens)

    def _new_plane(self) -> RolloutPlane:
        scenario = self.scenario
        rules = PlaneRules(
            run_seed=self.seed,
            life=self._life,
            max_staleness=scenario.max_staleness,
            groups_per_step=scenario.groups_per_step,
            group_size=scenario.group_size,
            rules=SamplingRules(temperature=1.0, max_new_tokens=8, stop_token_ids=(STOP,)),
            vocab_size=VOCABULARY,
            beat_s=scenario.beat_s,
            lease_time_limit_s=60.0,
            episodes=EpisodeRules(max_turns=MAX_TURNS, max_tokens=1000),
        )
        return RolloutPlane(
            rules, prompts=lambda number: Prompt(prompt_id=f"p{number}", text="", answer="", token_ids=(7,))
        )

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            self._breach("episodes", what)

    def _breach(self, rule: str, what: str) -> NoReturn:
        again = f"EpisodeSwarm({self.scenario}, {self.seed}).run()"
        raise Breach(f"{rule}: {what}, at {self.world.now:.3f} s; again with {again}")


def drawn_tokens(group_id: str, index: int, turn: int) -> list[int]:
    """What any sampler draws as this turn: it names the sample and the turn."""
    return [2000 + int(group_id.removeprefix("t")) % 1000 * 64 + index, 500 + turn, STOP]


@dataclass(slots=True)
class _Game:
    """An episode in a sampler's hands: its lease, the number of its next turn, and what was read and said so far."""

    lease: Lease
    turn: int
    stream: list[int]

    @property
    def name(self) -> tuple[str, int]:
        return self.lease.group_id, self.lease.samples[0].index


class _Sampler:
    """One volunteer's engine, its question, and the turns that are away."""

    def __init__(self, swarm: EpisodeSwarm, node: NodeId, random: Random) -> None:
        self.node = node
        self._swarm = swarm
        self._random = random
        self._life = self._draws = 0
        self._reset()
        self._began: float | None = None
        self._busy = 0.0
        self._noted = 0.0

    def _reset(self) -> None:
        self._waiting: list[_Game] = []
        self._running: dict[int, _Game] = {}
        self._away: dict[tuple[str, int], tuple[_Game, Answer]] = {}
        self._asked: Room | None = None
        self._is_asking = False

    @property
    def room(self) -> Room:
        """As Feed has it."""
        missing = room_of(self._swarm.scenario.places, len(self._running) + len(self._waiting)).capacity
        return Room(missing, missing)

    def busy_s(self, now: float) -> float:
        self._note(now)
        return self._busy

    def open_s(self, now: float) -> float:
        return self._swarm.scenario.places * (now - (self._began if self._began is not None else now))

    def begin(self) -> None:
        self._beat(self._life)
        self._ask()

    def crash(self) -> None:
        self._note(self._swarm.world.now)
        self._life += 1
        self._reset()
        life = self._life

        def back() -> None:
            if life == self._life:
                self.begin()

        self._swarm.world.schedule(self._random.expovariate(1 / 5.0), f"{self.node} returns", back)

    def disconnected(self) -> None:
        """The learner is another one: the open question and the turns under way are lost, and sent again."""
        self._asked, self._is_asking = None, False
        self._swarm.world.schedule(0.5, f"{self.node} asks again", self._guarded(self._ask))
        for name in self._away:
            self._swarm.world.schedule(0.5, f"{self.node} hands in again", self._guarded(partial(self._send, name)))

    def chance(self) -> None:
        """Try the open question again."""
        if self._asked is not None:
            self._answer(None)

    def _ask(self) -> None:
        scenario, room = self._swarm.scenario, self.room
        if self._is_asking or 2 * room.capacity < spare_of(scenario.places):
            return
        self._is_asking = True
        holding = frozenset(
            [*self._away, *(game.name for game in self._running.values()), *(game.name for game in self._waiting)]
        )

        def arrived() -> None:
            self._asked = room
            self._answer(holding)

        self._swarm.world.schedule(scenario.round_trip_s / 2, f"{self.node} asks", self._guarded(arrived))

    def _answer(self, holding: frozenset[tuple[str, int]] | None) -> None:
        room, self._asked = self._asked, None
        assert room is not None
        leases = self._swarm.ask(self, room, holding)
        if not leases:
            self._asked = room
            return

        def told() -> None:
            self._is_asking = False
            self._take(leases)
            self._ask()

        self._swarm.world.schedule(
            self._swarm.scenario.round_trip_s / 2, f"{self.node} is answered", self._guarded(told)
        )

    def _take(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            assert lease.episode is not None
            for spec in lease.samples:
                stream = array("i", b"".join(lease.episode.streams)).tolist()
                self._waiting.append(_Game(replace(lease, samples=(spec,)), lease.episode.turn, stream))
        self._draw()

    def _draw(self) -> None:
        self._note(self._swarm.world.now)
        if self._began is None and self._waiting:
            self._began = self._noted = self._swarm.world.now
        while self._waiting and len(self._running) < self._swarm.scenario.places:
            game = self._waiting.pop(0)
            self._draws += 1  # A learner that came back may lease again what is being drawn.
            self._running[self._draws] = game
            took_s = self._swarm.scenario.draw_s * self._random.uniform(0.5, 1.5)
            version = self._swarm.version
            self._swarm.world.schedule(
                took_s, f"{self.node} drew", self._guarded(partial(self._drawn, self._draws, version))
            )

    def _drawn(self, draw: int, version: int) -> None:
        self._note(self._swarm.world.now)
        game = self._running.pop(draw)
        group_id, index = game.name
        tokens = drawn_tokens(group_id, index, game.turn)
        before = [token for turn in range(game.turn) for token in (*drawn_tokens(group_id, index, turn), 1000 + turn)]
        if game.stream != before:
            raise Breach(f"{game.name} continues something else in turn {game.turn}")
        rollout = Rollout(
            group_id=group_id,
            index=index,
            token_ids=array("i", tokens).tobytes(),
            logprobs=array("f", [-0.5] * len(tokens)).tobytes(),
            spans=(Span(version=VersionId(incarnation=0, version=version), start=0, end=len(tokens)),),
            finish="stop",
        )
        game.stream += tokens
        self._away[game.name] = game, Answer(rollout, game.lease.samples[0].attempt, game.turn)
        self._send(game.name)
        self._draw()
        self._ask()

    def _send(self, name: tuple[str, int]) -> None:
        if name not in self._away:
            return
        game, answer = self._away[name]
        half = self._swarm.scenario.round_trip_s / 2

        def told(said: Observed) -> None:
            if self._away.get(name) != (game, answer):
                return
            del self._away[name]
            if not said.done:
                game.stream += array("i", said.token_ids).tolist()
                game.turn += 1
                self._waiting.insert(0, game)
                self._draw()
            self._ask()

        def replied(said: Observed) -> None:
            self._swarm.world.schedule(half, f"{self.node} hears", self._guarded(lambda: told(said)))

        self._swarm.world.schedule(
            half, f"{self.node} hands in", self._guarded(lambda: self._swarm.step(self.node, answer, replied))
        )

    def _beat(self, life: int) -> None:
        if life == self._life:
            self._swarm.plane.beat(self.node, now=self._swarm.world.now)
            self._swarm.world.schedule(self._swarm.scenario.beat_s, f"{self.node} beats", lambda: self._beat(life))

    def _note(self, now: float) -> None:
        self._busy += len(self._running) * (now - self._noted)
        self._noted = now

    def _guarded(self, what: Callable[[], None]) -> Callable[[], None]:
        life, learner = self._life, self._swarm._life

        def run() -> None:
            if life == self._life and (learner == self._swarm._life or what is not self._ask):
                what()

        return run
