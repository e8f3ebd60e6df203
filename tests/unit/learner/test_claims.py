"""What is usual at an age, and who is beyond it."""

from __future__ import annotations

import math

import pytest

from swarm.learner.claims import MIN_LIMIT, TIMES_USUAL, Claim, Claims


def step(claims: Claims, *, staleness: int = 2, **distances: float) -> dict[str, int]:
    """One learner step in which each named sampler has four rollouts of that distance."""
    return claims.stepped([Claim(name, staleness, one) for name, one in distances.items() for _ in range(4)])


def test_before_anything_is_known_a_fixed_limit_counts() -> None:
    claims = Claims()
    assert claims.limit(0) == claims.limit(7) == MIN_LIMIT
    assert step(claims, a=0.3, b=MIN_LIMIT, c=MIN_LIMIT + 0.01) == {"c": 4}


def test_old_data_are_further_off_and_are_believed_all_the_same() -> None:
    claims = Claims()
    for _ in range(30):
        assert not step(claims, staleness=8, a=0.6, b=0.7, c=0.8)
        assert not step(claims, staleness=1, a=0.1, b=0.2, c=0.1)
    assert claims.limit(8) == pytest.approx(TIMES_USUAL * 0.7)
    assert claims.limit(1) == MIN_LIMIT
    assert claims.limit(6) == claims.limit(8)
    assert step(claims, staleness=8, a=4.0, b=4.3, c=0.7) == {"b": 4}


@pytest.mark.parametrize("liars", [1, 2])
def test_half_of_the_samplers_do_not_move_what_is_usual(liars: int) -> None:
    claims, names = Claims(), "zyab"
    for _ in range(50):
        withheld = claims.stepped([Claim(one, 2, 20.0 if one in names[:liars] else 0.4) for one in names])
        assert set(withheld) == set(names[:liars])
    assert claims.limit(2) == pytest.approx(TIMES_USUAL * 0.4)


def test_a_sampler_with_most_of_the_rollouts_is_one_sampler() -> None:
    claims = Claims()
    many = [Claim("z", 2, 20.0)] * 400
    for _ in range(50):
        assert claims.stepped([*many, *(Claim(name, 2, 0.3) for name in "abc")]) == {"z": 400}
    assert claims.limit(2) == pytest.approx(TIMES_USUAL * 0.3)


def test_what_is_no_number_is_neither_withheld_nor_usual() -> None:
    """The weights are to blame for it."""
    claims = Claims()
    assert not step(claims, a=math.nan, b=0.4)
    assert claims.state.usual == ((2, 0.4),)
    assert step(claims, a=math.inf, b=0.4) == {"a": 4}
