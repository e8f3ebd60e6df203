"""What is lost of what samplers draw when their machines are taken away, and whether long answers suffer for it.

bin/python -m benchmarks.handover --json

The real rollout plane on a virtual clock: MACHINES machines of PLACES places draw answers whose lengths are lognormal
(sigma 1) and follow from their samples' seeds; a machine is taken away with the given chance an hour, and another comes
REPLACED_S later. How a machine goes:
restart    with 10 s to finish in; what is begun by then is drawn again from its first token, as before version 12 of
           the protocol
handed     with the notice of a cloud: what is begun is handed over within 20 s, and others go on
vanished   without a notice; all that is begun is drawn again
portions   without a notice, but a long answer is handed over every PORTION_S, as with --spot

`useful_share` is tokens of accepted answers over all tokens that were drawn for answers that have ended or were lost.
`length_bias_p` is of Kolmogorov's and Smirnov's test that the lengths of the answers that were trained on are those of
a run with another seed, of which no machine was taken away. `hours` is how long the same steps took.
"""

from __future__ import annotations

import math
import statistics
import sys
from array import array
from bisect import bisect_right
from functools import partial
from random import Random
from typing import NamedTuple

from benchmarks import Figures, ended, listed, parser_of, said
from swarm.join.sampler import PORTION_S
from swarm.join.spot import LEAVE_S, POLL_S
from swarm.plan.simulate.world import World
from swarm.rollout.messages import Answer
from swarm.rollout.plane.begun import begun_name
from swarm.rollout.plane.effects import Effect, Granted, Judged, ScoreWanted
from swarm.rollout.plane.plane import PlaneRules, RolloutPlane
from swarm.sampler.session import FAREWELL_S, GIVE_UP_S
from swarm.settings import JoinConfig
from swarm.types import Finish, Lease, NodeId, Prompt, Rollout, SamplingRules, Score, Span, VersionId

WAYS = ("restart", "handed", "vanished", "portions")
MACHINES, PLACES = 16, 8
GROUPS, GROUP_SIZE, STALENESS = 8, 8, 64
SIGMA = 1.0
TOKENS_PER_S = 1.0  # A simulated token is what an engine draws in a second
LONGEST = 40  # Times the mean: of 10,000 answers the longest has some 25
STEP_S, REPLACED_S, BEAT_S = 30.0, 120.0, 5.0
STOP, PLAIN = 1, 2
GRACE_S = float(JoinConfig.model_fields["grace"].default)


class Drawing(NamedTuple):
    """A sample that a machine has in a place, by the name of its group and its index."""

    name: tuple[str, int]
    lease: Lease
    attempt: int
    seed: int
    began_at: float


class Run:
    """One run. `lost` and `kept` count tokens, `lengths` those of each answer that was trained on."""

    def __init__(self, way: str, an_hour: float, mean_s: float, seed: int, steps: int) -> None:
        self.way, self.mean_tokens, self.steps = way, mean_s * TOKENS_PER_S, steps
        self.world = World(Random(f"{way} {an_hour} {mean_s} {seed}"))
        self.hazard_per_s = -math.log1p(-an_hour) / 3600
        self.lost = self.kept = 0
        self.lengths: list[int] = []
        self._is_busy = False
        self._machines: list[Machine] = []
        rules = SamplingRules(temperature=1.0, max_new_tokens=int(LONGEST * self.mean_tokens), stop_token_ids=(STOP,))
        self.plane = RolloutPlane(
            PlaneRules(
                run_seed=seed,
                max_staleness=STALENESS,
                groups_per_step=GROUPS,
                group_size=GROUP_SIZE,
                rules=rules,
                vocab_size=PLAIN + 1,
                beat_s=BEAT_S,
                lease_time_limit_s=600.0,
            ),
            prompts=lambda number: Prompt(prompt_id=f"p{number}", text="", answer="", token_ids=(PLAIN,)),
        )

    def play(self) -> None:
        self.plane.published(VersionId(incarnation=0, version=0))
        for number in range(MACHINES):
            self._join(number, 0)
        self._tick()
        self.world.run_until(lambda: self.plane.next_batch >= self.steps)

    def length(self, seed: int) -> int:
        """How long the answer of a sample is, in tokens."""
        drawn = Random(seed).lognormvariate(-(SIGMA**2) / 2, SIGMA)
        return max(1, min(int(LONGEST * self.mean_tokens), round(drawn * self.mean_tokens)))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ScoreWanted):
                score = Score(reward=float(effect.index % 2), exact=False)
                self.perform(self.plane.scored(effect.group_id, effect.index, score))

    def take(self) -> None:
        """Make a step, if there is a batch for it, and have everybody ask that waits."""
        if not self._is_busy and self.plane.can_take(now=self.world.now):
            batch, effects = self.plane.take()
            self.perform(effects)
            drawn = (sample.rollout for group in batch for sample in group.samples)
            self.lengths += [rollout.length for rollout in drawn if rollout is not None]
            self._is_busy = True
            self.world.schedule(STEP_S, "step", self._stepped)
        for machine in self._machines:
            machine.ask()

    def _stepped(self) -> None:
        self._is_busy = False
        self.plane.published(VersionId(incarnation=0, version=self.plane.next_batch))
        self.take()

    def _tick(self) -> None:
        self.perform(self.plane.tick(now=self.world.now))
        self.take()
        self.world.schedule(1.0, "tick", self._tick)

    def _join(self, number: int, life: int) -> None:
        machine = Machine(self, NodeId(f"m{number}.{life}"))
        self._machines.append(machine)
        machine.beat()
        if self.hazard_per_s:
            up_s = self.world.random.expovariate(self.hazard_per_s)
            self.world.schedule(up_s, "taken away", partial(self._take_away, machine, number, life))

    def _take_away(self, machine: Machine, number: int, life: int) -> None:
        self._machines.remove(machine)
        machine.take_away()
        self.world.schedule(REPLACED_S, "replaced", partial(self._join, number, life + 1))


class Machine:
    """A sampler with an engine whose places are filled one by one."""

    def __init__(self, run: Run, node: NodeId) -> None:
        self._run, self._node = run, node
        self._drawing: dict[tuple[str, int], Drawing] = {}
        self._is_going = self._is_gone = False

    def beat(self) -> None:
        if not self._is_gone:
            self._run.plane.beat(self._node, now=self._run.world.now, tokens_per_s=TOKENS_PER_S)
            self.ask()
            self._run.world.schedule(BEAT_S, "beat", self.beat)

    def ask(self) -> None:
        free, plane = PLACES - len(self._drawing), self._run.plane
        if not free or self._is_going or plane.newest is None:
            return
        *effects, answer = plane.ask(
            self._node, plane.newest, free, now=self._run.world.now, at_once=free, holding=[*self._drawing]
        )
        self._run.perform(effects)
        for lease in answer.leases if isinstance(answer, Granted) else ():
            for spec in lease.samples:
                name = (lease.group_id, spec.index)
                one = self._drawing[name] = Drawing(name, lease, spec.attempt, spec.seed, self._run.world.now)
                self._run.world.schedule(self._portion(one) / TOKENS_PER_S, "drawn", partial(self._ended, one))

    def _left(self, one: Drawing) -> int:
        return self._run.length(one.seed) - len(one.lease.begun) // 4

    def _drawn(self, one: Drawing) -> int:
        return int((self._run.world.now - one.began_at) * TOKENS_PER_S)

    def _portion(self, one: Drawing) -> int:
        left, begun = self._left(one), len(one.lease.begun) // 4
        most = max(int(PORTION_S * TOKENS_PER_S), begun // 8) if self._run.way == "portions" else left
        return min(left, most)

    def _ended(self, one: Drawing) -> None:
        if not self._is_gone and self._drawing.get(one.name) is one:
            tokens = self._portion(one)
            self._hand_in(one, tokens, "stop" if tokens == self._left(one) else "handed")
            self._run.take()

    def _hand_in(self, one: Drawing, tokens: int, finish: Finish) -> None:
        group_id, index = one.name
        del self._drawing[one.name]
        newest = self._run.plane.newest
        assert newest is not None
        rollout = Rollout(
            group_id=group_id,
            index=index,
            token_ids=array("i", [*[PLAIN] * (tokens - 1), STOP if finish == "stop" else PLAIN]).tobytes(),
            logprobs=bytes(4 * tokens),
            spans=(Span(version=newest, start=0, end=tokens),),
            finish=finish,
        )
        answer = Answer(rollout, one.attempt, begun_name(one.lease.begun))
        judged, *effects = self._run.plane.submit(self._node, answer, now=self._run.world.now, fault="")
        assert isinstance(judged, Judged)
        is_kept = judged.verdict == "accepted"
        self._run.kept += tokens * is_kept
        self._run.lost += tokens * (not is_kept)
        self._run.perform(effects)

    def take_away(self) -> None:
        self._is_going = True
        world = self._run.world
        match self._run.way:
            case "restart":
                world.schedule(GRACE_S, "is gone", self._vanish)
            case "handed":
                # The next question after the notice, and then what is left for what ends soon.
                drains_s = world.random.uniform(0, POLL_S) + LEAVE_S - GIVE_UP_S - FAREWELL_S
                world.schedule(drains_s, "hands over", self._hand_over)
            case _:
                self._vanish()

    def _hand_over(self) -> None:
        for one in [*self._drawing.values()]:
            if tokens := self._drawn(one):
                self._hand_in(one, tokens, "handed")
        self._vanish()

    def _vanish(self) -> None:
        """What it drew and did not hand in is lost. With a farewell its leases are free at once."""
        self._is_gone = True
        self._run.lost += sum(map(self._drawn, self._drawing.values()))
        if self._run.way in ("restart", "handed"):
            self._run.plane.leave(self._node)
            self._run.take()


def same_lengths_p(ours: list[int], others: list[int]) -> float:
    """Return the probability that two samples of one distribution differ as much (Kolmogorov and Smirnov, with
    Stephens' correction for small samples, in the limit's series)."""
    ours, others = sorted(ours), sorted(others)
    apart = max(
        abs(bisect_right(ours, one) / len(ours) - bisect_right(others, one) / len(others)) for one in {*ours, *others}
    )
    root = math.sqrt(len(ours) * len(others) / (len(ours) + len(others)))
    scaled = (root + 0.12 + 0.11 / root) * apart
    if scaled < 0.2:
        return 1.0
    return min(1.0, 2 * sum((1 if k % 2 else -1) * math.exp(-2 * k * k * scaled * scaled) for k in range(1, 101)))


def run_once(way: str, an_hour: float, mean_s: float, seed: int, steps: int) -> Figures:
    run, calm = Run(way, an_hour, mean_s, seed, steps), Run(way, 0.0, mean_s, seed + 1_000_003, steps)
    run.play()
    calm.play()
    return {
        "way": way,
        "preempted_an_hour": an_hour,
        "mean_answer_s": mean_s,
        "seed": seed,
        "useful_share": round(run.kept / (run.kept + run.lost), 4),
        "length_bias_p": round(same_lengths_p(run.lengths, calm.lengths), 4),
        "mean_tokens_over_calm": round(statistics.fmean(run.lengths) / statistics.fmean(calm.lengths), 4),
        "answers": len(run.lengths),
        "hours": round(run.world.now / 3600, 3),
        "hours_over_calm": round(run.world.now / calm.world.now, 3),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--ways", type=listed(str), default=WAYS)
    parser.add_argument("--preempted", type=listed(float), default=(0.1, 0.3, 0.6), help="chance an hour")
    parser.add_argument("--means", type=listed(float), default=(60.0, 600.0), help="seconds of an answer, in the mean")
    parser.add_argument("--seeds", type=listed(int), default=(0, 1, 2))
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(arguments)
    cases = [(way, chance, mean) for mean in options.means for chance in options.preempted for way in options.ways]
    rows = [said(run_once(*case, seed, options.steps)) for case in cases for seed in options.seeds]
    handed = [row for row in rows if row["way"] == "handed"]
    names = ("useful_share", "length_bias_p")
    return ended(options, {name: min(row[name] for row in handed) for name in names} if handed else {})


if __name__ == "__main__":
    sys.exit(main())
