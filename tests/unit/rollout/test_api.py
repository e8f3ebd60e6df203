"""The learner's HTTP face, on a real server and with the sampler's own client."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from swarm.errors import EchoError, ProtocolError, TooLarge, UserError
from swarm.net import client
from swarm.net.client import Busy, Forbidden
from swarm.net.sessions import Unauthorized
from swarm.rollout import api
from swarm.rollout.ahead import PromptsAhead
from swarm.rollout.intake import INLINE_BYTES, Claimed, IntakeLimits, open_submission
from swarm.rollout.journal.entries import BatchTaken, Entry, RolloutScored
from swarm.rollout.messages import MAX_SUBMITTED, Answer, Submission
from swarm.rollout.plane.effects import AuditResult, ScoreWanted, StepWanted
from swarm.rollout.plane.groups import Group, Sample
from swarm.rollout.scoring import MAX_IN_A_ROW, QUIET_S, RewardFailures
from swarm.sampler.client import RolloutClient, samples_of
from swarm.types import GroupId, NodeId, Rollout, Score, Unscored
from swarm.wire import ROLLOUT_BODY_BYTES, ROLLOUT_MAX_RATIO, ROLLOUT_UNPACKED_BYTES, compress, encode
from tests.builders import ListJournal, floats, new_plane, prompt, rollout, v
from tests.learner_face import ALICE, BOB, WAIT_S, Learner, answers_to, leases_for, serving

HALF = Score(reward=0.5, exact=False)


async def test_a_sampler_is_told_that_the_learner_is_starting(starting: Learner) -> None:
    assert (await starting.client(ALICE).ask(v(0), 1, WAIT_S, holding=()))[0] == "starting"


async def test_a_sampler_that_holds_a_version_of_another_life_of_the_learner_has_to_wait(starting: Learner) -> None:
    """The learner came back elsewhere: it has published nothing yet, or has still to go past what others hold."""
    starting.service.open(starting.plane, starting._score)
    held = v(557)
    assert (await starting.client(ALICE).ask(held, 1, WAIT_S, holding=()))[0] == "starting"
    assert (await starting.client(ALICE).beat(held, 0, 0.0)).newest is None
    await starting.service.published(v(0, incarnation=1))
    assert (await starting.client(ALICE).ask(held, 1, WAIT_S, holding=()))[0] == "behind"
    ahead = v(3, incarnation=2)
    assert (await starting.client(ALICE).ask(ahead, 1, WAIT_S, holding=()))[0] == "starting"
    assert (await starting.client(ALICE).beat(ahead, 0, 0.0)).newest == v(0, incarnation=1)


class Accuser:
    """Looks at each batch once, and catches Alice in the first. `own` are log-probs that it recomputes."""

    def __init__(self, *caught: NodeId) -> None:
        self.batches: list[Sequence[Group]] = [[]]
        self.caught = caught
        self.own: dict[tuple[GroupId, int], tuple[Rollout, bytes]] = {}
        self.unaudited = 0
        self.told: set[NodeId] = set()
        self.asked: list[str] = []

    def is_measured(self, node: NodeId) -> bool:
        return True

    def select(self, batch: Sequence[Group]) -> Sequence[Group]:
        return batch if len(self.batches) == 1 else []

    def fault_of(self, node: NodeId) -> str:
        return "its log-probs are off" * (node in self.told)

    def forgive(self, node: NodeId, why: str) -> bool:
        return node in self.told

    async def is_genuine(self, group: Group, sample: Sample) -> tuple[bool, AuditResult]:
        self.asked.append(f"{group.group_id}/{group.samples.index(sample)}")
        return False, AuditResult()

    async def audit(self, chosen: Sequence[Group]) -> AuditResult:
        self.batches.append(chosen)
        return AuditResult(caught=dict.fromkeys(self.caught, "it lied"), recomputed=self.own, unaudited=self.unaudited)


@pytest.mark.parametrize(("local", "most"), [(True, 4), (False, 1)])
async def test_newcomers_from_the_address_of_one_who_was_caught_come_one_at_a_time(
    learner: Learner, monkeypatch: pytest.MonkeyPatch, *, local: bool, most: int
) -> None:
    monkeypatch.setattr("swarm.rollout.api.is_loopback", lambda host: local)
    await learner.client(ALICE).submit(answers_to(await leases_for(learner, ALICE, 4)))
    learner.service._auditor = Accuser(ALICE)
    waiting = asyncio.create_task(learner.service.next_batch())
    try:
        await learner.shows(lambda status: ALICE in learner.plane.barred)
        assert sum(len(one.samples) for one in await leases_for(learner, BOB, 4)) == most
    finally:
        waiting.cancel()


async def test_log_probs_that_were_recomputed_are_trained_with_and_journaled(learner: Learner) -> None:
    await learner.client(ALICE).submit(answers_to(await leases_for(learner, ALICE, 4)))
    learner.service._auditor = accuser = Accuser()
    await learner.shows(lambda status: status["groups_ready"] == 2)
    own = floats(*[-0.25] * 6)
    first, second = (group for group in learner.plane._buffer.groups())
    given, other = (group.samples[1].rollout for group in (second, first))
    assert given is not None
    assert other is not None
    # Somebody else has answered the first one meanwhile.
    gone = structs.replace(other, logprobs=other.logprobs)
    accuser.own = {(second.group_id, 1): (given, own), (first.group_id, 1): (gone, own)}
    batch = await learner.service.next_batch()
    rollouts = {(group.group_id, one.index): one for group in batch for s in group.samples if (one := s.rollout)}
    changed = [name for name, one in rollouts.items() if one.logprobs == own[: len(one.logprobs)]]
    assert changed == [("t1", 1)]
    tail = [type(one).__name__ for one in learner.journal.entries[-4:]]
    assert tail == ["RolloutReturned", "RolloutAccepted", "RolloutScored", "BatchTaken"]


async def test_a_held_out_round_with_a_liar_in_it_is_drawn_again_by_others(learner: Learner) -> None:
    learner.service._auditor = Accuser(ALICE)
    asked = asyncio.create_task(learner.service.evaluate(v(0), [prompt(0)]))
    await learner.shows(lambda status: learner.plane.round.open)
    await learner.client(ALICE).submit(answers_to(await leases_for(learner, ALICE, 1)))
    await learner.shows(lambda status: ALICE in learner.plane.barred)
    await learner.shows(lambda status: learner.plane.round.open)
    learner.service._auditor.caught = ()
    await learner.client(BOB).submit(answers_to(await leases_for(learner, BOB, 1)))
    done = await asked
    assert not done.unaudited
    assert {sample.author for group in done.groups for sample in group.samples} == {BOB}


async def test_a_caught_sampler_hears_what_is_wrong_and_may_begin_again_once(learner: Learner) -> None:
    learner.service._auditor = accuser = Accuser()
    accuser.told = {ALICE}
    learner.service.bar(ALICE, "barred: its log-probs are off")
    assert (await learner.client(ALICE).beat(v(0), 0, 0.0)).wrong == "its log-probs are off"
    await learner.client(ALICE).release([], forget=True)
    assert ALICE not in learner.plane.barred
    learner.service.bar(ALICE, "barred: its log-probs are off")
    accuser.told = set()
    assert (await learner.client(ALICE).beat(v(0), 0, 0.0)).wrong == ""
    await learner.client(ALICE).release([], forget=True)
    assert ALICE in learner.plane.barred


async def test_a_held_out_round_that_nobody_can_audit_says_so(learner: Learner) -> None:
    unable = Accuser()
    unable.unaudited = 1
    for look in (None, unable):
        learner.service._auditor = look
        asked = asyncio.create_task(learner.service.evaluate(v(0), [prompt(0)]))
        await learner.shows(lambda status: learner.plane.round.open)
        await learner.client(BOB).submit(answers_to(await leases_for(learner, BOB, 1)))
        assert (await asked).unaudited


@pytest.mark.parametrize("released", [True, False])
async def test_a_question_held_open_is_answered_when_a_sample_is_free(learner: Learner, released: bool) -> None:
    given = await leases_for(learner, ALICE, 4096)
    waiting = asyncio.create_task(leases_for(learner, BOB, 1))
    await learner.knows(BOB)
    if released:
        await learner.client(ALICE).release(samples_of(given[:1]), forget=False)
    else:
        await learner.client(ALICE).submit([Answer(rollout(group_id=given[0].group_id, index=0, tokens=[99]))])
    (one,) = await waiting
    assert one.group_id == given[0].group_id


async def test_a_question_held_open_is_answered_when_the_learner_begins_to_wait(learner: Learner) -> None:
    """No more groups of version 0 are opened ahead after five batches of it, but a waiting learner gets them."""
    learner.plane = new_plane(newest=None, max_staleness=8)
    await learner.open()
    await learner.client(ALICE).submit(answers_to(await leases_for(learner, ALICE, 4096)))
    for _ in range(5):
        await learner.service.next_batch()
    waiting = asyncio.create_task(leases_for(learner, BOB, 4))
    await learner.shows(lambda status: BOB in learner.service.samplers)
    told = learner.service._chances.count
    batch = asyncio.create_task(learner.service.next_batch())
    await asyncio.sleep(0)
    assert learner.service._chances.count == told + 1, "without news the question is asked again only as it ends"
    await learner.client(BOB).submit(answers_to(await waiting))
    assert len(await batch) == 2


async def test_a_question_waits_for_the_prompts_that_its_answer_may_open(learner: Learner) -> None:
    ahead = PromptsAhead(prompt, first=0, most=4)
    learner.service._prompts = ahead
    waiting = asyncio.create_task(leases_for(learner, ALICE, 4))
    await learner.shows(lambda status: ALICE in learner.service.samplers)
    assert learner.service.status()["groups_open"] == 0
    making = asyncio.create_task(ahead.run())
    ahead.begin()
    assert [one.group_id for one in await waiting] == ["t0", "t1"]
    making.cancel()


async def test_a_question_held_open_ends_when_its_sampler_leaves(learner: Learner) -> None:
    await leases_for(learner, ALICE, 4096)
    waiting = asyncio.create_task(learner.client(BOB).ask(v(0), 1, WAIT_S, holding=()))
    await learner.knows(BOB)
    await learner.client(BOB).release((), forget=True)
    assert (await waiting)[0] == "paced"
    assert BOB not in learner.service.samplers
    assert learner.gone_nodes == [BOB]


async def test_what_a_sampler_does_not_name_is_leased_again(learner: Learner) -> None:
    """The answer with the first leases was lost: the node asks again and holds nothing."""
    lost = await leases_for(learner, ALICE, 4096)
    again = await leases_for(learner, ALICE, 4096)
    assert again == lost


async def test_a_rollout_whose_reward_fails_gets_zero_and_counts_in_its_group(learner: Learner) -> None:
    learner.unscorable = {"t1/0"}
    await learner.client(ALICE).submit(answers_to(await leases_for(learner, ALICE, 4)))
    batch = await learner.service.next_batch()
    scores = {group.group_id: [sample.score for sample in group.samples] for group in batch}
    assert scores == {"t0": [HALF, HALF], "t1": [Score(reward=0.0, exact=False), HALF]}
    assert [kind for kind, _ in learner.events if kind in ("reward_failed", "group_dropped")] == ["reward_failed"]
    assert (learner.service.failures.take_share(), learner.service.failures.take_share()) == (0.25, 0.0)
    assert learner.service.failures.reason == "no"


async def test_what_took_long_is_heard_of_before_the_rest_of_its_group(starting: Learner) -> None:
    """A scorer that gives one outcome at a time, as where each cost a process."""
    calls: list[list[str]] = []

    async def one_by_one(wanted: Sequence[ScoreWanted]) -> list[Score | Unscored]:
        calls.append([one.rollout.rollout_id for one in wanted])
        return [Unscored(reason="slow") if len(calls) == 1 else HALF]

    starting.service.open(starting.plane, one_by_one)
    await starting.service.published(v(0))
    await starting.client(ALICE).submit(answers_to(await leases_for(starting, ALICE, 2)))
    await starting.shows(lambda status: len(calls) == 2)
    assert calls == [["t0/0", "t0/1"], ["t0/1"]]
    assert [one.score.reward for one in starting.journal.entries if isinstance(one, RolloutScored)] == [0.0, 0.5]


# -- failures of a reward that anybody can make up -----------------------------------------------------------


def fails(failures: RewardFailures, times: int, genuine: bool | None, *, now: float) -> None:
    for number in range(times):
        settle(failures, Unscored(reason="no", genuine=genuine), now=now, node=NodeId(f"key {number}"))


def settle(failures: RewardFailures, outcome: Score | Unscored, *, now: float, node: NodeId = BOB) -> object:
    given = rollout(group_id="t0", index=0)
    asked = ScoreWanted(group_id=GroupId("t0"), index=0, node=node, prompt=prompt(), rollout=given)
    return failures.settle([asked], [outcome], now=now)[0]


@pytest.mark.parametrize(
    ("works", "genuine", "most", "ends_at"),
    [(True, None, 640, QUIET_S), (False, None, MAX_IN_A_ROW - 1, 1.0), (True, True, MAX_IN_A_ROW - 1, 1.0)],
)
def test_no_number_of_keys_ends_a_run_whose_reward_works_soon(
    works: bool, genuine: bool | None, most: int, ends_at: float
) -> None:
    failures = RewardFailures(lambda kind, **fields: None)
    if works:
        settle(failures, HALF, now=0.0)
    fails(failures, most, genuine, now=ends_at - 1)
    with pytest.raises(UserError, match=f"failed {most + 1} times in a row"):
        fails(failures, 1, genuine, now=ends_at)


def test_an_environment_that_cannot_begin_ends_the_run_whatever_it_scored() -> None:
    failures = RewardFailures(lambda kind, **fields: None)
    settle(failures, HALF, now=0.0)
    begins = StepWanted(group_id=GroupId("t0"), index=0, episode="e", prompt=prompt(), drawn=())
    with pytest.raises(UserError, match=f"failed {MAX_IN_A_ROW} times in a row"):
        failures.settle([begins] * MAX_IN_A_ROW, [Unscored(reason="no")] * MAX_IN_A_ROW, now=1.0)


def test_what_nobody_drew_is_no_failure_of_the_reward() -> None:
    events: list[tuple[str, int]] = []
    failures = RewardFailures(lambda kind, **fields: events.append((kind, fields["rollouts"])))
    fails(failures, 2 * MAX_IN_A_ROW, False, now=0.0)
    made_up = Unscored(reason="no", genuine=False)
    assert settle(RewardFailures(lambda kind, **fields: None), made_up, now=0.0) == made_up
    assert events == [("reward_refused", 1)]
    assert (failures.in_a_row, failures.take_share()) == (0, 0.0)


async def test_a_failed_answer_that_nobody_drew_is_drawn_by_others_from_its_seed(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.rollout.scoring.ASKED_FROM", 2)
    learner.service._auditor = accuser = Accuser()
    learner.unscorable = {"t0/0", "t0/1"}
    given = await leases_for(learner, ALICE, 2)
    await learner.client(BOB).beat(v(0), 0, 0.0)
    await learner.client(ALICE).submit(answers_to(given))
    await learner.shows(lambda status: status["rollouts_unscored"] == 0)
    assert accuser.asked == ["t0/0", "t0/1"], "one failure alone is not worth an audit"
    again = await leases_for(learner, BOB, 2)
    seeds = [[spec.seed for spec in one[0].samples] for one in (again, given)]
    assert (again[0].group_id, seeds[0]) == ("t0", seeds[1])
    (row,) = [one for one in learner.service.status()["samplers"] if one["node"] == ALICE]
    assert row["reward_failures"] == 2
    assert not [entry for entry in learner.journal.entries if isinstance(entry, RolloutScored)]


async def test_the_reward_of_a_run_that_goes_on_has_worked(starting: Learner) -> None:
    starting.plane.next_batch = 1
    await starting.open()
    fails(starting.service.failures, MAX_IN_A_ROW, None, now=time.monotonic())


def test_groups_that_are_lost_one_after_the_other_end_the_run_though_turns_were_answered() -> None:
    failures = RewardFailures(lambda kind, **fields: None)
    for number in range(MAX_IN_A_ROW - 1):
        failures.dropped("stale", now=0.0)
        if number == 1:
            failures.scored(now=0.0)
        if number:
            failures.dropped("environment_failed", now=0.0)
    failures.dropped("environment_failed", now=0.0)
    failures.dropped("environment_failed", now=QUIET_S - 1)
    with pytest.raises(UserError, match=f"{MAX_IN_A_ROW + 1} groups in a row were lost .* --max-episode-tokens"):
        failures.dropped("environment_failed", now=QUIET_S)


async def test_a_fault_behind_scoring_does_not_stay_hidden(starting: Learner) -> None:
    async def full_disk(wanted: Sequence[ScoreWanted]) -> list[Score]:
        raise OSError("no space left on device")

    starting.service.open(starting.plane, full_disk)
    await starting.service.published(v(0))
    watch = asyncio.create_task(starting.service.watch_silence())
    await starting.client(ALICE).submit(answers_to(await leases_for(starting, ALICE, 1)))
    with pytest.raises(OSError, match="no space"):
        await watch


async def test_more_rollouts_than_a_submission_may_hold_are_refused(learner: Learner) -> None:
    many = (Answer(rollout(group_id="t0", index=0)),) * (MAX_SUBMITTED + 1)
    body = compress(encode(Submission(node=ALICE, answers=many)))
    with pytest.raises(Exception, match=f"<= {MAX_SUBMITTED}") as refused:
        await learner.peers[ALICE].post("/v1/steps", body, cap_bytes=1 << 20, timeout_s=10.0)
    assert not isinstance(refused.value, TooLarge)  # the server refused, not our own cap


async def test_malformed_rollouts_make_one_event_a_submission(learner: Learner) -> None:
    await leases_for(learner, ALICE, 2)
    verdicts = await learner.client(ALICE).submit([Answer(rollout(group_id="t0", index=2 + i)) for i in range(50)])
    assert {answer.verdict for answer in verdicts} == {"malformed"}
    told = [fields for kind, fields in learner.events if kind == "rollouts_malformed"]
    assert [fields["rollouts"] for fields in told] == [50]


async def test_beats_tell_what_is_newest_and_when_it_is_over(learner: Learner) -> None:
    first = await learner.client(ALICE).beat(None, 0, 0.0)
    assert (first.newest, first.finished) == (v(0), False)
    await learner.service.end("finished")
    assert (await learner.client(ALICE).beat(v(0), 0, 0.0)).finished
    assert (await learner.client(ALICE).ask(v(0), 1, WAIT_S, holding=()))[0] == "finished"


async def test_a_node_speaks_for_itself_alone(learner: Learner) -> None:
    await leases_for(learner, ALICE, 1)
    liar = learner.client(BOB, named=ALICE)
    for call in (
        liar.ask(v(0), 1, WAIT_S, holding=()),
        liar.beat(v(0), 0, 0.0),
        liar.release((), forget=True),
        liar.submit(answers_to(await leases_for(learner, ALICE, 1))),
    ):
        with pytest.raises(Forbidden, match=f"signed by node {BOB} and speaks for {ALICE}"):
            await call
    assert list(learner.service.samplers) == [ALICE]
    assert learner.sessions.refused == {"other_node": 4}


async def test_what_is_not_signed_is_not_looked_at(learner: Learner) -> None:
    stranger = learner.peers[BOB]
    stranger._signs_for = None
    client = RolloutClient(stranger, BOB)
    for call in (
        client.ask(v(0), 1, WAIT_S, holding=()),
        client.beat(v(0), 0, 0.0),
        client.release((), forget=True),
        stranger.post("/v1/steps", b"", cap_bytes=1000, timeout_s=5.0),
    ):
        with pytest.raises(Unauthorized, match="sign this request"):
            await call
    assert learner.service.samplers == {}


# -- when it is too much -------------------------------------------------------------------------------------


async def test_a_full_learner_refuses_a_submission_unread_and_counts_it() -> None:
    async with serving(Learner(limits=IntakeLimits(bodies=0, retry_after_s=6.5))) as learner:
        await learner.open()
        await learner.client(ALICE).beat(v(0), 0, 0.0)
        reader, writer = await learner.begin_submission(ALICE, stated=8_000_000)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert answer.startswith("HTTP/1.1 429")
        assert "Retry-After: 7\r\n" in answer
        assert await reader.readuntil(b": ") == b"overloaded: "
        writer.close()
        status = learner.service.status()
        assert status["verdicts"] == {"overloaded": 1}
        assert status["samplers"][0]["verdicts"] == {"overloaded": 1}
        assert (status["submissions_in_hand"], status["submissions_refused"]) == (0, {"bodies": 1})
        with pytest.raises(Busy, match="overloaded") as refused:
            await learner.client(ALICE).submit([Answer(rollout())])
        assert refused.value.retry_after_s == 7.0


async def test_whoever_opens_submissions_and_sends_nothing_stands_in_nobody_elses_way() -> None:
    async with serving(Learner(limits=IntakeLimits(hold_s=0.0))) as learner:
        await learner.open()
        given = {node: answers_to(await leases_for(learner, node, 1)) for node in (ALICE, BOB)}
        opened = [await learner.begin_submission(ALICE) for _ in range(4)]
        await learner.shows(lambda status: status["submissions_in_hand"] == 4)
        with pytest.raises(Busy, match="overloaded: you have as much under way as one sampler may"):
            await learner.client(ALICE).submit(given[ALICE])
        assert [one.verdict for one in await learner.client(BOB).submit(given[BOB])] == ["accepted"]
        for _, writer in opened:
            writer.close()
        await learner.shows(lambda status: status["submissions_in_hand"] == 0)
        assert [one.verdict for one in await learner.client(ALICE).submit(given[ALICE])] == ["accepted"]


async def test_whoever_hands_in_what_nobody_asked_for_is_refused_alone() -> None:
    async with serving(Learner(limits=IntakeLimits(spare_rollouts=2, spare_per_s=1e-9, hold_s=0.0))) as learner:
        await learner.open()
        given = {node: answers_to(await leases_for(learner, node, 2)) for node in (ALICE, BOB)}
        for expected in ("accepted", "duplicate"):
            assert {one.verdict for one in await learner.client(ALICE).submit(given[ALICE])} == {expected}
        with pytest.raises(Busy, match="overloaded: you hand in far more than you were leased"):
            await learner.client(ALICE).submit(given[ALICE])
        assert {one.verdict for one in await learner.client(BOB).submit(given[BOB])} == {"accepted"}


async def test_what_answers_a_lease_costs_its_sampler_nothing_whatever_becomes_of_it() -> None:
    async with serving(Learner(limits=IntakeLimits(spare_rollouts=1, spare_per_s=1e-9, hold_s=0.0))) as learner:
        await learner.open()
        for _ in range(3):
            (one,) = await leases_for(learner, ALICE, 1)
            bad = rollout(group_id=one.group_id, index=one.samples[0].index, tokens=[99])
            (verdict,) = await learner.client(ALICE).submit([Answer(bad)])
            assert verdict.verdict == "malformed"


async def test_submissions_wait_outside_while_the_journal_has_too_much_to_write(learner: Learner) -> None:
    answers = answers_to(await leases_for(learner, ALICE, 1))
    learner.journal.pending_bytes = 1 << 30
    with pytest.raises(Busy, match="overloaded: the learner has more to write than its disk takes"):
        await learner.client(ALICE).submit(answers)
    learner.journal.pending_bytes = 0
    assert [one.verdict for one in await learner.client(ALICE).submit(answers)] == ["accepted"]


# -- a journal that is slow, full or broken ------------------------------------------------------------------


class SlowJournal(ListJournal):
    """Commits while `free` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.free = asyncio.Event()
        self.free.set()

    async def write(self, entries: Sequence[Entry]) -> None:
        self.enqueue(entries)
        await self.free.wait()


@pytest.fixture
def slow(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> SlowJournal:
    """The journal of `learner`, for which nobody waits."""
    monkeypatch.setattr(api, "COMMIT_S", 0.0)
    learner.journal = learner.service._journal = journal = SlowJournal()
    return journal


async def test_a_duplicate_is_told_only_once_its_original_is_committed(learner: Learner, slow: SlowJournal) -> None:
    answers = answers_to(await leases_for(learner, ALICE, 2))
    slow.free.clear()
    for _ in range(2):
        with pytest.raises(Busy, match="not yet recorded"):
            await learner.client(ALICE).submit(answers)
    slow.free.set()
    assert [one.verdict for one in await learner.client(ALICE).submit(answers)] == ["duplicate"] * 2


async def test_a_batch_is_recorded_before_it_is_trained_on(learner: Learner, slow: SlowJournal) -> None:
    await learner.client(ALICE).submit(answers_to(await leases_for(learner, ALICE, 4)))
    await learner.shows(lambda status: status["groups_ready"] == 2)
    slow.free.clear()
    batch = asyncio.create_task(learner.service.next_batch())
    await learner.shows(lambda _: isinstance(slow.entries[-1], BatchTaken))
    assert not batch.done()
    slow.free.set()
    assert [group.group_id for group in await batch] == ["t0", "t1"]


async def test_leases_that_are_not_recorded_in_time_are_not_given_out(learner: Learner, slow: SlowJournal) -> None:
    slow.free.clear()
    with pytest.raises(Busy, match="not yet recorded"):
        await learner.client(ALICE).ask(v(0), 2, WAIT_S, holding=())
    slow.free.set()
    (again,) = await leases_for(learner, ALICE, 2)
    assert again.group_id == "t0"


async def test_while_the_disk_is_full_nothing_is_taken_or_opened_and_samplers_come_back(learner: Learner) -> None:
    answers = answers_to(await leases_for(learner, ALICE, 2))
    learner.journal.fault = "the disk is full: free 3 MB"
    with pytest.raises(Busy, match="the disk is full: free 3 MB"):
        await learner.client(ALICE).submit(answers)
    with pytest.raises(Busy, match="the disk is full: free 3 MB"):
        await leases_for(learner, BOB, 1)
    assert learner.plane.counts()["groups_open"] == 1
    learner.journal.fault = ""
    (one,) = await leases_for(learner, BOB, 1)
    assert one.group_id == "t1"
    assert [one.verdict for one in await learner.client(ALICE).submit(answers)] == ["accepted"] * 2


class BrokenJournal(ListJournal):
    """Takes no more once it is `broken`."""

    broken = False

    async def write(self, entries: Sequence[Entry]) -> None:
        if self.broken:
            raise EchoError("the journal cannot be written: bad sector")
        await super().write(entries)


async def test_a_journal_that_has_failed_ends_the_run(learner: Learner) -> None:
    learner.journal = learner.service._journal = journal = BrokenJournal()
    answers = answers_to(await leases_for(learner, ALICE, 2))
    journal.broken = True
    with pytest.raises(Busy, match="not yet recorded"):
        await learner.client(ALICE).submit(answers)
    with pytest.raises(EchoError, match="bad sector"):
        await learner.service.watch_silence()


async def test_whoever_asks_and_never_takes_part_falls_silent_too(learner: Learner) -> None:
    assert (await learner.client(ALICE).ask(v(557), 1, WAIT_S, holding=()))[0] == "starting"
    assert learner.service.samplers[ALICE].installed is None
    assert list(learner.plane.leased.nodes()) == [ALICE]


async def test_rollouts_are_not_judged_before_a_version_is_known(learner: Learner) -> None:
    """A resumed learner knows what it leased, and not yet what it published: any verdict would throw the work away."""
    leases = await leases_for(learner, ALICE, 2)
    learner.service.open(new_plane(newest=None), learner._score)
    with pytest.raises(Busy, match="starting"):
        await learner.client(ALICE).submit(answers_to(leases))


async def test_who_was_there_in_a_former_life_is_waited_for_at_the_end(learner: Learner) -> None:
    learner.service._absent = {ALICE}
    await learner.service.end("finished")
    farewell = asyncio.create_task(learner.service.farewell(0.0))
    await learner.client(BOB).release((), forget=True)
    assert not farewell.done()
    assert (await learner.client(ALICE).beat(v(0), 0, 0.0)).finished
    await learner.client(ALICE).release((), forget=True)
    await asyncio.wait_for(farewell, WAIT_S)


# -- caps on what comes in: a clear refusal, a counter, and nothing kept of it -------------------------------------


async def answer_to(learner: Learner, body: bytes) -> str:
    """What the learner says of a body; fails if it takes it."""
    with pytest.raises(ProtocolError) as refused:
        await learner.peers[ALICE].post("/v1/steps", body, cap_bytes=1 << 20, timeout_s=20.0)
    status = learner.service.status()
    assert (status["submissions_in_hand"], status["submission_bytes_in_hand"]) == (0, 0)
    return str(refused.value)


async def first_line(reader: Any) -> str:
    line: bytes = await reader.readline()
    return line.decode().strip()


# -- bytes ---------------------------------------------------------------------------------------------------


async def test_a_body_that_states_more_than_its_cap_is_refused_unread(learner: Learner) -> None:
    reader, writer = await learner.begin_submission(ALICE, stated=ROLLOUT_BODY_BYTES + 1)
    assert await first_line(reader) == "HTTP/1.1 413 Request Entity Too Large"
    writer.close()


async def test_a_body_that_unpacks_to_more_than_its_cap_is_refused_unpacked(learner: Learner) -> None:
    draw, zeros = random.Random(0), bytes(60 * 1024)
    content = b"".join(draw.randbytes(4096) + zeros for _ in range(ROLLOUT_UNPACKED_BYTES // (64 * 1024) + 1))
    body = compress(content)
    assert len(content) < ROLLOUT_MAX_RATIO * len(body)
    assert f"claim to unpack to {len(content)}" in await answer_to(learner, body)


@pytest.mark.parametrize("body", [b"", b"no zstd", compress(b"no submission")], ids=["empty", "no zstd", "no message"])
async def test_what_is_no_submission_is_refused(learner: Learner, body: bytes) -> None:
    assert "refused with status 400" in await answer_to(learner, body)


async def test_a_large_submission_is_opened_in_a_thread_with_the_same_verdicts(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_in: list[threading.Thread] = []

    def open_here(body: bytes, vocab_size: int) -> tuple[str, list[Claimed]]:
        opened_in.append(threading.current_thread())
        return open_submission(body, vocab_size)

    monkeypatch.setattr(api, "open_submission", open_here)
    (one,) = await leases_for(learner, ALICE, 2)
    good = [Answer(rollout(group_id="t0", index=spec.index)) for spec in one.samples]
    too_long = Answer(rollout(group_id="t0", index=1, tokens=[3] * 100_000))
    given = (good[0], too_long, good[1])
    assert len(encode(Submission(node=ALICE, answers=given))) > INLINE_BYTES
    verdicts = await learner.client(ALICE).submit(given)
    assert [verdict.verdict for verdict in verdicts] == ["accepted", "malformed", "accepted"]
    await learner.client(ALICE).submit(good)
    assert [thread is threading.main_thread() for thread in opened_in] == [False, True]


# -- time ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"a few bytes"], ids=["nothing", "a little"])
async def test_a_body_that_does_not_come_gives_its_place_back(
    learner: Learner, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(client, "GRACE_S", 0.0)
    reader, writer = await learner.begin_submission(ALICE, sent=sent)
    assert await first_line(reader) == "HTTP/1.1 408 Request Timeout"
    assert learner.service.status()["submissions_in_hand"] == 0
    writer.close()
