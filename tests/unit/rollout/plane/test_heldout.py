"""What a round of held-out prompts shows."""

from __future__ import annotations

from itertools import combinations
from math import comb

import pytest

from swarm.rollout.plane.heldout import held_out_figures
from swarm.types import Score


def row(right: int, samples: int, reward: float = 0.5) -> list[Score]:
    return [Score(reward=reward, exact=i < right) for i in range(samples)]


@pytest.mark.parametrize(
    ("right", "samples", "pass_at_1", "pass_at_k"),
    [([1, 0, 1, 1], 1, 0.75, 0.75), ([4, 0, 1], 4, 5 / 12, 2 / 3), ([0, 0], 8, 0.0, 0.0), ([8], 8, 1.0, 1.0)],
)
def test_one_of_k_and_any_of_k(right: list[int], samples: int, pass_at_1: float, pass_at_k: float) -> None:
    figures = held_out_figures([row(count, samples) for count in right])
    assert figures == {
        "exact_match": pytest.approx(pass_at_1),
        "pass_at_1": pytest.approx(pass_at_1),
        "pass_at_k": pytest.approx(pass_at_k),
        "reward": 0.5,
        "samples": samples,
    }


@pytest.mark.parametrize("right", range(6))
def test_both_are_the_unbiased_estimator_over_all_choices(right: int) -> None:
    """arXiv 2107.03374, equation 1: 1 - C(n - c, k) / C(n, k), with n = 5, is what choosing k of n comes to."""
    scores = row(right, 5)
    figures = held_out_figures([scores])
    for name, k in (("pass_at_1", 1), ("pass_at_k", 5)):
        chosen = [any(one.exact for one in choice) for choice in combinations(scores, k)]
        assert figures[name] == pytest.approx(sum(chosen) / len(chosen))
        assert figures[name] == pytest.approx(1 - comb(5 - right, k) / comb(5, k))
