"""What `eval` says of answers."""

from __future__ import annotations

import pytest

from swarm.cli.eval import table
from swarm.lead.evaluate import Answered, figures, wilson
from swarm.types import Score


def _answers(*right: tuple[int, bool | None]) -> list[Answered]:
    return [
        Answered(prompt, tokens, not ok, None if ok is None else Score(reward=2.0 * ok, exact=ok))
        for tokens, (prompt, ok) in enumerate(right)
    ]


def test_a_prompt_counts_once_however_many_answers_it_has() -> None:
    found = figures(_answers((0, True), (0, False), (1, True), (1, True), (2, False), (2, None)), samples=2)
    assert (found["prompts"], found["accuracy"], found["pass_at_k"]) == (3, 0.5, 0.6667)
    assert (found["reward"], found["tokens_mean"], found["tokens_max"], found["cut_share"]) == (1.0, 2.5, 5, 0.5)
    assert found["reward_failed"] == 1
    assert (found["accuracy_low"], found["accuracy_high"]) == tuple(round(bound, 4) for bound in wilson(0.5, 3))
    assert any("failed for 1 answers" in line for line in table(found))


@pytest.mark.parametrize(
    ("share", "count", "low", "high"), [(0.0, 10, 0.0, 0.278), (1.0, 10, 0.722, 1.0), (0.5, 100, 0.404, 0.596)]
)
def test_the_interval_is_wilsons(share: float, count: int, low: float, high: float) -> None:
    """Of none in n it goes up to z^2 / (n + z^2)."""
    assert wilson(share, count) == pytest.approx((low, high), abs=5e-4)
