"""Which submissions are let in, on a clock of our own."""

from __future__ import annotations

import pytest

from swarm.net.sessions import SessionClaim
from swarm.rollout.intake import Body, Intake, IntakeLimits, Overloaded
from swarm.rollout.plane.nodes import MAX_NODES
from swarm.types import NodeId
from swarm.wire import ROLLOUT_BODY_BYTES

ALICE, BOB = NodeId("alice"), NodeId("bob")
FREE = IntakeLimits(
    bodies=8, body_bytes=8000, bodies_of_session=2, session_share=1.0, spare_rollouts=10, spare_per_s=2.0
)


def claim(node: NodeId = ALICE, *, session: int = 0, proven: bool = True) -> SessionClaim:
    return SessionClaim(session=f"{node}/{session}".encode(), node=node, proven=proven)


def offer(
    intake: Intake,
    of: SessionClaim,
    nbytes: int | None = 100,
    *,
    holds: bool = True,
    journal_bytes: int = 0,
    now: float = 0.0,
) -> Body | Overloaded:
    return intake.admit(of, nbytes, holds=holds, journal_bytes=journal_bytes, now=now)


def admitted(
    intake: Intake, of: SessionClaim, nbytes: int | None = 100, *, holds: bool = True, now: float = 0.0
) -> Body:
    body = offer(intake, of, nbytes, holds=holds, now=now)
    assert isinstance(body, Body), body
    return body


def refused(
    intake: Intake, of: SessionClaim, nbytes: int | None = 100, *, holds: bool = True, now: float = 0.0
) -> Overloaded:
    refusal = offer(intake, of, nbytes, holds=holds, now=now)
    assert isinstance(refusal, Overloaded), refusal
    return refusal


def test_a_session_has_two_bodies_in_hand() -> None:
    intake = Intake(FREE)
    first = admitted(intake, claim())
    admitted(intake, claim())
    refusal = refused(intake, claim())
    assert (refusal.reason, refusal.hold_s) == ("own_bodies", FREE.hold_s)
    admitted(intake, claim(BOB))
    intake.done(first)
    admitted(intake, claim())
    assert intake.refused == {"own_bodies": 1}


def test_a_session_has_a_share_of_the_bytes_in_hand() -> None:
    intake = Intake(IntakeLimits(bodies_of_session=9, body_bytes=8000, session_share=0.25))
    first = admitted(intake, claim(), 1500)
    assert refused(intake, claim(), 501).reason == "own_bodies"
    admitted(intake, claim(), 500)
    admitted(intake, claim(BOB), 2000)
    intake.done(first)
    admitted(intake, claim(), 1500)


def test_bodies_are_bounded_in_number_and_the_refused_wait_for_nothing() -> None:
    intake = Intake(FREE)
    bodies = [admitted(intake, claim(session=i)) for i in range(8)]
    refusal = refused(intake, claim(BOB))
    assert (refusal.reason, refusal.hold_s, refusal.retry_after_s) == ("bodies", 0.0, FREE.retry_after_s)
    intake.done(bodies[0])
    admitted(intake, claim(BOB))
    intake = Intake(FREE)
    large = admitted(intake, claim(), 7000)
    assert refused(intake, claim(BOB), 1001).reason == "bodies"
    admitted(intake, claim(BOB), 1000)
    intake.done(large)
    assert intake.counts() == {
        "submissions_in_hand": 1,
        "submission_bytes_in_hand": 1000,
        "submissions_refused": {"bodies": 1},
    }


def test_a_body_of_unknown_size_counts_as_the_largest() -> None:
    intake = Intake(IntakeLimits(session_share=1.0, body_bytes=2 * ROLLOUT_BODY_BYTES - 1))
    admitted(intake, claim(), None)
    assert refused(intake, claim(BOB), None).reason == "bodies"


def test_a_body_that_is_over_its_cap_is_left_to_its_reader() -> None:
    """It would never fit, and "overloaded" would be the wrong word for that."""
    admitted(Intake(IntakeLimits(session_share=1.0, body_bytes=ROLLOUT_BODY_BYTES)), claim(), 100 * ROLLOUT_BODY_BYTES)


def test_whoever_holds_no_lease_shares_a_quarter_of_the_places_and_of_the_bytes() -> None:
    intake = Intake(FREE)
    assert refused(intake, claim(), 2001, holds=False).reason == "bodies"
    for i in range(2):
        admitted(intake, claim(session=i), holds=False)
    assert refused(intake, claim(session=2), holds=False).reason == "bodies"
    for i in range(6):
        admitted(intake, claim(BOB, session=i), 1000)


def test_a_session_that_has_not_proven_itself_takes_nothing_of_the_node_that_it_names() -> None:
    """Whoever recorded Alice's OpenSession can open a session in her name, and sign nothing with it."""
    intake = Intake(FREE)
    for i in range(2):
        admitted(intake, claim(ALICE, session=i, proven=False))
    assert refused(intake, claim(ALICE, session=2, proven=False)).reason == "bodies"
    for _ in range(2):
        admitted(intake, claim(ALICE, session=3))


def test_what_nobody_asked_for_empties_a_nodes_own_purse() -> None:
    intake = Intake(FREE)
    intake.charge(ALICE, 9, now=0.0)
    intake.done(admitted(intake, claim()))
    intake.charge(ALICE, 5, now=0.0)
    refusal = refused(intake, claim())
    assert (refusal.reason, refusal.retry_after_s, refusal.hold_s) == ("useless", 2.5, FREE.hold_s)
    admitted(intake, claim(BOB))
    assert refused(intake, claim(), now=2.4).reason == "useless"
    admitted(intake, claim(), now=2.5)


def test_a_purse_fills_up_to_what_a_node_may_hand_in_for_nothing() -> None:
    intake = Intake(FREE)
    intake.charge(ALICE, 5, now=0.0)
    intake.charge(ALICE, 9, now=1000.0)
    intake.done(admitted(intake, claim(), now=1000.0))
    intake.charge(ALICE, 1, now=1000.0)
    assert refused(intake, claim(), now=1000.0).reason == "useless"


@pytest.mark.parametrize(("debt", "retry_after_s"), [(1, 1.0), (1_000_000, 60.0)], ids=["least", "most"])
def test_the_time_to_come_back_is_bounded(debt: int, retry_after_s: float) -> None:
    intake = Intake(FREE)
    intake.charge(ALICE, FREE.spare_rollouts - 1 + debt, now=0.0)
    assert refused(intake, claim()).retry_after_s == retry_after_s


def test_a_long_queue_for_the_journal_refuses_everybody() -> None:
    intake = Intake(IntakeLimits(journal_bytes=1000))
    refusal = offer(intake, claim(), journal_bytes=1001)
    assert isinstance(refusal, Overloaded)
    assert (refusal.reason, refusal.hold_s) == ("journal", 0.0)
    assert isinstance(offer(intake, claim(), journal_bytes=1000), Body)


def test_as_many_purses_are_remembered_as_there_are_nodes() -> None:
    intake = Intake(FREE)
    intake.charge(ALICE, 11, now=0.0)
    for i in range(MAX_NODES - 1):
        intake.charge(NodeId(f"n{i}"), 11, now=0.0)
    assert refused(intake, claim()).reason == "useless"
    intake.charge(BOB, 11, now=0.0)
    admitted(intake, claim())
