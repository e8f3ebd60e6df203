"""A learner for tests of its HTTP face."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.learner_face import Learner, serving


@pytest.fixture
async def starting() -> AsyncIterator[Learner]:
    """A learner that answers, and has no plane yet."""
    async with serving(Learner()) as learner:
        yield learner


@pytest.fixture
async def learner(starting: Learner) -> Learner:
    """A learner that has published version 0."""
    await starting.open()
    return starting
