"""When a batch that is ready is held, and for how long."""

from __future__ import annotations

import pytest

from benchmarks.holding import may_take


@pytest.mark.parametrize(
    ("others", "batch", "may"),
    [
        ({}, {5: 2}, True),
        # One that is due now would be left behind.
        ({5: 1}, {5: 1, 6: 1}, False),
        # Those due by d fit into the batches after this one and by d, or do not.
        ({6: 2}, {5: 2}, True),
        ({6: 3}, {7: 2}, False),
        ({6: 1, 7: 3}, {5: 2}, True),
        ({6: 2, 7: 3}, {8: 2}, False),
        # What is past its deadline is not waited for.
        ({4: 7, 6: 2}, {5: 2}, True),
        # More are due by 5 than any order of batches can train: waiting would not help them.
        ({5: 3}, {5: 2}, True),
        # It would help one of these: the batch holds one due later in its place.
        ({5: 3}, {5: 1, 6: 1}, False),
    ],
)
def test_a_batch_is_held_while_waiting_helps_what_it_would_leave_behind(
    others: dict[int, int], batch: dict[int, int], may: bool
) -> None:
    assert may_take(others, batch, 5, 2) is may
