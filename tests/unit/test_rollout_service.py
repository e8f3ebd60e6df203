"""The learner's HTTP face, on a real server and with the sampler's own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from aiohttp import web

from swarm.auth import ServerSessions, Unauthorized
from swarm.errors import TooLarge
from swarm.http import Busy, Forbidden, PeerClient, guard, session_route
from swarm.rollout.api import RolloutService, ScoringFailed
from swarm.rollout.client import Answer, RolloutClient, SealedLease
from swarm.rollout.effects import ScoreWanted
from swarm.rollout.messages import MAX_SUBMITTED, LeasedRollouts, Submission
from swarm.rollout.plane import RolloutPlane
from swarm.signing import SigningKey
from swarm.types import Address, NodeId, Score
from swarm.wire import compress, encode
from tests.builders import KEY, OTHER_KEY, ListJournal, new_plane, rollout, v

ALICE, BOB = KEY.node_id, OTHER_KEY.node_id

WAIT_S = 20.0
"""Questions may be held open this long; no test waits for it."""


class Learner:
    """A RolloutService behind a server on loopback, and clients for it."""

    def __init__(self) -> None:
        self.key = SigningKey.generate()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.gone: list[NodeId] = []
        self.sessions = ServerSessions(self.key, b"")
        self.plane: RolloutPlane = new_plane(newest=None)
        self.unscorable: set[str] = set()
        self.journal = ListJournal()
        self.service = RolloutService(
            key=self.key,
            sessions=self.sessions,
            emit=lambda kind, **fields: self.events.append((kind, fields)),
            on_installed=lambda node, version: None,
            on_gone=self.gone.append,
        )
        self.peers: dict[NodeId, PeerClient] = {}

    def client(self, node: NodeId, *, named: NodeId | None = None) -> RolloutClient:
        """Calls signed by `node`, which name it, or `named` in its place."""
        return RolloutClient(self.peers[node], named or node, self.key.public_bytes)

    async def open(self) -> None:
        self.service.open(self.plane, self._score, self.journal)
        await self.service.published(v(0))

    async def knows(self, node: NodeId) -> None:
        """Until a request of `node` has arrived."""
        while node not in self.service.samplers:  # noqa: ASYNC110 - the service has no event for a test to wait on
            await asyncio.sleep(0)

    async def _score(self, wanted: Sequence[ScoreWanted]) -> list[Score]:
        if self.unscorable & {asked.group_id for asked in wanted}:
            raise ScoringFailed("no")
        return [Score(reward=0.5, exact=False) for _ in wanted]


@pytest.fixture
async def learner() -> AsyncIterator[Learner]:
    learner = Learner()
    app = web.Application(middlewares=[guard])
    app.add_routes([session_route(learner.sessions), *learner.service.routes()])
    runner = web.AppRunner(app, handler_cancellation=True, auto_decompress=False, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = Address(host="127.0.0.1", port=runner.addresses[0][1])
    async with (
        PeerClient(address, key=KEY, server=learner.key.node_id) as learner.peers[ALICE],
        PeerClient(address, key=OTHER_KEY, server=learner.key.node_id) as learner.peers[BOB],
    ):
        yield learner
    await runner.cleanup()


async def leases_for(learner: Learner, node: NodeId, capacity: int) -> list[SealedLease]:
    given = await learner.client(node).ask(v(0), capacity, WAIT_S, holding=())
    assert isinstance(given, list), given
    return given


def answers_to(given: list[SealedLease]) -> list[Answer]:
    return [
        Answer(
            lease=one,
            rollouts=tuple(rollout(group_id=one.lease.group_id, index=s.index) for s in one.lease.samples),
        )
        for one in given
    ]


async def test_a_sampler_is_told_that_the_learner_is_starting(learner: Learner) -> None:
    assert (await learner.client(ALICE).ask(v(0), 1, WAIT_S, holding=()))[0] == "starting"


async def test_a_sampler_that_holds_a_version_of_another_life_of_the_learner_has_to_wait(learner: Learner) -> None:
    """The learner came back elsewhere: it has published nothing yet, or has still to go past what others hold."""
    learner.service.open(learner.plane, learner._score, learner.journal)
    held = v(557)
    assert (await learner.client(ALICE).ask(held, 1, WAIT_S, holding=()))[0] == "starting"
    assert (await learner.client(ALICE).beat(held, 0, 0.0)).newest is None
    await learner.service.published(v(0, incarnation=1))
    assert (await learner.client(ALICE).ask(held, 1, WAIT_S, holding=()))[0] == "behind"
    ahead = v(3, incarnation=2)
    assert (await learner.client(ALICE).ask(ahead, 1, WAIT_S, holding=()))[0] == "starting"
    assert (await learner.client(ALICE).beat(ahead, 0, 0.0)).newest == v(0, incarnation=1)


async def test_leases_answered_make_a_batch(learner: Learner) -> None:
    await learner.open()
    verdicts = await learner.client(ALICE).submit(answers_to(await leases_for(learner, ALICE, 4)))
    assert [one.verdict for one in verdicts] == ["accepted"] * 4
    batch = await learner.service.next_batch()
    assert [group.group_id for group in batch] == ["t0", "t1"]


async def test_a_question_held_open_is_answered_when_there_is_work(learner: Learner) -> None:
    await learner.open()
    given = await leases_for(learner, ALICE, 4096)
    waiting = asyncio.create_task(leases_for(learner, BOB, 1))
    await learner.knows(BOB)
    await learner.client(ALICE).release(given[0].samples(), forget=False)
    (one,) = await waiting
    assert one.lease.group_id == given[0].lease.group_id


async def test_a_question_held_open_ends_when_its_sampler_leaves(learner: Learner) -> None:
    await learner.open()
    await leases_for(learner, ALICE, 4096)
    waiting = asyncio.create_task(learner.client(BOB).ask(v(0), 1, WAIT_S, holding=()))
    await learner.knows(BOB)
    await learner.client(BOB).release((), forget=True)
    assert (await waiting)[0] == "paced"
    assert BOB not in learner.service.samplers
    assert learner.gone == [BOB]


async def test_what_a_sampler_does_not_name_is_leased_again(learner: Learner) -> None:
    """The answer with the first leases was lost: the node asks again and holds nothing."""
    await learner.open()
    lost = await leases_for(learner, ALICE, 4096)
    again = await leases_for(learner, ALICE, 4096)
    assert [one.lease for one in again] == [one.lease for one in lost]


async def test_a_reward_that_fails_drops_its_group_alone(learner: Learner) -> None:
    await learner.open()
    learner.unscorable = {"t1"}
    await learner.client(ALICE).submit(answers_to(await leases_for(learner, ALICE, 6)))
    batch = await learner.service.next_batch()
    assert [group.group_id for group in batch] == ["t0", "t2"]
    assert learner.service.tally.dropped == {"reward_failed": 2}


async def test_a_fault_behind_scoring_does_not_stay_hidden(learner: Learner) -> None:
    async def full_disk(wanted: Sequence[ScoreWanted]) -> list[Score]:
        raise OSError("no space left on device")

    learner.service.open(learner.plane, full_disk, learner.journal)
    await learner.service.published(v(0))
    watch = asyncio.create_task(learner.service.watch_silence())
    await learner.client(ALICE).submit(answers_to(await leases_for(learner, ALICE, 1)))
    with pytest.raises(OSError, match="no space"):
        await watch


async def test_more_rollouts_than_a_submission_may_hold_are_refused(learner: Learner) -> None:
    await learner.open()
    (one,) = await leases_for(learner, ALICE, 1)
    item = LeasedRollouts(lease=one.token, rollouts=(rollout(group_id="t0", index=0),) * (MAX_SUBMITTED // 2 + 1))
    body = compress(encode(Submission(node=ALICE, items=(item, item))))
    with pytest.raises(Exception, match=f"more than {MAX_SUBMITTED}") as refused:
        await learner.peers[ALICE].post("/v1/rollouts", body, cap_bytes=1 << 20, timeout_s=10.0)
    assert not isinstance(refused.value, TooLarge)  # the server refused, not our own cap


async def test_malformed_rollouts_make_one_event_a_submission(learner: Learner) -> None:
    await learner.open()
    (one,) = await leases_for(learner, ALICE, 2)
    bad = Answer(lease=one, rollouts=tuple(rollout(group_id="t9", index=i) for i in range(50)))
    verdicts = await learner.client(ALICE).submit([bad])
    assert {answer.verdict for answer in verdicts} == {"malformed"}
    told = [fields for kind, fields in learner.events if kind == "rollouts_malformed"]
    assert [fields["rollouts"] for fields in told] == [50]


async def test_a_version_that_was_never_published_gets_no_leases(learner: Learner) -> None:
    """It may be of a life that a restored learner has still to hear of: the sampler waits."""
    await learner.open()
    assert (await learner.client(ALICE).ask(v(7), 1, WAIT_S, holding=()))[0] == "starting"
    assert learner.service.samplers[ALICE].installed is None


async def test_beats_tell_what_is_newest_and_when_it_is_over(learner: Learner) -> None:
    await learner.open()
    first = await learner.client(ALICE).beat(None, 0, 0.0)
    assert (first.newest, first.finished) == (v(0), False)
    await learner.service.end("finished")
    assert (await learner.client(ALICE).beat(v(0), 0, 0.0)).finished
    assert (await learner.client(ALICE).ask(v(0), 1, WAIT_S, holding=()))[0] == "finished"


async def test_a_node_speaks_for_itself_alone(learner: Learner) -> None:
    await learner.open()
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
    await learner.open()
    stranger = learner.peers[BOB]
    stranger._signs_for = None
    client = RolloutClient(stranger, BOB, learner.key.public_bytes)
    for call in (
        client.ask(v(0), 1, WAIT_S, holding=()),
        client.beat(v(0), 0, 0.0),
        client.release((), forget=True),
        stranger.post("/v1/rollouts", b"", cap_bytes=1000, timeout_s=5.0),
    ):
        with pytest.raises(Unauthorized, match="sign this request"):
            await call
    assert learner.service.samplers == {}


async def test_rollouts_are_not_judged_before_a_version_is_known(learner: Learner) -> None:
    """A resumed learner knows what it leased, and not yet what it published: any verdict would throw the work away."""
    await learner.open()
    leases = await leases_for(learner, ALICE, 2)
    learner.service.open(new_plane(newest=None), learner._score, learner.journal)
    with pytest.raises(Busy, match="starting"):
        await learner.client(ALICE).submit(answers_to(leases))


async def test_who_was_there_in_a_former_life_is_waited_for_at_the_end(learner: Learner) -> None:
    learner.service._absent = {ALICE}
    await learner.open()
    await learner.service.end("finished")
    farewell = asyncio.create_task(learner.service.farewell(0.0))
    await learner.client(BOB).release((), forget=True)
    assert not farewell.done()
    assert (await learner.client(ALICE).beat(v(0), 0, 0.0)).finished
    await learner.client(ALICE).release((), forget=True)
    await asyncio.wait_for(farewell, WAIT_S)


async def test_what_a_lower_bound_makes_late_is_counted_as_that(learner: Learner) -> None:
    """Of 8 samples leased under S = 2, two batches' worth: 6 answered, 4 trained on; then S becomes 0."""
    await learner.open()
    answers = answers_to(await leases_for(learner, ALICE, 8))
    await learner.client(ALICE).submit(answers[:3])
    await learner.service.next_batch()
    await learner.service.set_bound(0)
    assert learner.service.status()["rollouts_dropped"] == {"bound_lowered": 2}
    (verdict, _) = await learner.client(ALICE).submit(answers[3:])
    assert verdict.verdict == "stale"
    assert learner.service.status()["verdicts"] == {"accepted": 6, "bound_lowered": 2}
