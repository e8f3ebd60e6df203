"""The ring skips, and says why, where it cannot work."""

from __future__ import annotations

import pytest

from tests.netns.hosts import unusable


@pytest.fixture(autouse=True, scope="session")
def _usable() -> None:
    if why := unusable():
        pytest.skip(why)
