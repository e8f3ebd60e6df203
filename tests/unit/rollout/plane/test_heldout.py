"""What a round of held-out prompts shows."""

from __future__ import annotations

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
