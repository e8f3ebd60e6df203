"""The user's dial on a running learner, and what a resumed loop begins with."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.audit.auditing import REFUSED, barred_in
from swarm.errors import UserError
from swarm.lead import steps as steps_module
from swarm.lead.dials import DIALS
from swarm.lead.learner import LearnerNode
from swarm.lead.publication import InstallTracker
from swarm.lead.signal import FLAT_GROUPS, FLAT_STEPS
from swarm.lead.steps import PAUSE, Steps
from swarm.learner.messages import Alarm, Trained
from swarm.rollout.journal.entries import BoundSet, Entry
from swarm.rollout.journal.journal import JournalFailed
from swarm.rollout.plane.effects import Evaluated, ScoreWanted
from swarm.rollout.plane.groups import Group
from swarm.rollout.scoring import RewardFailures
from swarm.rollout.tally import Tally
from swarm.run.directory import resumed_config, write_config
from swarm.run.log import RunLog
from swarm.settings import LeadConfig
from swarm.types import GroupId, NodeId, Score, Unscored, VersionId
from tests.builders import ALICE, ListJournal, ask, new_plane, prompt, rollout, submit_and_score, v
from tests.unit.runs import json_lines, run_in


class Rollouts:
    """The rollout plane as far as the dial is concerned; nobody samples."""

    def __init__(self) -> None:
        self.bounds: list[int] = []
        self.taken = 0
        self.barred: dict[NodeId, str] = {}
        self.pauses: list[bool] = []
        self.evaluations = 0
        self.samplers: dict[str, Any] = {}
        self.tally = Tally()
        self.failures = RewardFailures(lambda kind, **fields: None)
        self.asked, self.evaluating, self.starved = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.batches: list[list[Group]] = []
        self.coming: asyncio.Future[list[Group]] | None = None
        self.unaudited = -1  # The version whose answers could not be drawn again
        self.right: dict[int, bool] = {}  # by version, whether its rounds are answered and how

    async def set_bound(self, max_staleness: int) -> None:
        self.bounds.append(max_staleness)

    def pause(self, paused: bool) -> None:
        self.pauses.append(paused)

    def bar(self, node: NodeId, why: str) -> None:
        self.barred[node] = why

    def unbar(self, node: NodeId) -> None:
        del self.barred[node]

    async def end(self, reason: str) -> None: ...

    async def next_batch(self) -> Any:
        self.asked.set()
        if self.batches:
            return self.batches.pop()
        if self.coming is not None:
            coming, self.coming = self.coming, None
            return await coming
        self.starved.set()
        return await asyncio.get_running_loop().create_future()

    def age(self, *, mean_staleness: float, broadcast_steps: float) -> dict[str, Any]:
        return {"staleness/aim": mean_staleness + broadcast_steps, "staleness/by": "generation"}

    async def evaluate(self, version: Any, prompts: object) -> Any:
        self.evaluations += 1
        self.evaluating.set()
        if (right := self.right.get(version.version)) is not None:
            number, scores = version.version, ((Score(reward=1.0, exact=right),),)
            return Evaluated(version=number, newest=number, scores=scores, unaudited=number == self.unaudited)
        return await asyncio.get_running_loop().create_future()


class Training:
    """Takes `full_for` checkpoints to a full disk."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.best: int | None = None
        self.alarms: tuple[Alarm, ...] = ()
        self.withheld: dict[str, int] = {}
        self.mismatches: dict[str, tuple[float, float]] = {}
        self.figures = {"reward": 0.5}
        self.save_fault = ""
        self.saved_step: int | None = None
        self.full_for = self.saves = 0
        self.saved = asyncio.Event()

    async def save(self) -> None:
        self.saves += 1
        self.saved.set()

    async def flush(self) -> None:
        if self.saves:
            self.save_fault = "the disk is full" if self.saves <= self.full_for else ""
            self.saved_step = None if self.save_fault else self.step

    async def train(self, groups: object) -> Trained:
        self.step += 1
        return Trained(
            metrics=self.figures, seconds=0.0, alarms=self.alarms, withheld=self.withheld, mismatches=self.mismatches
        )


class BrokenJournal(ListJournal):
    async def write(self, entries: Sequence[Entry]) -> None:
        raise JournalFailed("the journal cannot be written")


def events_of(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in json_lines(directory / "events.jsonl") if event["kind"] == kind]


class Loop:
    """Steps of a run with S = 4 and K = 5 that has taken `step` steps."""

    def __init__(
        self,
        directory: Path,
        *,
        step: int = 0,
        saved_step: int | None = None,
        journal: ListJournal | None = None,
        **values: Any,
    ) -> None:
        self.journal = journal or ListJournal()
        self.rollouts = Rollouts()
        self.publication = cast(
            Any,
            SimpleNamespace(
                due=asyncio.Event(),
                newest=v(step),
                publish=self._publish,
                settled=self._settled,
                tracker=InstallTracker(),
            ),
        )
        self.said: list[str] = []
        self.log = RunLog(directory)
        self.training = Training(step)
        self.training.saved_step = saved_step
        self.spent = asyncio.Event()
        self.waited: list[float] = []
        self.provisioning = SimpleNamespace(spent=self.spent, stepped=self._stepped, max_cost=None)
        config = LeadConfig(max_staleness=4, publish_every_steps=5, **values)
        write_config(directory, config)
        self.directory = directory
        self.steps = Steps(
            run_in(directory, config=config, log=self.log, journal=self.journal, say=self.said.append),
            BoundSet(max_staleness=4, publish_every_steps=5),
            cast(Any, self.training),
            self.publication,
            cast(Any, self.rollouts),
            cast(Any, self.provisioning),
            [],
        )

    async def set(self, key: str, value: Any) -> str:
        return await self.steps.change(key, value, by="socket")

    async def runs_dry(self) -> None:
        """Until there is no batch any more; the run has to go on until then."""
        running = asyncio.create_task(self.steps.run())
        starved = asyncio.create_task(self.rollouts.starved.wait())
        await asyncio.wait({running, starved}, return_when=asyncio.FIRST_COMPLETED)
        assert not running.done()
        running.cancel()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return events_of(self.directory, kind)

    def told(self) -> list[tuple[Any, ...]]:
        """Key, before, after and step of each event `set`."""
        return [(e["key"], e["before"], e["after"], e["step"]) for e in self.events("set")]

    def resumes_with(self) -> LeadConfig:
        return resumed_config(self.directory, {})

    def _stepped(self, *, waited_s: float, period_s: float) -> dict[str, Any]:
        assert waited_s <= period_s
        self.waited.append(waited_s)
        return {}

    async def _publish(self, step: int) -> None:
        self.publication.newest = v(step)

    async def _settled(self) -> VersionId:
        newest: VersionId = self.publication.newest
        return newest


async def test_the_period_follows_the_bound_and_comes_back(tmp_path: Path) -> None:
    """K = min(what the user asked for, S + 1), which later lives have too: a bound that was low for a while costs none.
    Only a lower bound makes a publication due."""
    loop = Loop(tmp_path)
    for bound, period, due in ((8, 5, False), (0, 1, True), (2, 3, True), (1024, 5, True)):
        line = await loop.set("max_staleness", bound)
        assert loop.steps.bound == BoundSet(max_staleness=bound, publish_every_steps=period)
        assert line == loop.said[-1]
        assert loop.rollouts.bounds[-1] == bound
        assert loop.journal.entries[-1] == loop.steps.bound
        assert loop.publication.due.is_set() == due
        status, kept = loop.steps.status(), loop.resumes_with()
        assert (status["max_staleness"], status["publish_every_steps"]) == (bound, period)
        assert (kept.max_staleness, kept.publish_every_steps) == (bound, 5)
    await asyncio.gather(loop.set("learning_rate", 2e-6), loop.set("max_staleness", 1), loop.set("learning_rate", 3e-6))
    assert (loop.steps.bound.max_staleness, loop.steps.bound.learning_rate) == (1, 3e-6), "all that come together hold"
    assert loop.journal.entries[-1] == loop.steps.bound
    with pytest.raises(UserError, match="is above max_staleness \\+ 1, which is 2: raise max_staleness first"):
        await loop.set("publish_every_steps", 3)
    await loop.set("publish_every_steps", 1)
    await loop.set("max_staleness", 2)
    assert (loop.steps.bound.publish_every_steps, loop.resumes_with().publish_every_steps) == (1, 1)


@pytest.mark.parametrize(("wanted", "told"), [(1, [(4, 1, 7)]), (4, [])])
async def test_a_resumed_run_says_once_that_its_bound_is_another(
    tmp_path: Path, wanted: int, told: list[tuple[int, int, int]]
) -> None:
    """Or its report would draw the steps before under the new one."""
    node: Any = SimpleNamespace(
        _config=LeadConfig(max_staleness=wanted),
        _recorded=SimpleNamespace(
            bound=BoundSet(max_staleness=4, publish_every_steps=1, learning_rate=3e-5), next_batch=8
        ),
        _life=run_in(tmp_path, log=(log := RunLog(tmp_path)), journal=ListJournal()),
        _training=SimpleNamespace(step=7),
    )
    bound = BoundSet(max_staleness=wanted, publish_every_steps=1, step=8, learning_rate=3e-5)
    assert await LearnerNode._bound(node) == bound
    log.close()
    events = events_of(tmp_path, "set")
    assert [(event["before"], event["after"], event["step"]) for event in events] == told
    assert all((event["key"], event["by"]) == ("max_staleness", "resume") for event in events)


async def test_a_bound_that_is_not_recorded_does_not_hold(tmp_path: Path) -> None:
    loop = Loop(tmp_path, journal=BrokenJournal())
    with pytest.raises(JournalFailed):
        await loop.set("max_staleness", 0)
    assert loop.rollouts.bounds == []
    assert not loop.publication.due.is_set()
    assert loop.told() == []


# -- what the run's owner changes ----------------------------------------------------------------------------


async def test_each_change_is_an_event_with_what_held_before_and_after(tmp_path: Path) -> None:
    loop = Loop(tmp_path, step=3)
    assert await loop.set("max_staleness", 2) == "max_staleness is 2 (was 4)"
    assert await loop.set("publish_every_steps", 2) == "publish_every_steps is 2 (was 3)"
    assert await loop.set("learning_rate", 1e-5) == "learning_rate is 1e-05 (was 0.001)"
    assert await loop.set("max_cost", 7.5) == "max_cost is 7.5 (was none)"
    assert loop.provisioning.max_cost == loop.resumes_with().max_cost == 7.5
    assert await loop.set("max_cost", None) == "max_cost is none (was 7.5)"
    assert await loop.set("paused", True) == "paused is true (was false)"
    assert (tmp_path / PAUSE).exists(), "a pause outlives the learner"
    assert await loop.set("paused", False) == "paused is false (was true)"
    assert not (tmp_path / PAUSE).exists()
    assert loop.rollouts.pauses == [True, False]
    assert await loop.set("refuse", ALICE) == f"refuse is {ALICE}"
    assert await loop.set("let_in", ALICE) == f"let_in is {ALICE}"
    assert loop.told() == [
        ("max_staleness", 4, 2, 3),
        ("publish_every_steps", 5, 3, 3),
        ("publish_every_steps", 3, 2, 3),
        ("learning_rate", 1e-3, 1e-5, 3),
        ("max_cost", None, 7.5, 3),
        ("max_cost", 7.5, None, 3),
        ("paused", False, True, 3),
        ("paused", True, False, 3),
        ("refuse", None, ALICE, 3),
        ("let_in", None, ALICE, 3),
    ]


async def test_the_table_of_what_can_be_set_has_the_present_values(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    await loop.set("learning_rate", 1e-5)
    table = {one["key"]: one for one in loop.steps.status()["settings"]}
    assert table.keys() == DIALS.keys()
    assert {key: one["value"] for key, one in table.items() if one["value"] is not None} == {
        "paused": False,
        "max_staleness": 4,
        "publish_every_steps": 5,
        "learning_rate": 1e-5,
    }
    assert (table["max_staleness"]["min"], table["max_staleness"]["max"]) == (0, 1024)
    assert (table["publish_every_steps"]["min"], table["publish_every_steps"]["max"]) == (1, 5)
    assert (table["learning_rate"]["min"], table["learning_rate"]["max"]) == (0, 1)


async def test_a_learning_rate_is_recorded_with_the_batch_that_it_holds_from(tmp_path: Path) -> None:
    loop = Loop(tmp_path, step=6)
    loop.rollouts.taken = 7
    await loop.set("learning_rate", 2e-6)
    await loop.set("max_staleness", 3)
    first, second = loop.journal.entries
    assert isinstance(first, BoundSet)
    assert isinstance(second, BoundSet)
    assert (first.step, first.learning_rate, first.max_staleness) == (7, 2e-6, 4)
    assert (second.learning_rate, second.max_staleness) == (2e-6, 3), "the bound keeps the rate"
    assert loop.resumes_with().resolved_learning_rate == 1e-3, "it would be that of the batches before too"


async def test_a_change_that_a_full_disk_does_not_keep_is_an_event_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    loop = Loop(tmp_path)
    monkeypatch.setattr(steps_module, "write_json", full)
    assert (await loop.set("max_cost", 5.0)).endswith("; not kept for a restart: No space left on device")
    assert (loop.provisioning.max_cost, loop.told()) == (5.0, [("max_cost", None, 5.0, 0)])


async def test_a_pause_is_no_time_that_samplers_let_the_learner_wait_and_one_within_a_step_is_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(steps_module, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: 0.0))
    loop = Loop(tmp_path, steps=200)
    loop.rollouts.coming = coming = asyncio.get_running_loop().create_future()
    train = loop.training.train

    async def paused_for(seconds: float) -> None:
        nonlocal now
        await loop.set("paused", True)
        now += seconds
        await loop.set("paused", False)

    async def paused_within(groups: object) -> Trained:
        await paused_for(2)
        return await train(groups)

    monkeypatch.setattr(loop.training, "train", paused_within)
    running = asyncio.create_task(loop.steps.run())
    await loop.rollouts.asked.wait()
    await paused_for(3600)
    now += 5
    coming.set_result([answered()])
    await loop.rollouts.starved.wait()
    running.cancel()
    assert (loop.waited, loop.steps.status()["step_s"]) == ([5.0], 7.0)


async def test_who_is_refused_is_barred_in_later_lives_too_until_let_in(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    await loop.set("refuse", ALICE)
    assert loop.rollouts.barred == barred_in(tmp_path) == {ALICE: REFUSED}
    assert loop.steps.status()["barred"] == [ALICE]
    with pytest.raises(UserError, match=f"node {ALICE} is barred already: {REFUSED}"):
        await loop.set("refuse", ALICE)  # Or the evidence against one that was caught would be lost
    await loop.set("let_in", ALICE)
    assert loop.rollouts.barred == barred_in(tmp_path) == {}
    with pytest.raises(UserError, match=f"node {ALICE} is not barred"):
        await loop.set("let_in", ALICE)
    assert len(loop.told()) == 2


async def test_a_checkpoint_is_written_while_the_learner_waits_and_only_once(tmp_path: Path) -> None:
    loop = Loop(tmp_path, steps=200)
    with pytest.raises(UserError, match="no step was taken yet"):
        await loop.set("checkpoint", "now")
    loop.rollouts.batches = [[answered()]]
    running = asyncio.create_task(loop.steps.run())
    await loop.rollouts.starved.wait()
    assert await loop.set("checkpoint", "now") == "checkpoint is 1"
    await loop.training.saved.wait()
    with pytest.raises(UserError, match="step 1 has its checkpoint"):
        await loop.set("checkpoint", "now")
    running.cancel()
    assert loop.training.saves == 1
    assert loop.told() == [("checkpoint", None, 1, 1)]
    loop.steps._save_wanted.set()  # Within the third step
    loop.steps.step = 3
    await loop.steps._save_if_due()
    assert loop.training.saves == 2


# -- resumed -------------------------------------------------------------------------------------------------


def former_life(directory: Path, *, step: int, exact_match: float) -> None:
    """A run that ended after it had measured its last version."""
    log = RunLog(directory)
    log.metrics({"step": step, "reward": 0.5, "staleness/max": 3})
    log.event("evaluated", version=step, exact_match=exact_match, prompts=8)
    log.close()


@pytest.mark.parametrize("settings", [{"steps": 10}, {"steps": 200, "target": 0.25}])
async def test_a_run_that_had_come_to_its_end_or_target_needs_no_sampler(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """All of them may have heard that it is over before the learner was killed."""
    former_life(tmp_path, step=10, exact_match=0.25)
    loop = Loop(tmp_path, step=10, **settings)
    await asyncio.wait_for(loop.steps.run(), 5)
    assert (loop.steps.step, loop.rollouts.evaluations) == (10, 0)
    status = loop.steps.status()
    assert loop.steps.held_out == [{"version": 10, "exact_match": 0.25}]
    assert status["max_staleness_seen"] == 3


@pytest.mark.parametrize("still", [True, False])
async def test_a_target_counts_once_the_last_version_reaches_it(tmp_path: Path, still: bool) -> None:
    """Seen: 0.97 with version 89, then 0.86 with 91, the last. That run ended, as one that had reached 0.95."""
    former_life(tmp_path, step=10, exact_match=1.0)
    loop = Loop(tmp_path, step=12, steps=200, target=0.95)
    loop.publication.newest = v(10)
    loop.rollouts.right = {12: still}
    running = asyncio.create_task(loop.steps.run())
    going_on = asyncio.create_task(loop.rollouts.asked.wait())
    await asyncio.wait({running, going_on}, return_when=asyncio.FIRST_COMPLETED)
    assert (running.done(), going_on.done()) == (still, not still)
    assert loop.steps.held_out[-1]["version"] == 12
    assert loop.steps.held_out[-1]["exact_match"] == float(still)
    for task in (running, going_on):
        task.cancel()


async def test_the_run_is_not_over_before_its_last_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_module, "SAVE_AGAIN_S", 0.0)
    former_life(tmp_path, step=10, exact_match=0.5)
    loop = Loop(tmp_path, step=10, steps=10)
    loop.training.full_for = 2
    assert await loop.steps.finish()
    assert loop.training.saves == 3


async def test_a_run_whose_money_is_spent_keeps_what_it_has_and_asks_nobody_for_more(tmp_path: Path) -> None:
    former_life(tmp_path, step=10, exact_match=0.5)
    loop = Loop(tmp_path, step=12, steps=200, target=0.9)
    loop.spent.set()
    await asyncio.wait_for(loop.steps.run(), 5)
    assert not await asyncio.wait_for(loop.steps.finish(), 5)
    assert (loop.steps.step, loop.training.saves, loop.rollouts.evaluations) == (12, 1, 1)
    with pytest.raises(UserError, match="resume it with a larger --max-cost"):
        await loop.set("max_cost", 9.0)


async def test_a_run_that_waits_for_a_batch_ends_when_its_money_is_spent(tmp_path: Path) -> None:
    loop = Loop(tmp_path, step=3, steps=200)
    running = asyncio.create_task(loop.steps.run())
    await loop.rollouts.asked.wait()
    loop.spent.set()
    await asyncio.wait_for(running, 5)
    assert await asyncio.wait_for(loop.steps.finish(), 5)


@pytest.mark.parametrize(
    ("ends", "settings"),
    [(Steps.run, {"steps": 3}), (Steps.finish, {"steps": 3}), (Steps.run, {"steps": 200, "target": 0.95})],
)
async def test_the_last_evaluation_is_not_waited_for_once_the_money_is_spent(
    tmp_path: Path, ends: Callable[[Steps], Coroutine[Any, Any, Any]], settings: dict[str, Any]
) -> None:
    """A target that the last version was not measured for is not reached, though one before it did."""
    former_life(tmp_path, step=2, exact_match=1.0)
    loop = Loop(tmp_path, step=3, **settings)
    ending = asyncio.create_task(ends(loop.steps))
    await loop.rollouts.evaluating.wait()
    loop.spent.set()
    await asyncio.wait_for(ending, 5)
    assert await asyncio.wait_for(loop.steps.finish(), 5) is ("target" not in settings)
    assert loop.training.saved_step == 3


# -- alarms and the best version -----------------------------------------------------------------------------


def answered() -> Group:
    """A group that is complete."""
    plane = new_plane(groups=1)
    submit_and_score(plane, ALICE, ask(plane, ALICE, 0, 2), 0)
    (group,), _ = plane.take()
    return group


async def test_an_alarm_that_stops_the_run_ends_it_in_good_order(tmp_path: Path) -> None:
    loop = Loop(tmp_path, steps=200)
    loop.rollouts.batches = [[answered()]]
    loop.training.alarms = (Alarm(kind="mismatch_kl", reaction="stop", value=2.0, limit=0.5, text="they disagree"),)
    async with asyncio.timeout(5):
        await loop.steps.run()
        assert not await loop.steps.finish()
    assert loop.training.saved_step == 1
    assert loop.rollouts.evaluations == 1, "the last version is not worth measuring"
    assert (loop.log.last["staleness/aim"], loop.log.last["staleness/by"]) == (0.0, "generation")
    status = loop.steps.status()
    assert status["stopped_by"] == "they disagree"
    assert status["alarm"] == {
        "alarm": "mismatch_kl",
        "reaction": "stop",
        "value": 2.0,
        "limit": 0.5,
        "step": 1,
        "text": "they disagree",
    }


async def test_it_is_said_whose_rollouts_are_withheld_once_and_how_far_classes_are_off_always(tmp_path: Path) -> None:
    loop = Loop(tmp_path, steps=200)
    loop.rollouts.batches = [[answered()] for _ in range(3)]
    loop.publication.newest = v(3)
    loop.training.withheld = {"z": 4}
    loop.training.mismatches = {"a": (3.0, 10.0), "b": (1.0, 10.0), "c": (0.1, 10.0), "left long ago": (9.0, 10.0)}
    for node, engine in (("a", "mlx/int8/gpu"), ("b", "mlx/int8/gpu"), ("c", "vllm/bfloat16/cuda")):
        loop.rollouts.tally.runs(NodeId(node), engine)
    await loop.runs_dry()
    assert {name: value for name, value in loop.log.last.items() if name.startswith("mismatch")} == {
        "mismatch_kl/mlx/int8/gpu": pytest.approx(0.2),
        "mismatch_kl/vllm/bfloat16/cuda": pytest.approx(0.01),
    }
    assert loop.steps.status()["rollouts_withheld"] == {"z": 12}
    assert sum("sampler z are not trained on" in line for line in loop.said) == 1
    withheld = [(one["step"], one["rollouts"]) for one in loop.events("withheld")]
    assert withheld == [(step, {"z": 4}) for step in (1, 2, 3)]


async def test_a_run_that_learns_nothing_goes_on_and_says_so(tmp_path: Path) -> None:
    loop = Loop(tmp_path, steps=200)
    loop.rollouts.batches = [[answered()] * FLAT_GROUPS for _ in range(FLAT_STEPS)]
    # As if published on the way, so that none is due.
    loop.publication.newest = v(FLAT_STEPS)
    loop.training.figures = {"reward": 1.0, "frac_reward_zero_std": 1.0}
    failed = ScoreWanted(group_id=GroupId("t9"), index=0, node=ALICE, prompt=prompt(), rollout=rollout())
    loop.rollouts.failures.settle([failed], [Unscored(reason="it hung")], now=0.0)
    await loop.runs_dry()
    shares = [line["reward_failed_share"] for line in json_lines(tmp_path / "metrics.jsonl")]
    assert shares == [1.0, 0.0, 0.0, 0.0, 0.0]
    alarms = [(event["alarm"], event["step"]) for event in loop.events("alarm")]
    assert alarms == [("reward_failed", 1), ("no_variance", FLAT_STEPS)]
    assert any(f"step {FLAT_STEPS}: alarm no_variance" in line for line in loop.said)
    assert (loop.steps.status()["alarm"]["alarm"], loop.steps.status()["stopped_by"]) == ("no_variance", "")


async def test_the_best_version_is_named_and_the_first_of_equals_and_over_a_resume(tmp_path: Path) -> None:
    loop = Loop(tmp_path, steps=200)
    named: list[int | None] = []
    for version, right in [(1, False), (2, True), (3, False), (4, True)]:
        loop.publication.newest = v(version)
        loop.rollouts.right = {version: right}
        await loop.steps._evaluate()
        named.append(loop.training.best)
    assert named == [1, 2, 2, 2]
    best = loop.steps.status()["best"]
    assert (best["version"], best["exact_match"], best["reward"]) == (2, 1.0, 1.0)
    assert [event["version"] for event in loop.events("best")] == [1, 2]
    again = Loop(tmp_path, steps=200)
    assert again.steps.status()["best"] == best
    assert again.training.best == 2
    assert [entry["version"] for entry in again.steps.held_out] == [1, 2, 3, 4]
    assert again.steps.held_out[-1] == loop.steps.held_out[-1]


@pytest.mark.parametrize(("saved_step", "saves"), [(None, 1), (8, 1), (9, 0), (10, 0)])
async def test_after_the_best_version_a_checkpoint_is_written_unless_there_is_one(
    tmp_path: Path, saved_step: int | None, saves: int
) -> None:
    """Also in the next life, if the learner was killed before it could; not if the next one would be no nearer."""
    former_life(tmp_path, step=10, exact_match=0.5)
    loop = Loop(tmp_path, step=10, steps=200, saved_step=saved_step)
    loop.rollouts.batches = [[answered()] for _ in range(3)]
    await loop.runs_dry()
    assert loop.rollouts.evaluations == 0, "it was measured before"
    assert loop.training.best == 10
    assert loop.training.saves == saves, "one for three steps"


async def test_steps_are_told_now_and_then_and_status_knows_the_pace_and_ages_of_the_last(tmp_path: Path) -> None:
    loop = Loop(tmp_path, steps=200)
    assert (loop.steps.status()["step_s"], loop.steps.status()["ages"]) == (None, [])
    # Of version 0 all: the batch of step n has rollouts of age n.
    count = steps_module.RECENT + 1
    loop.rollouts.batches = [[answered()] for _ in range(count)]
    loop.publication.newest = v(count)
    loop.rollouts.right, loop.rollouts.unaudited = {count: True}, count
    await loop.runs_dry()
    (step,) = [line for line in loop.said if line.startswith("step ")]
    assert re.fullmatch(r"step 1/200: reward 0\.500, staleness 0\.0, \S+ s a step", step), "others within ten seconds"
    assert f"version {count}: held-out exact match 1.000, unaudited" in loop.said, "nobody could audit it"
    assert loop.steps.held_out[-1]["unaudited"] == 1
    status = loop.steps.status()
    assert status["ages"] == [0, *([2] * steps_module.RECENT)], "the first batch is too long ago"
    assert 0 < status["step_s"] < 5


@pytest.mark.parametrize(
    ("saved", "waited_for"), [(None, "the checkpoint of step 3"), (2, "the checkpoint of step 3"), (3, "")]
)
async def test_a_learner_that_stops_between_steps_waits_for_what_is_not_saved(
    saved: int | None, waited_for: str, tmp_path: Path
) -> None:
    assert Loop(tmp_path, step=3, saved_step=saved).steps.request_stop() == waited_for
