"""Who is audited how much, and how soon evidence is beyond doubt; honest samplers are never caught."""

from __future__ import annotations

from random import Random

import pytest

from swarm.audit.auditor import LIMIT, NEW_ROLLOUTS, PROVEN_ROLLOUTS, Auditor, Calibration, Caught, Finding
from swarm.types import NodeId
from tests.builders import ALICE, BOB

TOKENS = 16
FLOAT32 = Calibration(margin=1e-3, missed=1e-4, distance=0.01)
HALF = Calibration(margin=0.1, missed=2e-3, distance=0.05)
CLASSES = {"float32": FLOAT32, "half": HALF}


def new_auditor(share: float = 0.05) -> Auditor:
    return Auditor(CLASSES, secret=b"s", share=share)


def finding(random: Random, number: int, *, missed: float, off: float) -> Finding:
    """Of a rollout of which each token is missed with one probability, and all log-probs are off with another."""
    count = sum(random.random() < missed for _ in range(TOKENS))
    return Finding(
        rollout_id=f"t{number}/0", tokens=TOKENS, missed=count, distance=9.0 if random.random() < off else 0.0
    )


def until_caught(auditor: Auditor, *, missed: float, off: float, most: int, seed: int = 0) -> Caught | None:
    random = Random(seed)
    for number in range(most):
        if (caught := auditor.note(ALICE, "float32", finding(random, number, missed=missed, off=off))) is not None:
            return caught
    return None


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("missed", "most"), [(0.6, 2), (0.2, 4), (0.06, 16), (0.03, 40)])
def test_draws_of_another_policy_are_caught_within_a_thousand_tokens(seed: int, missed: float, most: int) -> None:
    caught = until_caught(new_auditor(), missed=missed, off=0.0, most=64, seed=seed)
    assert caught is not None
    assert caught.detector == "draws"
    assert caught.audited <= most
    assert caught.audited * TOKENS <= 1000


@pytest.mark.parametrize("seed", range(20))
def test_invented_log_probs_are_caught_within_16_rollouts(seed: int) -> None:
    caught = until_caught(new_auditor(), missed=0.0, off=0.9, most=16, seed=seed)
    assert caught is not None
    assert caught.detector == "log-probs"
    assert caught.rollouts[-1] == f"t{caught.audited - 1}/0"


@pytest.mark.parametrize("name", ["float32", "half"])
def test_honest_samplers_are_not_caught(name: str) -> None:
    """A hundred thousand rollouts that miss and are off as often as the calibration allows. The highest sums that come
    up by chance are far below the limit."""
    random, auditor, known = Random(1), new_auditor(), CLASSES[name]
    highest = 0.0
    for number in range(100_000):
        found = finding(random, number, missed=known.missed, off=1e-3)
        assert auditor.note(ALICE, name, found) is None
        highest = max(highest, *auditor._standings[ALICE, name].scores.values())
    assert 0.3 * LIMIT < highest < 0.9 * LIMIT


COARSE = Calibration(margin=0.3, missed=0.02, distance=0.3)
"""As bfloat16: what honest samplers miss depends on the model."""

CAROL, DAN = NodeId("carol"), NodeId("dan")


def beside(shares: dict[NodeId, float], rollouts: int, seed: int = 0) -> tuple[Auditor, dict[NodeId, int]]:
    """Samplers that miss these shares of tokens, audited in turn: who is caught after how many rollouts."""
    auditor, random = Auditor({"half": COARSE}, secret=b"s", share=0.05), Random(seed)
    caught: dict[NodeId, int] = {}
    for number in range(rollouts):
        auditor.settle()
        for node, share in shares.items():
            if auditor.note(node, "half", finding(random, number, missed=share, off=0.0)) is not None:
                caught[node] = number + 1
    return auditor, caught


@pytest.mark.parametrize("seed", range(5))
def test_where_others_miss_little_less_is_expected_of_all(seed: int) -> None:
    assert beside({ALICE: 0.029}, 200, seed)[1] == {}, "alone it may be of a class that misses as much"
    auditor, caught = beside({ALICE: 0.029, BOB: 1e-4, CAROL: 1e-4, DAN: 1e-4}, 200, seed)
    assert caught.keys() == {ALICE}
    assert auditor.expected_missed("half") < 0.005
    assert auditor.expected_missed("another") == COARSE.missed


@pytest.mark.parametrize("share", [0.004, 0.013, 0.02])
def test_where_all_miss_as_many_tokens_nobody_is_caught_but_who_misses_more(share: float) -> None:
    honest = {BOB: share, CAROL: share, DAN: 0.7 * share}
    assert beside(honest, 20_000)[1] == {}
    assert beside({ALICE: 0.09, **honest}, 2000)[1].keys() == {ALICE}


def test_a_minority_of_liars_makes_nobody_believe_that_all_miss_much() -> None:
    auditor = Auditor({"half": COARSE}, secret=b"s", share=0.05)
    for node, missed in ((ALICE, 12), (BOB, 0), (CAROL, 0)):
        auditor.note(node, "half", Finding(rollout_id="t0/0", tokens=500, missed=missed, distance=0.0))
    auditor.settle()
    assert auditor.expected_missed("half") < 0.01
    two = Auditor({"half": COARSE}, secret=b"s", share=0.05)
    for node in (BOB, CAROL):
        two.note(node, "half", Finding(rollout_id="t0/0", tokens=500, missed=0, distance=0.0))
    two.settle()
    assert two.expected_missed("half") == COARSE.missed, "of two the half may lie"


def test_of_a_class_that_was_never_measured_nobody_is_more_than_suspect() -> None:
    auditor = new_auditor()
    found = [auditor.note(ALICE, "mlx", finding(Random(n), n, missed=0.5, off=0.5)) for n in range(500)]
    (verdict,) = [one for one in found if one is not None]
    assert verdict.suspect
    assert auditor.share(ALICE, "mlx") == 0.05


def test_an_engine_that_rounds_draws_other_tokens_and_is_judged_by_its_log_probs_alone() -> None:
    auditor = new_auditor()
    for engine, missed, off, suspect in (
        ("mlx/int8/gpu", 0.5, 0.0, False),
        ("mlx/int8/gpu", 0.0, 0.5, True),
        ("mlx/bfloat16/gpu", 0.5, 0.0, True),
    ):
        node = NodeId(f"{engine} {off}")
        found = [auditor.note(node, engine, finding(Random(n), n, missed=missed, off=off)) for n in range(500)]
        assert any(one is not None and one.suspect for one in found) == suspect


def test_who_names_another_class_is_new_again_and_known_as_before_under_the_first() -> None:
    auditor, random = new_auditor(), Random(0)
    for number in range(NEW_ROLLOUTS):
        auditor.note(ALICE, "float32", finding(random, number, missed=0.0, off=0.0))
    assert [auditor.share(ALICE, name) for name in ("float32", "half", "mlx")] == [0.05, 1.0, 1.0]
    assert [auditor.share(BOB, "half", chosen=chosen) for chosen in (0, 63, 64)] == [1.0, 1.0, 0.05]
    assert [auditor.share(BOB, "half", chosen=chosen, has_time=False) for chosen in (0, 7, 8)] == [1.0, 1.0, 0.05]
    for number in range(9):
        auditor.note(ALICE, "mlx", finding(random, number, missed=1.0, off=1.0))
    assert until_caught(auditor, missed=1.0, off=0.0, most=9) is not None


def test_of_more_samplers_than_are_remembered_the_oldest_is_a_newcomer_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.audit.auditor.MAX_STANDINGS", 2)
    auditor, random = new_auditor(), Random(0)
    for node in (ALICE, BOB, NodeId("carol")):
        for number in range(NEW_ROLLOUTS):
            auditor.note(node, "float32", finding(random, number, missed=0.0, off=0.0))
    assert [auditor.share(node, "float32") for node in (ALICE, BOB)] == [1.0, 0.05]


def test_a_class_that_was_never_measured_may_be_as_coarse_as_bfloat16_is() -> None:
    auditor, random = new_auditor(), Random(3)
    for number in range(20_000):
        assert auditor.note(ALICE, "mlx", finding(random, number, missed=0.005, off=0.0)) is None


@pytest.mark.parametrize(("answered", "dropped", "most"), [(16, 16, 13), (0, 1, 13), (9, 3, 13)])
def test_who_leaves_many_leases_unanswered_is_caught_within_a_few_steps(answered: int, dropped: int, most: int) -> None:
    auditor = new_auditor()
    found = [auditor.note_leases(ALICE, answered=answered, dropped=dropped) for _ in range(most)]
    (verdict,) = [one for one in found if one is not None]
    assert (verdict.detector, verdict.rollouts) == ("drops", ())


def test_who_leaves_now_and_then_or_drops_a_few_is_not() -> None:
    auditor, random = new_auditor(), Random(0)
    for _ in range(20_000):
        leaves = random.random() < 0.1
        assert auditor.note_leases(ALICE, answered=30, dropped=32 if leaves else 2) is None
        assert auditor.note_leases(ALICE, answered=0, dropped=0) is None


def test_newcomers_the_suspicious_are_audited_in_full_and_the_proven_less() -> None:
    auditor, random = new_auditor(), Random(0)
    for number in range(PROVEN_ROLLOUTS):
        assert auditor.share(ALICE, "float32") == (1.0 if number < NEW_ROLLOUTS else 0.05)
        auditor.note(ALICE, "float32", finding(random, number, missed=0.0, off=0.0))
    assert auditor.share(ALICE, "float32") == pytest.approx(0.02)
    auditor.note(ALICE, "float32", finding(random, 0, missed=0.0, off=1.0))
    assert auditor.share(ALICE, "float32") == 1.0
    assert until_caught(auditor, missed=1.0, off=0.0, most=9) is not None
    assert auditor.note(ALICE, "float32", finding(random, 0, missed=1.0, off=1.0)) is None, "a second verdict"
    auditor.forget(ALICE)
    assert until_caught(auditor, missed=1.0, off=0.0, most=9) is not None


def test_which_rollouts_are_chosen_follows_from_the_secret_alone() -> None:
    auditors = [Auditor(CLASSES, secret=secret, share=0.05) for secret in (b"s", b"s", b"t")]
    for auditor in auditors:
        for number in range(NEW_ROLLOUTS):
            auditor.note(BOB, "float32", finding(Random(0), number, missed=0.0, off=0.0))
    names = [f"t{number}/3" for number in range(20_000)]
    share = auditors[0].share(BOB, "float32")
    one, same, other = ([auditor.drawn(name) < share for name in names] for auditor in auditors)
    assert one == same != other
    assert 900 < sum(one) < 1100
    assert all(auditors[0].drawn(name) < auditors[0].share(ALICE, "float32") for name in names[:100])
