"""Who is audited how much, and how soon there is no doubt; honest samplers are never caught, whatever their class."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import numpy as np
import pytest
from numpy.typing import NDArray

from swarm.audit.auditor import (
    ANY,
    CUT,
    FIRST_ROLLOUTS,
    HALF,
    MIN_ROLLOUTS,
    NEW_ROLLOUTS,
    Auditor,
    Caught,
    ErrorLimits,
    Finding,
)
from swarm.types import NodeId
from tests.builders import ALICE, BOB

TOKENS = 16
EXACT = ErrorLimits(bias=0.0005, size=0.001, margin=0.0005, sum=1.0)
CLASSES = {"exact": EXACT, "half": HALF}
EACH = [EXACT, HALF, ANY]
Lie = Callable[[int, np.random.Generator], Finding]


def new_auditor(share: float = 0.05) -> Auditor:
    return Auditor(CLASSES, secret=b"s", share=share)


def floats(values: object) -> NDArray[np.float32]:
    return np.asarray(values, np.float32)


def finding(*, errors: object = 0.0, margins: object = 0.0, side: int = 0) -> Finding:
    both = (np.broadcast_to(floats(one), TOKENS) for one in (errors, margins))
    return Finding(errors=next(both), margins=next(both), side=side)


def until_caught(lie: Lie, limits: ErrorLimits, most: int, seed: int = 0) -> Caught | None:
    auditor, draw = new_auditor(), np.random.default_rng(seed)
    for number in range(most):
        if (caught := auditor.add(ALICE, limits, lie(number, draw))) is not None:
            return caught
    return None


def rollouts_for(mean: float, limit: float, limits: ErrorLimits) -> int:
    """The formula of the docstring, in whole rollouts."""
    return max(MIN_ROLLOUTS, ceil(limits.sum / (mean - limit) / TOKENS))


@pytest.mark.parametrize("limits", EACH)
@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("times", [2, 4])
def test_a_shift_of_log_probs_is_caught_as_soon_as_the_formula_says(
    limits: ErrorLimits, direction: int, times: int
) -> None:
    shift = times * limits.bias
    caught = until_caught(lambda n, draw: finding(errors=direction * shift), limits, 2000)
    assert caught is not None
    assert caught.detector == "log-probs"
    assert caught.off == pytest.approx(shift)
    assert abs(caught.audited - rollouts_for(shift, limits.bias, limits)) <= 1, "but for rounding"
    assert f"off by {'-' if direction < 0 else ''}" in caught.what


@pytest.mark.parametrize("limits", EACH)
def test_a_shift_that_cancels_out_is_caught_by_the_rewards_or_the_halves(limits: ErrorLimits) -> None:
    shift = 3 * limits.bias
    halves = np.repeat([shift, -shift], TOKENS // 2)
    by_side = until_caught(lambda n, draw: finding(errors=shift * (-1) ** n, side=(-1) ** n), limits, 2000)
    by_half = until_caught(lambda n, draw: finding(errors=halves), limits, 2000)
    assert by_side is not None
    assert by_half is not None
    assert "answers" in by_side.name
    assert "half" in by_half.name
    assert by_side.audited <= 2 * rollouts_for(shift, limits.bias, limits)


@pytest.mark.parametrize("limits", [EXACT, HALF])
def test_noise_that_cancels_out_is_caught_by_its_size(limits: ErrorLimits) -> None:
    alternating = 2 * limits.size * (-1.0) ** np.arange(TOKENS)
    caught = until_caught(lambda n, draw: finding(errors=alternating), limits, 2000)
    assert caught is not None
    assert caught.name == "size"


@pytest.mark.parametrize("limits", EACH)
@pytest.mark.parametrize("seed", range(2))
def test_tokens_that_were_not_drawn_are_caught(limits: ErrorLimits, seed: int) -> None:
    """A third of the tokens is replaced by others, which miss by two nats in the mean."""

    def lie(number: int, draw: np.random.Generator) -> Finding:
        return finding(margins=draw.exponential(2.0, TOKENS) * (draw.random(TOKENS) < 0.33))

    caught = until_caught(lie, limits, 64, seed)
    assert caught is not None
    assert caught.detector == "draws"


@pytest.mark.parametrize("limits", EACH)
def test_honest_samplers_are_never_caught(limits: ErrorLimits) -> None:
    """Twenty thousand rollouts at a fifth of every limit, with errors that vary as much as those of real engines."""
    auditor, draw = new_auditor(), np.random.default_rng(0)
    spread = limits.size / 5 / 0.8  # The mean magnitude of a normal number is 0.8 of its spread
    for number in range(20_000):
        errors = draw.normal(limits.bias / 5, spread, TOKENS)
        margins = draw.exponential(limits.margin / 5, TOKENS)
        assert auditor.add(ALICE, limits, finding(errors=errors, margins=margins, side=(-1) ** number)) is None


@pytest.mark.parametrize("limits", EACH)
def test_what_stays_below_the_limits_is_never_caught(limits: ErrorLimits) -> None:
    below = finding(errors=0.99 * min(limits.bias, limits.size), margins=0.99 * limits.margin, side=1)
    assert until_caught(lambda n, draw: below, limits, 10_000) is None


def test_no_rollout_convicts_alone_however_long_and_wrong_it_is() -> None:
    auditor = new_auditor()
    wrong = Finding(errors=floats([9.0] * 10_000), margins=floats([9.0] * 10_000))
    assert [auditor.add(ALICE, ANY, wrong) is None for _ in range(MIN_ROLLOUTS)] == [True] * (MIN_ROLLOUTS - 1) + [
        False
    ]


def test_one_record_is_kept_of_a_node_whatever_it_calls_its_engine() -> None:
    auditor = new_auditor()
    for _ in range(3):
        assert auditor.add(ALICE, ANY, finding(errors=-CUT)) is None
    assert auditor.add(ALICE, HALF, finding(errors=-CUT)) is not None
    assert auditor.add(ALICE, ANY, finding(errors=-CUT)) is None, "a verdict is given once"
    assert auditor.forget(ALICE)
    assert not auditor.forget(ALICE)
    assert auditor.add(ALICE, ANY, finding(errors=-CUT)) is None


def test_all_of_an_unmeasured_class_is_audited_and_of_others_newcomers_suspects_and_a_share() -> None:
    auditor = new_auditor()
    assert auditor.share(ALICE, "mlx") == 1.0
    assert [auditor.share(BOB, "half", chosen=chosen) for chosen in (0, 63, 64)] == [1.0, 1.0, 0.05]
    assert [auditor.share(BOB, "half", chosen=chosen, has_time=False) for chosen in (0, 7, 8)] == [1.0, 1.0, 0.05]
    for _ in range(NEW_ROLLOUTS):
        auditor.add(ALICE, EXACT, finding())
    assert [auditor.share(ALICE, name) for name in ("exact", "half", "mlx")] == [0.05, 0.05, 1.0]
    for _ in range(2):
        auditor.add(ALICE, EXACT, finding(margins=CUT))
    assert auditor.share(ALICE, "exact") == 1.0
    assert FIRST_ROLLOUTS >= MIN_ROLLOUTS, "who lies in all of its first rollouts is caught by them"


def test_of_more_samplers_than_are_remembered_the_oldest_is_a_newcomer_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.audit.auditor.MAX_NODES", 2)
    auditor = new_auditor()
    for node in (ALICE, BOB, NodeId("carol")):
        for _ in range(NEW_ROLLOUTS):
            auditor.add(node, EXACT, finding())
    assert [auditor.share(node, "exact") for node in (ALICE, BOB)] == [1.0, 0.05]


def test_weights_that_are_no_numbers_say_nothing_of_samplers() -> None:
    unknown = finding(errors=np.nan, margins=np.nan)
    assert until_caught(lambda n, draw: unknown, EXACT, 100) is None


def test_which_rollouts_are_chosen_follows_from_the_secret_alone() -> None:
    names = [f"t{number}/0" for number in range(4000)]
    first, again, other = (Auditor({}, secret=secret, share=0.05) for secret in (b"1", b"1", b"2"))
    drawn = [first.drawn(name) for name in names]
    assert drawn == [again.drawn(name) for name in names]
    assert drawn != [other.drawn(name) for name in names]
    assert 0.03 < sum(one < 0.05 for one in drawn) / len(drawn) < 0.07
