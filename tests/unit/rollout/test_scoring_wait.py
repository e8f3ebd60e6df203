"""How many rollouts wait for their rewards, how long, and whose are next."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from swarm.rollout import scoring as module
from swarm.rollout.plane.effects import ScoreWanted
from swarm.rollout.scoring import Scoring
from swarm.rollout.tally import Recent, SamplerStats
from swarm.types import GroupId, NodeId, Score, Unscored
from tests.builders import ALICE, BOB, prompt, rollout

LIMIT_S, HONEST_S = 10.0, 0.1
FAILED = Unscored(reason="it took longer than 10 s")


def wanted_of(node: NodeId, count: int) -> list[ScoreWanted]:
    """One of each of `count` groups."""
    return [
        ScoreWanted(group_id=GroupId(f"{node}{number}"), index=0, node=node, prompt=prompt(), rollout=rollout())
        for number in range(count)
    ]


class Busy:
    """A reward on which each answer of ALICE hangs until its limit, by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.samplers = {node: SamplerStats(recent=Recent(now=0.0)) for node in (ALICE, BOB)}
        self.order: list[NodeId] = []
        self.open = self.max_open = 0
        self.outcomes: list[Score | Unscored] = []
        self.judged: list[NodeId] = []
        self.given_up: set[GroupId] = set()

    async def score(self, wanted: Sequence[ScoreWanted]) -> list[Score | Unscored]:
        self.open += 1
        self.max_open = max(self.open, self.max_open)
        await asyncio.sleep(0)
        self.open -= 1
        hangs = wanted[0].node == ALICE
        self.now += LIMIT_S if hangs else HONEST_S
        self.order.append(wanted[0].node)
        return [FAILED if hangs else Score(reward=1.0, exact=True)]

    def scored(self, wanted: Sequence[ScoreWanted], outcomes: Sequence[Score | Unscored]) -> None:
        self.outcomes += outcomes

    def is_open(self, group: GroupId) -> bool:
        return group not in self.given_up

    def scoring(self, processes: int = 1, *, genuine: bool | None = None) -> Scoring:
        async def judge(asked: ScoreWanted) -> bool | None:
            self.judged.append(asked.node)
            return genuine

        return Scoring(self.score, processes, judge, self.samplers, is_open=self.is_open, scored=self.scored)


async def all_scored(scoring: Scoring) -> None:
    while scoring._tasks:
        await asyncio.gather(*scoring._tasks)
    assert (scoring.waiting, scoring.fault) == (0, None)


async def test_answers_that_hang_cost_their_sampler_its_turns_and_others_one(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Busy(monkeypatch)
    scoring = busy.scoring()
    scoring.begin(wanted_of(ALICE, 16))
    scoring.begin(wanted_of(BOB, 20))
    await all_scored(scoring)
    assert busy.order == [ALICE, *[BOB] * 20, *[ALICE] * 15]
    assert busy.max_open == 1
    assert [busy.samplers[node].reward_failures for node in (ALICE, BOB)] == [16, 0]


async def test_nothing_waits_for_answers_whose_groups_were_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each hangs: the next ones are too old by the time, and what comes last, a held-out round, waited for all."""
    busy = Busy(monkeypatch)
    busy.given_up = {GroupId(f"a{number}") for number in range(1, 15)}
    scoring = busy.scoring()
    scoring.begin(wanted_of(NodeId("a"), 16))
    await all_scored(scoring)
    assert len(busy.order) == 2


async def test_what_a_sampler_used_is_forgotten_and_one_that_left_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Busy(monkeypatch)
    scoring = busy.scoring()
    scoring.begin(wanted_of(ALICE, 1))
    await all_scored(scoring)
    busy.now += 600.0
    busy.samplers[BOB].recent.add("reward_s", 2.0, now=busy.now)
    del busy.order[:]
    gone = NodeId("gone")
    scoring.begin([*wanted_of(gone, 2), *wanted_of(BOB, 1), *wanted_of(ALICE, 1)])
    await all_scored(scoring)
    assert busy.order == [ALICE, BOB, gone, gone]


async def test_as_many_are_scored_at_once_as_there_are_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Busy(monkeypatch)
    scoring = busy.scoring(3)
    scoring.begin(wanted_of(BOB, 8))
    assert (scoring.waiting, scoring.took_s) == (8, 0.0)
    await all_scored(scoring)
    assert busy.max_open == 3
    assert scoring.took_s > 0


@pytest.mark.parametrize("genuine", [True, None, False])
async def test_a_failure_is_judged_and_nothing_else_of_who_made_it_up_is_scored(
    monkeypatch: pytest.MonkeyPatch, genuine: bool | None
) -> None:
    busy = Busy(monkeypatch)
    scoring = busy.scoring(genuine=genuine)
    scoring.begin(wanted_of(ALICE, 4))
    await all_scored(scoring)
    assert [isinstance(one, Unscored) and one.genuine for one in busy.outcomes] == [genuine] * 4
    # Its second was begun before the first was judged.
    assert len(busy.judged) == len(busy.order) == (2 if genuine is False else 4)
