"""A run is changed on its page by who has the token, and by nobody else."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Opened
from tests.browser.pages import is_up
from tests.browser.swarms import Led

CHANGE = """async () => {
    const headers = { "Content-Type": "application/json", "X-Echo-Node": "1" };
    const sent = await fetch("/api/set", { method: "POST", headers, body: '{"max_staleness": 7}' });
    return sent.status;
}"""


def _events(led: Led, kind: str) -> list[dict[str, object]]:
    return [event for event in led.learner.events() if event["kind"] == kind]


def test_with_the_token_a_setting_changes_at_once_and_is_an_event(hostile: Led, opened: Opened) -> None:
    page = opened(hostile.page.with_token).page
    is_up(page)
    assert "token" not in page.url
    assert page.evaluate("document.cookie") == ""
    form = page.locator("form[data-setting=max_staleness]")
    form.get_by_role("spinbutton").fill("5")
    form.get_by_role("button").click()
    expect(page.locator("#steering-answer")).to_contain_text("✓")
    expect(page.locator("#event-table tbody")).to_contain_text("max_staleness")
    changed = _events(hostile, "set")[-1]
    assert (changed["key"], changed["before"], changed["after"]) == ("max_staleness", 2, 5)
    period = page.locator("form[data-setting=publish_every_steps]").get_by_role("spinbutton")
    expect(period).to_have_attribute("max", "6")
    form.get_by_role("spinbutton").fill("2")
    form.get_by_role("button").click()
    expect(form).to_contain_text("is 2")


def test_without_the_token_it_only_reads(hostile: Led, opened: Opened) -> None:
    watched = opened(hostile.page.url)
    is_up(watched.page)
    before = len(_events(hostile, "set"))
    expect(watched.page.locator("#steering-body")).to_contain_text("only reads")
    assert watched.page.locator("form[data-setting]").count() == 0
    assert watched.page.evaluate(CHANGE) == 401
    assert len(_events(hostile, "set")) == before
    watched.excuse("401")


def test_another_site_cannot_have_the_owner_change_it(hostile: Led) -> None:
    """As a form of another page would send it: the cookie alone is not enough."""
    cookie = f"echo-node-{hostile.page.url.rpartition(':')[2]}={hostile.page.token}"
    asked = urllib.request.Request(
        f"{hostile.page.url}/api/set", data=b'{"max_staleness": 7}', headers={"Cookie": cookie}, method="POST"
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked, timeout=10)
    assert refused.value.code == 403


def test_a_grave_change_is_asked_for_once_more(hostile: Led, opened: Opened) -> None:
    page = opened(hostile.page.with_token).page
    is_up(page)
    page.locator("form[data-setting=stop]").get_by_role("button").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Stop the run")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert _events(hostile, "set") == [] or _events(hostile, "set")[-1]["key"] != "stop"
    assert hostile.learner.process.poll() is None
