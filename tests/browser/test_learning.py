"""A model learns, and the page shows it while it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.conftest import Opened
from tests.browser.pages import address_of
from tests.integration.processes import swarm_in

MIN_RISE = 0.1
"""Of the mean reward, which is 0.03 at first and 0.15 after ten steps."""

REWARD = "Number(document.querySelector('#tile-reward .value')?.textContent.split(' ')[0])"


@pytest.mark.long
def test_the_curve_of_a_live_run_rises(tmp_path: Path, opened: Opened) -> None:
    with swarm_in(tmp_path) as swarm:
        swarm.lead_with(groups_per_step=32, group_size=16, learning_rate=1e-3)
        learner = swarm.lead("--model", "tiny", "--task", "copy", "--seed", "1", "--port", "0", "--steps", "200")
        for name in ("one", "two"):
            swarm.join(learner.url(), name=name)
        watched = opened(address_of(learner).url)
        page = watched.page
        page.wait_for_function(f"() => {REWARD} > 0")
        first = page.evaluate(REWARD)
        assert first < 0.2
        page.wait_for_function(f"(least) => {REWARD} >= least", arg=first + MIN_RISE, timeout=240_000)
        assert watched.complaints() == []
    # The learner is gone now.
    watched.excuse("net::ERR_")
