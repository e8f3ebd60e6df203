"""What the tests of this ring share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.processes import Swarm, swarm_in


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    """Processes of one test, on loopback."""
    with swarm_in(tmp_path) as processes:
        yield processes
