"""Nodes on standby, and a run that is paused: what is refused, what nodes are told, and what is still taken."""

from __future__ import annotations

import asyncio
import math

import pytest

from swarm.errors import ProtocolError
from swarm.rollout.messages import Beat, Did, Offer
from swarm.rollout.plane.plane import PAUSED
from swarm.rollout.plane.rules import Pacing
from swarm.sampler.client import samples_of
from swarm.wire import CONTROL_BODY_BYTES, decode, encode
from tests.builders import ask, new_plane, prompt, refusal, v
from tests.learner_face import ALICE, BOB, WAIT_S, Learner, answers_to, leases_for

WHY = "the active samplers suffice"


def test_held_out_prompts_are_for_standbys_where_nobody_else_is_there() -> None:
    plane = new_plane()
    plane.beat(BOB, now=0.0)
    plane.evaluate(v(0), [prompt(0), prompt(1)])
    plane.set_standby({ALICE: WHY})
    assert refusal(plane, ALICE, 0, 4) == "standby"
    plane.leave(BOB)
    granted = ask(plane, ALICE, 0, 4)
    assert [(one.purpose, len(one.samples)) for one in granted] == [("eval", 1), ("eval", 1)]
    assert refusal(plane, ALICE, 0, 4) == "standby"


@pytest.mark.parametrize("pauses", [False, True])
def test_a_pause_is_not_taken_for_a_long_step(pauses: bool) -> None:
    """Or groups would be taken for young that take many steps."""
    pacing = Pacing(batch_groups=1, adaptive=True)
    for now in (0.0, 10.0, 20.0, 3620.0):
        if pauses and now == 3620.0:
            pacing.interrupted()
        assert pacing.is_whole(1, 0, now=now)
        pacing.taken()
    assert pacing.may_claim(0, 0, answer_s=100.0) is not pauses


async def test_questions_are_held_while_a_run_is_paused_and_answered_when_it_goes_on(learner: Learner) -> None:
    answers = answers_to(await leases_for(learner, ALICE, 8))
    learner.service.pause(True)
    waiting = asyncio.create_task(leases_for(learner, BOB, 1))
    await learner.knows(BOB)
    batch = asyncio.create_task(learner.service.next_batch())
    await learner.client(ALICE).submit(answers)
    assert (await learner.client(BOB).beat(v(0), 0, 0.0)).standby == PAUSED
    assert not waiting.done()
    assert not batch.done()
    assert learner.service.taken == 0
    learner.service.pause(False)
    assert len(await waiting) == 1
    await asyncio.wait_for(batch, WAIT_S)
    assert learner.service.taken == 1


async def test_the_end_of_a_pause_alone_has_held_questions_answered_at_once(learner: Learner) -> None:
    learner.service.pause(True)
    waiting = asyncio.create_task(leases_for(learner, BOB, 1))
    await learner.knows(BOB)
    learner.service.pause(False)
    assert len(await asyncio.wait_for(waiting, WAIT_S / 4)) == 1


async def test_a_sampler_that_is_barred_hears_why_and_once_let_in_is_asked_again(learner: Learner) -> None:
    learner.service.bar(ALICE, "refused by this run's owner")
    assert learner.service.barred == {ALICE: "refused by this run's owner"}
    waiting = asyncio.create_task(leases_for(learner, ALICE, 1))
    await learner.knows(ALICE)
    beat = await learner.client(ALICE).beat(v(0), 0, 0.0)
    assert (beat.standby, waiting.done()) == ("refused by this run's owner", False)
    learner.service.unbar(ALICE)
    assert len(await asyncio.wait_for(waiting, WAIT_S / 4)) == 1


async def test_a_sampler_that_is_barred_is_gone_for_who_provides_and_back_once_let_in(starting: Learner) -> None:
    """Or its rate would count as enough, and the others stay on standby while nobody draws."""
    offer = Offer(device_class="T4", samples_at_once=8, cost_per_hour=0.2)
    await starting.client(BOB).beat(v(0), 0, 0.0, offer=offer)
    starting.plane.bar(BOB, "caught in an earlier life")
    await starting.open()
    client = starting.client(ALICE)
    await client.beat(v(0), 0, 0.0, offer=offer)
    starting.service.bar(ALICE, "refused by this run's owner")
    assert starting.gone_nodes == [BOB, ALICE]
    starting.offers.clear()
    await client.beat(v(0), 0, 0.0, offer=offer)
    assert starting.offers == {}
    assert [row["barred"] for row in starting.service.status()["samplers"]] == [True, True]
    starting.service.unbar(ALICE)
    await client.beat(v(0), 0, 0.0, offer=offer)
    assert starting.offers == {ALICE: offer}


async def test_a_question_of_a_standby_is_held_and_answered_once_it_is_active(learner: Learner) -> None:
    learner.service.set_standby({ALICE: WHY})
    waiting = asyncio.create_task(leases_for(learner, ALICE, 1))
    await learner.knows(ALICE)
    did: tuple[Did, ...] = (("draw", 2.0, 1.5), ("wait", 0.5, 0.5))
    beat = await learner.client(ALICE).beat(v(0), 0, 0.0, did=did)
    assert (beat.standby, waiting.done()) == (WHY, False)
    assert learner.did == [(ALICE, did, WHY)]
    learner.service.set_standby({})
    assert len(await waiting) == 1
    assert (await learner.client(ALICE).beat(v(0), 0, 0.0)).standby == ""
    learner.service.set_standby({ALICE: "x" * 5000})
    refused = await learner.client(ALICE).ask(v(0), 1, 0.0, holding=())
    assert not isinstance(refused, list)
    assert (refused.reason, refused.detail) == ("standby", "x" * 200), "cut to what travels"


async def test_the_watch_hears_of_offers_lengths_and_farewells(learner: Learner) -> None:
    node, client = ALICE, learner.client(ALICE)
    offer = Offer(device_class="T4", samples_at_once=8, cost_per_hour=0.2)
    await client.beat(v(0), 0, 0.0, offer=offer)
    assert learner.offers == {node: offer}
    answers = answers_to(await leases_for(learner, node, 2))
    await client.submit(answers)
    assert learner.lengths == [answer.rollout.length for answer in answers]
    shown = learner.service.status()["samplers"][0]
    assert (shown["device_class"], shown["cost_per_hour"], shown["standby"]) == ("T4", 0.2, "")
    await client.release((), forget=True)
    assert learner.gone_nodes == [node]


async def test_free_places_of_an_engine_are_not_asked_ahead(learner: Learner) -> None:
    """Of 4 groups that fit, the last 2 are only for who can begin at once."""
    client = learner.client(ALICE)
    given = await leases_for(learner, ALICE, 8)
    holding = samples_of(given)
    refused = await client.ask(v(0), 2, 0.0, holding=holding)
    assert not isinstance(refused, list)
    more = await client.ask(v(0), 2, WAIT_S, holding=holding, at_once=2)
    assert isinstance(more, list)
    assert sum(len(one.samples) for one in more) == 2


@pytest.mark.parametrize(
    "offer",
    [
        {"cost_per_hour": -1.0},
        {"cost_per_hour": math.nan},
        {"traffic_cost_per_gb": 2e6},
        {"full_rollouts_per_s": math.nan},
        {"samples_at_once": 0},
        {"device_class": "x" * 65},
    ],
)
def test_an_offer_that_makes_no_sense_is_refused(offer: dict[str, object]) -> None:
    beat = Beat(node=ALICE, installed=None, samples=0, offer=Offer(**offer))  # type: ignore[arg-type]
    with pytest.raises(ProtocolError):
        decode(encode(beat), Beat, cap_bytes=CONTROL_BODY_BYTES)
