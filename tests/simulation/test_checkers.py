"""The checkers see what they are for: cores broken on purpose are caught, and the message replays the breach."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import swarm.rollout.plane.buffer
import swarm.rollout.plane.plane
import swarm.rollout.plane.verdict
from benchmarks import holding
from swarm.rollout.journal.entries import BatchTaken, RecordedRun
from swarm.rollout.messages import Answer
from swarm.rollout.plane.buffer import Buffer
from swarm.rollout.plane.effects import Effect, Judged
from swarm.rollout.plane.episodes import Episode, PlayerStream
from swarm.rollout.plane.groups import Group, LeaseTable, Sample
from swarm.rollout.plane.plane import RolloutPlane
from swarm.rollout.plane.rules import Pacing
from swarm.types import NodeId, Verdict, VersionId
from tests.simulator.__main__ import main
from tests.simulator.breach import InvariantBreach
from tests.simulator.rollouts.cluster import Cluster
from tests.simulator.rollouts.disk import Disk
from tests.simulator.rollouts.ledger import Ledger, ScoredRollout
from tests.simulator.rollouts.scenario import NAMED, parse_crash, scenario_named

pytestmark = pytest.mark.slow

Breakage = Callable[[pytest.MonkeyPatch], None]


def put(owner: object, name: str, other: object) -> Breakage:
    return lambda patch: patch.setattr(owner, name, other)


def always(answer: object) -> Callable[..., object]:
    return lambda *_, **__: answer


def batches_ignore_freshness(patch: pytest.MonkeyPatch) -> None:
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
    patch.setattr(swarm.rollout.plane.plane, "is_fresh", always(True))
    patch.setattr(swarm.rollout.plane.buffer, "is_fresh", always(True))
    patch.setattr(RolloutPlane, "_completed", completed)
    patch.setattr(RolloutPlane, "take", take)


def taking(change: Callable[[Buffer, list[Group]], None]) -> Breakage:
    taken = Buffer.take

    def take(buffer: Buffer, next_batch: int, max_staleness: int) -> list[Group]:
        batch = taken(buffer, next_batch, max_staleness)
        change(buffer, batch)
        return batch

    return put(Buffer, "take", take)


def latest_deadline_first(buffer: Buffer, batch: list[Group]) -> None:
    if buffer._ready:
        newest = buffer._ready[max(buffer._ready)]
        last = newest.pop(next(iter(newest)))
        buffer.add(batch[0])
        batch[0] = last


def batch_stays(buffer: Buffer, batch: list[Group]) -> None:
    for group in batch:
        buffer.add(group)


def accepting(duplicates: str) -> Breakage:
    judge = RolloutPlane._judge

    def lenient(plane: RolloutPlane, node: NodeId, answer: Answer, *given: Any) -> tuple[Verdict, str]:
        verdict, said = judge(plane, node, answer, *given)
        return ("accepted", "") if said.startswith(duplicates) else (verdict, said)

    return put(RolloutPlane, "_judge", lenient)


def replacing_without_end(patch: pytest.MonkeyPatch) -> None:
    honest = RolloutPlane._is_for_replacement

    def endless(plane: RolloutPlane, group: Group) -> bool:
        plane._replaced = 0
        return honest(plane, group)

    patch.setattr(RolloutPlane, "_is_for_replacement", endless)


def fresh_group_dropped(plane: RolloutPlane) -> list[Effect]:
    dropped: list[Effect] = []
    for group in list(plane.leased.groups())[:1]:
        plane.leased.close(group)
        dropped = [plane._dropped(group, "stale")]
    return dropped


def samples_are_leased_twice(patch: pytest.MonkeyPatch) -> None:
    def wait(table: LeaseTable, group: Group, _: int) -> None:
        group.waiting = len(group.samples)
        table._rank(group)

    patch.setattr(Sample, "waiting", property(lambda sample: sample.rollout is None))
    patch.setattr(LeaseTable, "_wait", wait)


def version_falls(plane: RolloutPlane, version: VersionId) -> None:
    plane.newest = VersionId(incarnation=0, version=version.version % 3)


def core_raises(*_: object, **__: object) -> None:
    raise KeyError("t0")


def restoring(change: Callable[[RecordedRun], RecordedRun], opened: int | None = None) -> Breakage:
    honest = RolloutPlane.restore

    def restore(plane: RolloutPlane, run: RecordedRun, *, now: float) -> list[Effect]:
        wanted = honest(plane, change(run), now=now)
        plane._opened = plane._opened if opened is None else opened
        return wanted

    return put(RolloutPlane, "restore", restore)


def steps_are_replayed_in_another_order(patch: pytest.MonkeyPatch) -> None:
    def batch(ledger: Ledger, step: int) -> list[ScoredRollout]:
        again = step in seen
        seen.add(step)
        found = honest(ledger, step)
        return found[::-1] if again else found

    seen: set[int] = set()
    honest = Ledger.batch
    patch.setattr(Ledger, "batch", batch)


def lowered_bound_goes_unsaid(patch: pytest.MonkeyPatch) -> None:
    honest = RolloutPlane.submit

    def submit(plane: RolloutPlane, *given: Any, **rest: Any) -> list[Effect]:
        judged, *more = honest(plane, *given, **rest)
        assert isinstance(judged, Judged)
        return [dataclasses.replace(judged, counted_as=judged.verdict), *more]

    patch.setattr(RolloutPlane, "submit", submit)


accepting_twice = accepting("this sample is answered")
pacing_always_allows = put(Pacing, "may_open", always(True))
never_ready = put(RolloutPlane, "can_take", always(False))
numbering_begins_anew = restoring(lambda run: run, opened=0)
replaced_is_forgotten = restoring(lambda run: dataclasses.replace(run, replaced=0))
any_is_replaced = put(RolloutPlane, "_is_for_replacement", lambda plane, _: plane._replaced < 4)

BREAKAGES: list[tuple[Breakage, str, int, str]] = [
    # Seed 3: a sample of a group that is too old must not be leased again before, which another checker sees first.
    (batches_ignore_freshness, "failing-generations", 3, "I1: .* has staleness 3"),
    (put(swarm.rollout.plane.verdict, "is_fresh", always(True)), "default", 1, "I1: .* accepted though it is stale"),
    (put(RolloutPlane, "_fresh", always(True)), "slow-broadcast", 1, "leases: .* could be in no batch"),
    (put(RolloutPlane, "set_standby", always(None)), "standbys", 1, "leases: t.* for s0, which is on standby"),
    (pacing_always_allows, "default", 1, "pacing: .* groups due in .* room for"),
    (taking(latest_deadline_first), "churn", 1, "pacing: due by .* was taken before"),
    (accepting_twice, "lossy", 1, "I3: .* was accepted twice"),
    (accepting("this failure is known"), "failing-calls", 1, "I3: .* failed twice over"),
    (taking(batch_stays), "default", 1, "I5: the plane has groups_ready"),
    (put(RolloutPlane, "_expire", fresh_group_dropped), "default", 1, "I3: .* is not (stale|bound_lowered)"),
    (
        put(LeaseTable, "silent", lambda table, **_: [*table.nodes()]),
        "default",
        1,
        "leases: .* was called silent after",
    ),
    (samples_are_leased_twice, "default", 1, "leases: sample .* is held or answered"),
    (never_ready, "unlimited-hold", 1, "liveness: no step and no evaluation"),
    (put(RolloutPlane, "published", version_falls), "default", 1, "I4: newest fell"),
    (put(LeaseTable, "claim", core_raises), "default", 1, "core: KeyError 't0'"),
    (put(Disk, "write", lambda _, then: then()), "default", 1, "I3: .* not on record"),
    (numbering_begins_anew, "crashes", 1, "leases: .* is closed"),
    (put(swarm.rollout.plane.plane, "RETURN_S", 0.0), "crashes-sequential", 1, "leases: .* was called silent after"),
    (steps_are_replayed_in_another_order, "crashes", 1, "I3: step .* was trained again on something else"),
    (put(holding, "may_take", always(True)), "unlimited-hold", 6, "I7: .* is stale"),  # One that left something behind
    (put(holding.HoldingPacing, "may_take", always(False)), "default", 1, "I7: a batch is ready and is not taken"),
    (lowered_bound_goes_unsaid, "dial", 1, "I3: .* is stale for another reason"),
    (put(Episode, "begun", property(always(False))), "episodes", 1, "episodes: .* does not go on from turn"),
    (put(swarm.rollout.plane.plane, "turn_taken", always([])), "episodes", 1, "episodes: turn 1 of .* is not recorded"),
    (put(PlayerStream, "read", always(None)), "episodes", 1, "episodes: .* is not what was drawn and said"),
    (put(RolloutPlane, "is_taken", always(True)), "episodes", 1, "episodes: turn 0 of .* was not taken"),
    (replacing_without_end, "dynamic-sampling", 1, "dynamic: 5 groups were replaced for a batch of 4"),
    (any_is_replaced, "dynamic-sampling", 1, "I3: .* is not no_variance"),
    (put(RolloutPlane, "_is_for_replacement", always(False)), "dynamic-sampling", 1, "dynamic: .* and was kept"),
    # Seed 6: a crash between two replacements for one batch.
    (replaced_is_forgotten, "dynamic-sampling-crashes", 6, "dynamic: 5 groups were replaced"),
    (put(Group, "authors", property(always(Counter()))), "dial", 1, "I3: on record: group .* was not by"),
]


def breach_of(name: str, seed: int, crashes: str = "") -> InvariantBreach:
    scenario = scenario_named(name, seed)
    if crashes:
        scenario = dataclasses.replace(scenario, crashes=tuple(map(parse_crash, crashes.split(","))))
    with pytest.raises(InvariantBreach) as caught:
        Cluster(scenario, seed).run()
    return caught.value


@pytest.mark.parametrize(
    ("breakage", "name", "seed", "said"), BREAKAGES, ids=[f"{row[1]}: {row[3]}" for row in BREAKAGES]
)
def test_a_broken_core_is_caught(
    breakage: Breakage, name: str, seed: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    breakage(monkeypatch)
    breach = breach_of(name, seed)
    assert breach.args[0].startswith(said.partition(":")[0])
    with pytest.raises(InvariantBreach, match=said):
        raise breach


def said_by(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["tests.simulator", *shlex.split(arguments)])
    assert main() == 1
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("breakage", "name", "seed", "crashes", "said"),
    [
        (pacing_always_allows, "default", 1, "", "pacing: "),
        (pacing_always_allows, "random", 2, "", "pacing: "),
        (numbering_begins_anew, "tiny", 0, "100:trainer,120:both", "leases: .* is closed"),
        # The sampler dies before it hears its verdicts, and its next life submits the spooled batch again.
        (accepting_twice, "tiny", 0, "39:s1", "I3: .* was accepted twice"),
    ],
)
def test_the_message_ends_with_the_command_that_breaks_it_again(
    breakage: Breakage,
    name: str,
    seed: int,
    crashes: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    breakage(monkeypatch)
    breach = breach_of(name, seed, crashes)
    arguments = f"--seed {seed} --scenario {name}{crashes and f' --crash-at {crashes}'}"
    assert re.match(said, str(breach))
    assert str(breach).endswith(f"\nreplay: bin/python -m tests.simulator {arguments}")
    assert said_by(monkeypatch, capsys, arguments) == f"{breach}\n"


def test_many_seeds_stop_at_the_first_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    never_ready(monkeypatch)
    assert said_by(monkeypatch, capsys, "--seeds 3").endswith("--seed 0 --scenario random\n")


def test_a_sampler_whose_version_falls_is_caught() -> None:
    cluster = Cluster(NAMED["tiny"], 0)
    cluster.run()
    node, three, two = NodeId("s0"), VersionId(incarnation=0, version=43), VersionId(incarnation=0, version=42)
    cluster._plane.check([(node, three)], connected=True)
    with pytest.raises(InvariantBreach, match=r"I4: s0 fell from 0\.43 to 0\.42"):
        cluster._plane.check([(node, two)], connected=True)


@pytest.mark.parametrize("text", ["17", "17:nobody", "17:s-1", ":s0", "x:both"])
def test_a_crash_that_names_nobody_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not in tuple|invalid literal"):
        parse_crash(text)
