"""Ready groups: the earliest deadline first, nothing stale ever."""

from __future__ import annotations

import pytest

from swarm.rollout.plane.buffer import Buffer
from swarm.types import Score
from tests.builders import ready_group


def filled(*versions: int, batch_groups: int = 2) -> Buffer:
    """A buffer with ready groups of these versions, in this order of completion."""
    buffer = Buffer(batch_groups=batch_groups)
    for order, version in enumerate(versions):
        buffer.add(ready_group(version, order))
    return buffer


def test_a_stale_group_neither_fills_a_batch_nor_is_in_it() -> None:
    buffer = filled(0, 1, 1)
    assert [g.oldest_version for g in buffer.take(3, 2)] == [1, 1]
    assert not filled(0, 1).count(3, 2) >= 2
    with pytest.raises(AssertionError):
        filled(0, 1).take(3, 2)


def test_an_incomplete_group_is_not_taken_in() -> None:
    group = ready_group(0, 0, samples=2)
    group.samples[1].score = None
    with pytest.raises(AssertionError):
        Buffer(batch_groups=1).add(group)
    group.samples[1].score = Score(reward=0.0, exact=False)
    Buffer(batch_groups=1).add(group)
