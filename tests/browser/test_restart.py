"""An open page outlives its learner: it is killed, another goes on with the run, and nobody touches the page."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.browser.conftest import Opened
from tests.browser.pages import is_up, step_shown, takes_steps_on
from tests.browser.swarms import Led


def test_a_page_outlives_its_learner(hostile: Led, opened: Opened) -> None:
    watched = opened(hostile.page.url)
    page = watched.page
    is_up(page)
    page.evaluate("window.stayed = true")
    hostile.learner.kill()
    expect(page.locator("#connection")).to_contain_text("reconnecting")
    expect(page.locator("#state")).to_contain_text("last known: ")
    assert "last known" in page.title()
    before = step_shown(page)
    assert before > 0
    hostile.resume()
    expect(page.locator("#connection")).not_to_contain_text("reconnecting")
    # Not than now: a new life begins at the last checkpoint, which may be some steps behind.
    takes_steps_on(page, 3, since=before)
    assert page.evaluate("window.stayed")
    # While nobody listens the browser says so, and has to.
    watched.excuse("net::ERR_")


def test_an_axis_tells_its_ticks_apart(hostile: Led, opened: Opened) -> None:
    page = opened(hostile.page.url).page
    labels = """async ([values, step]) => (await import('./static/format.js')).ticks(values, step)"""
    for values, step in (([1e-9, 1.5e-9, 2e-9], 5e-10), ([10_000, 10_020, 10_040], 20), ([0, 2.5, 5], 2.5)):
        found = page.evaluate(labels, [values, step])
        assert len(set(found)) == 3, found
