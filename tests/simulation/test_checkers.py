"""The checkers see what they are for: cores broken on purpose are caught, and the message replays the breach."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import benchmarks.holding
import swarm.rollout.plane.buffer
import swarm.rollout.plane.plane
import swarm.rollout.plane.verdict
from swarm.rollout.journal.entries import BatchTaken, GroupDropped, RecordedRun
from swarm.rollout.messages import Answer
from swarm.rollout.plane import groups
from swarm.rollout.plane.buffer import Buffer
from swarm.rollout.plane.effects import Effect, Judged, ScoreWanted
from swarm.rollout.plane.groups import Group, LeaseTable, Sample
from swarm.rollout.plane.plane import RolloutPlane
from swarm.rollout.plane.rules import Pacing
from swarm.types import NodeId, Verdict, VersionId
from tests.simulator.__main__ import main
from tests.simulator.breach import InvariantBreach
from tests.simulator.rollouts.books import Books
from tests.simulator.rollouts.cluster import Cluster
from tests.simulator.rollouts.disk import Disk
from tests.simulator.rollouts.ledger import Ledger, ScoredRollout
from tests.simulator.rollouts.scenario import NAMED, TINY, Crash, SamplerCrash, parse_crash, scenario_named

pytestmark = pytest.mark.slow

Breakage = Callable[[pytest.MonkeyPatch], None]


def _batches_ignore_freshness(patch: pytest.MonkeyPatch) -> None:
    def completed(plane: RolloutPlane, group: Group) -> list[Effect]:
        if group.purpose == "train":
            plane.leased.close(group)
            plane._buffer.add(group)
            return []
        return honest(plane, group)

    def take(plane: RolloutPlane) -> tuple[list[Group], list[Effect]]:
        batch = plane._buffer.take(plane.next_batch, plane.rules.max_staleness)
        numbers = tuple(group.order for group in batch)
        plane.next_batch += 1
        bound = plane.rules.max_staleness
        return batch, [BatchTaken(step=plane.next_batch - 1, max_staleness=bound, numbers=numbers)]

    honest = RolloutPlane._completed
    patch.setattr(swarm.rollout.plane.plane, "is_fresh", lambda *_: True)
    patch.setattr(swarm.rollout.plane.buffer, "is_fresh", lambda *_: True)
    patch.setattr(RolloutPlane, "_completed", completed)
    patch.setattr(RolloutPlane, "take", take)


def _admission_ignores_freshness(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(swarm.rollout.plane.verdict, "is_fresh", lambda *_: True)


def _leases_ignore_freshness(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RolloutPlane, "_fresh", lambda *_: True)


def _standbys_are_leased_to(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RolloutPlane, "set_standby", lambda *_: None)


def _pacing_always_allows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pacing, "may_open", lambda *_, **__: True)


def _latest_deadline_first(patch: pytest.MonkeyPatch) -> None:
    taken = Buffer.take

    def take(buffer: Buffer, next_batch: int, max_staleness: int) -> list[Group]:
        batch = taken(buffer, next_batch, max_staleness)
        if buffer._ready:
            newest = buffer._ready[max(buffer._ready)]
            last = newest.pop(next(iter(newest)))
            buffer.add(batch[0])
            batch[0] = last
        return batch

    patch.setattr(Buffer, "take", take)


def _duplicates_are_accepted(patch: pytest.MonkeyPatch, detail: str) -> None:
    judge = RolloutPlane._judge

    def lenient(
        plane: RolloutPlane, node: NodeId, answer: Answer, group: Group | None, fault: str | None
    ) -> tuple[Verdict, str]:
        verdict, said = judge(plane, node, answer, group, fault)
        return ("accepted", "") if said.startswith(detail) else (verdict, said)

    patch.setattr(RolloutPlane, "_judge", lenient)


def _answers_are_accepted_twice(patch: pytest.MonkeyPatch) -> None:
    _duplicates_are_accepted(patch, "this sample is answered")


def _failures_are_counted_twice(patch: pytest.MonkeyPatch) -> None:
    _duplicates_are_accepted(patch, "this failure is known")


def _batches_stay_in_the_buffer(patch: pytest.MonkeyPatch) -> None:
    taken = Buffer.take

    def take(buffer: Buffer, next_batch: int, max_staleness: int) -> list[Group]:
        batch = taken(buffer, next_batch, max_staleness)
        for group in batch:
            buffer.add(group)
        return batch

    patch.setattr(Buffer, "take", take)


def _groups_are_replaced_without_end(patch: pytest.MonkeyPatch) -> None:
    honest = RolloutPlane._is_for_replacement

    def endless(plane: RolloutPlane, group: Group) -> bool:
        plane._replaced = 0
        return honest(plane, group)

    patch.setattr(RolloutPlane, "_is_for_replacement", endless)


def _any_group_is_replaced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RolloutPlane, "_is_for_replacement", lambda plane, _: plane._replaced < 4)


def _no_group_is_replaced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RolloutPlane, "_is_for_replacement", lambda *_: False)


def _what_was_replaced_is_forgotten_in_a_crash(patch: pytest.MonkeyPatch) -> None:
    restored = RolloutPlane.restore

    def restore(plane: RolloutPlane, run: RecordedRun, *, now: float) -> list[Effect]:
        return restored(plane, dataclasses.replace(run, replaced=0), now=now)

    patch.setattr(RolloutPlane, "restore", restore)


def _fresh_groups_are_dropped(patch: pytest.MonkeyPatch) -> None:
    def expire(plane: RolloutPlane) -> list[Effect]:
        dropped: list[Effect] = []
        for group in list(plane.leased.groups())[:1]:
            plane.leased.close(group)
            dropped = [plane._dropped(group, "stale")]
        return dropped

    patch.setattr(RolloutPlane, "_expire", expire)


def _slow_nodes_count_as_silent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaseTable, "silent", lambda table, *, now: list(table.nodes()))


def _samples_are_leased_twice(patch: pytest.MonkeyPatch) -> None:
    def wait(table: LeaseTable, group: Group, _: int) -> None:
        group.waiting = len(group.samples)
        table._rank(group)

    patch.setattr(Sample, "waiting", property(lambda sample: sample.rollout is None))
    patch.setattr(LeaseTable, "_wait", wait)


def _lost_grants_stay_leased(patch: pytest.MonkeyPatch) -> None:
    def ask(plane: RolloutPlane, node: NodeId, held: VersionId, capacity: int, *, now: float, **_: object) -> object:
        return asked(plane, node, held, capacity, now=now)

    asked = RolloutPlane.ask
    patch.setattr(RolloutPlane, "ask", ask)
    patch.setattr(Books, "forget", lambda *_, **__: 0)
    patch.setattr(groups, "LEASE_SLACK_S", 1e9)


def _batches_are_never_ready(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RolloutPlane, "can_take", lambda _, **__: False)


def _versions_fall(patch: pytest.MonkeyPatch) -> None:
    def published(plane: RolloutPlane, version: VersionId) -> None:
        plane.newest = VersionId(incarnation=0, version=version.version % 3)

    patch.setattr(RolloutPlane, "published", published)


def _a_core_raises(patch: pytest.MonkeyPatch) -> None:
    def claim(*_: object, **__: object) -> None:
        raise KeyError("t0")

    patch.setattr(LeaseTable, "claim", claim)


def _answers_do_not_wait_for_the_record(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Disk, "write", lambda _, then: then())


def _holders_are_forgotten_in_a_crash(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaseTable, "restore", lambda *_, **__: None)


def _numbering_begins_anew_after_a_crash(patch: pytest.MonkeyPatch) -> None:
    def restore(plane: RolloutPlane, run: RecordedRun, *, now: float) -> list[Effect]:
        restored(plane, run, now=now)
        plane._opened = 0
        return []

    restored = RolloutPlane.restore
    patch.setattr(RolloutPlane, "restore", restore)


def _unscored_answers_stay_unscored_after_a_crash(patch: pytest.MonkeyPatch) -> None:
    def restore(plane: RolloutPlane, run: RecordedRun, *, now: float) -> list[Effect]:
        return [effect for effect in restored(plane, run, now=now) if not isinstance(effect, ScoreWanted)]

    restored = RolloutPlane.restore
    patch.setattr(RolloutPlane, "restore", restore)


def _returning_nodes_have_no_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(swarm.rollout.plane.plane, "RETURN_S", 0.0)


def _steps_are_replayed_in_another_order(patch: pytest.MonkeyPatch) -> None:
    def batch(ledger: Ledger, step: int) -> list[ScoredRollout]:
        again = step in seen
        seen.add(step)
        found = honest(ledger, step)
        return found[::-1] if again else found

    seen: set[int] = set()
    honest = Ledger.batch
    patch.setattr(Ledger, "batch", batch)


def _batches_are_never_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(benchmarks.holding, "may_take", lambda *_: True)


def _batches_are_held_without_patience(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(benchmarks.holding.HoldingPacing, "may_take", lambda *_: False)


def _a_lowered_bound_goes_unsaid(patch: pytest.MonkeyPatch) -> None:
    honest = RolloutPlane.submit

    def submit(plane: RolloutPlane, *args: Any, **rest: Any) -> list[Effect]:
        judged, *more = honest(plane, *args, **rest)
        assert isinstance(judged, Judged)
        return [dataclasses.replace(judged, counted_as=judged.verdict), *more]

    patch.setattr(RolloutPlane, "submit", submit)


def _every_drop_is_blamed_on_the_user(patch: pytest.MonkeyPatch) -> None:
    def dropped(plane: RolloutPlane, group: Group, reason: str) -> GroupDropped:
        said = honest(plane, group, reason)
        return dataclasses.replace(said, reason="bound_lowered") if reason == "stale" else said

    honest = RolloutPlane._dropped
    patch.setattr(RolloutPlane, "_dropped", dropped)


def _authors_are_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Group, "authors", property(lambda _: Counter()))


BREAKAGES: dict[Breakage, tuple[str, str]] = {
    _batches_ignore_freshness: ("failing-generations", "I1: .* has staleness 3"),
    _admission_ignores_freshness: ("default", "I1: .* accepted though it is stale"),
    _leases_ignore_freshness: ("slow-broadcast", "leases: .* could be in no batch"),
    _standbys_are_leased_to: ("standbys", "leases: t.* for s0, which is on standby"),
    _pacing_always_allows: ("default", "pacing: .* groups due in .* room for"),
    _latest_deadline_first: ("churn", "pacing: due by .* was taken before"),
    _answers_are_accepted_twice: ("lossy", "I3: .* was accepted twice"),
    _failures_are_counted_twice: ("failing-calls", "I3: .* failed twice over"),
    _batches_stay_in_the_buffer: ("default", "I5: the plane has groups_ready"),
    _fresh_groups_are_dropped: ("default", "I3: .* is not (stale|bound_lowered)"),
    _slow_nodes_count_as_silent: ("default", "leases: .* was called silent after"),
    _samples_are_leased_twice: ("default", "leases: sample .* is held or answered"),
    _lost_grants_stay_leased: ("lossy-sequential", "liveness: no step and no evaluation"),
    _batches_are_never_ready: ("unlimited-hold", "liveness: no step and no evaluation"),
    _versions_fall: ("default", "I4: newest fell"),
    _a_core_raises: ("default", "core: KeyError 't0'"),
    _answers_do_not_wait_for_the_record: ("default", "I3: .* not on record"),
    _holders_are_forgotten_in_a_crash: ("crashes", "I5: the plane has samples_leased 0, the books"),
    _numbering_begins_anew_after_a_crash: ("crashes", "leases: .* is closed"),
    _unscored_answers_stay_unscored_after_a_crash: ("crashes-sequential", "liveness: no step and no evaluation"),
    _returning_nodes_have_no_time: ("crashes-sequential", "leases: .* was called silent after"),
    _steps_are_replayed_in_another_order: ("crashes", "I3: step .* was trained again on something else"),
    _batches_are_never_held: ("unlimited-hold", "I7: .* is stale"),
    _batches_are_held_without_patience: ("default", "I7: a batch is ready and is not taken"),
    _a_lowered_bound_goes_unsaid: ("dial", "I3: .* is stale for another reason"),
    _every_drop_is_blamed_on_the_user: ("uneven", "I3: .* is not bound_lowered"),
    _groups_are_replaced_without_end: ("dynamic-sampling", "dynamic: 5 groups were replaced for a batch of 4"),
    _any_group_is_replaced: ("dynamic-sampling", "I3: .* is not no_variance"),
    _no_group_is_replaced: ("dynamic-sampling", "dynamic: .* has no variance and was kept"),
    _what_was_replaced_is_forgotten_in_a_crash: ("dynamic-sampling-crashes", "dynamic: 5 groups were replaced"),
    _authors_are_not_told: ("dial", "I3: on record: group .* was not by"),
}

SEEDS: dict[Breakage, int] = {
    _batches_are_never_held: 6,
    _batches_ignore_freshness: 3,
    _what_was_replaced_is_forgotten_in_a_crash: 6,
}
"""Seeds other than 1: a batch that is not held has to leave something behind; a sample of a group that is too old must
not be leased again before the group is trained on, which another checker would see first; a crash has to come between
two replacements for one batch."""


def _breach(name: str, seed: int) -> InvariantBreach:
    with pytest.raises(InvariantBreach) as caught:
        Cluster(scenario_named(name, seed), seed).run()
    return caught.value


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.__name__.strip("_"))
def test_a_broken_core_is_caught(breakage: Breakage, monkeypatch: pytest.MonkeyPatch) -> None:
    name, said = BREAKAGES[breakage]
    breakage(monkeypatch)
    breach = _breach(name, SEEDS.get(breakage, 1))
    assert breach.args[0].startswith(said.partition(":")[0])
    with pytest.raises(InvariantBreach, match=said):
        raise breach


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[InvariantBreach], None]:
    """Asserts that the command at the end of a breach's message breaks the core again in the same way."""

    def replays(breach: InvariantBreach) -> None:
        python, _, module, *arguments = shlex.split(breach.replay)
        assert (python, module) == ("bin/python", "tests.simulator")
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        assert main() == 1
        assert capsys.readouterr().out == f"{breach}\n"

    return replays


@pytest.mark.parametrize(("name", "seed"), [("default", 1), ("random", 2)])
def test_the_message_ends_with_the_command_that_breaks_it_again(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch, replays: Callable[[InvariantBreach], None]
) -> None:
    _pacing_always_allows(monkeypatch)
    breach = _breach(name, seed)
    assert str(breach).endswith(f"\nreplay: bin/python -m tests.simulator --seed {seed} --scenario {name}")
    replays(breach)


def test_many_seeds_stop_at_the_first_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _batches_are_never_ready(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["tests.simulator", "--seeds", "3"])
    assert main() == 1
    assert capsys.readouterr().out.endswith("replay: bin/python -m tests.simulator --seed 0 --scenario random\n")


def test_a_sampler_whose_version_falls_is_caught() -> None:
    cluster = Cluster(NAMED["default"], 0)
    cluster.run()
    node, three, two = NodeId("s0"), VersionId(incarnation=0, version=43), VersionId(incarnation=0, version=42)
    cluster._plane.check([(node, three)], connected=True)
    with pytest.raises(InvariantBreach, match=r"I4: s0 fell from 0\.43 to 0\.42"):
        cluster._plane.check([(node, two)], connected=True)


def test_a_breach_after_a_crash_of_ones_own_choice_is_replayed_too(
    monkeypatch: pytest.MonkeyPatch, replays: Callable[[InvariantBreach], None]
) -> None:
    _numbering_begins_anew_after_a_crash(monkeypatch)
    crashes = (Crash(effect=100, what="trainer"), Crash(effect=120, what="both"))
    with pytest.raises(InvariantBreach) as caught:
        Cluster(dataclasses.replace(TINY, crashes=crashes), 0).run()
    assert caught.value.replay.endswith("--seed 0 --scenario tiny --crash-at 100:trainer,120:both")
    replays(caught.value)


def test_a_spooled_batch_that_is_accepted_twice_is_caught_and_replayed(
    monkeypatch: pytest.MonkeyPatch, replays: Callable[[InvariantBreach], None]
) -> None:
    """The sampler dies before it hears its verdicts, and its next life submits the batch again."""
    _answers_are_accepted_twice(monkeypatch)
    crash = SamplerCrash(action=39, node=NodeId("s1"))
    with pytest.raises(InvariantBreach, match=r"I3: .* was accepted twice") as caught:
        Cluster(dataclasses.replace(TINY, crashes=(crash,)), 0).run()
    assert caught.value.replay.endswith("--seed 0 --scenario tiny --crash-at 39:s1")
    replays(caught.value)


@pytest.mark.parametrize("text", ["17", "17:", "17:nobody", "17:s", "17:s-1", ":s0", "x:both"])
def test_a_crash_that_names_nobody_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not in tuple|invalid literal"):
        parse_crash(text)
