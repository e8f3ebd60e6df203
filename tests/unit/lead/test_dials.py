"""What a request to change a running learner may say."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.errors import UserError
from swarm.lead.dials import checked

NODE = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("key", "given", "value"),
    [
        ("paused", "true", True),
        ("paused", False, False),
        ("max-staleness", "4", 4),
        ("learning-rate", "3e-6", 3e-6),
        ("learning_rate", 1, 1.0),
        ("max_cost", "none", None),
        ("max_cost", None, None),
        ("let-in", NODE, NODE),
        ("checkpoint", "now", "now"),
        ("stop", "after-step", "after-step"),
    ],
)
def test_values_come_as_text_or_as_they_are(key: str, given: Any, value: Any) -> None:
    ((name, found),) = checked({key: given}).items()
    assert (name, found, type(found)) == (key.replace("-", "_"), value, type(value))


@pytest.mark.parametrize(
    ("key", "given", "why"),
    [
        ("paused", "perhaps", "paused perhaps: input should be a valid boolean"),
        ("max_staleness", 1025, "max_staleness 1025: input should be less than or equal to 1024"),
        ("max_staleness", True, "valid integer"),
        ("max_staleness", -1, "greater than or equal to 0"),
        ("publish_every_steps", 0, "greater than or equal to 1"),
        ("learning_rate", 0, "greater than 0"),
        ("learning_rate", "nan", "learning_rate nan: "),
        ("max_cost", "inf", "less than or equal to"),
        ("refuse", "../../identity/key", "should match pattern"),
        ("let_in", NODE + "\n/x", "should match pattern"),
        ("checkpoint", "later", "should be 'now'"),
        ("stop", "now", "should be 'after-step'"),
        ("steps", 3, "steps cannot be set on a running learner"),
        ("learning_rat", 3, "did you mean learning_rate"),
        ("x" * 5000, 3, "^x{64} cannot be set on a running learner; there are paused, max_staleness, "),
    ],
)
def test_anything_else_is_refused_in_a_line_with_all_that_comes_with_it(key: str, given: Any, why: str) -> None:
    with pytest.raises(UserError, match=why) as refused:
        checked({"let_in": NODE, key: given})
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400
