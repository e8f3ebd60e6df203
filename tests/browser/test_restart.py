"""An open page outlives its learner: it is killed, another goes on with the run, and nobody touches the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Opened
from tests.browser.pages import address_of, is_up, step_shown, takes_steps_on
from tests.browser.swarms import Led, hostile_run
from tests.integration.processes import swarm_in


@pytest.fixture
def led(tmp_path: Path) -> Iterator[Led]:
    with swarm_in(tmp_path) as swarm:
        yield hostile_run(swarm, tmp_path)


def test_a_page_outlives_its_learner(led: Led, opened: Opened) -> None:
    watched = opened(led.page.url)
    page = watched.page
    is_up(page)
    page.evaluate("window.stayed = true")
    led.learner.kill()
    expect(page.locator("#connection")).to_contain_text("reconnecting")
    before = step_shown(page)
    assert before > 0
    after = led.swarm.resume(led.learner, name="resumed")
    assert address_of(after) == led.page
    expect(page.locator("#connection")).to_contain_text("connected")
    expect(page.locator("#connection")).not_to_contain_text("reconnecting")
    takes_steps_on(page, 3)
    assert step_shown(page) > before
    assert page.evaluate("window.stayed")
    # While nobody listens the browser says so, and has to.
    watched.excused("net::ERR_")
