"""The page of a run that is led: quiet, usable by everybody, and unmoved by what strangers write."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.chromium import NARROW, WIDE
from tests.browser.conftest import Opened
from tests.browser.hostile import IMAGE, NICKNAME, SCRIPT
from tests.browser.pages import EVERY_WAY, Scheme, faults_in, is_up, made_of_strangers, passed_over, takes_steps_on
from tests.browser.swarms import Led

MAX_SHIFT = 0.1
"""Of Cumulative Layout Shift what is called good."""


def test_it_is_quiet_asks_nobody_else_and_moves_nothing(hostile: Led, opened: Opened) -> None:
    """All of the page is looked at while steps come in; `opened` refuses complaints and other hosts."""
    watched = opened(hostile.page.url, viewport={"width": WIDE[0], "height": WIDE[1]})
    is_up(watched.page)
    for section in watched.page.locator("main section").all():
        section.scroll_into_view_if_needed()
        takes_steps_on(watched.page, 1)
    assert watched.shifted() < MAX_SHIFT


@pytest.mark.long
@pytest.mark.parametrize("size", [NARROW, WIDE], ids=["narrow", "wide"])
def test_many_updates_move_nothing(hostile: Led, opened: Opened, size: tuple[int, int]) -> None:
    watched = opened(hostile.page.url, viewport={"width": size[0], "height": size[1]})
    is_up(watched.page)
    takes_steps_on(watched.page, 60)
    assert watched.shifted() < MAX_SHIFT


def test_it_says_who_sends_to_whom(hostile: Led, opened: Opened) -> None:
    page = opened(hostile.page.url).page
    is_up(page)
    expect(page.locator("#link-table tbody tr").first).to_contain_text("<img src=x onerror=hacked=1>")
    expect(page.locator("#links-said")).to_contain_text(re.compile("^1 link, .*/s in all$"))


def test_where_an_event_stands_in_its_file_is_no_figure(hostile: Led, opened: Opened) -> None:
    page = opened(hostile.page.url).page
    names = """async () => {
        const { Store } = await import("/static/store.js");
        const store = new Store();
        store.apply("events", [{ kind: "evaluated", version: 1, byte: 4067, exact_match: 0.5 }]);
        return [...store.evaluated.keys()];
    }"""
    assert page.evaluate(names) == ["exact_match"]


def test_what_strangers_write_stays_text(hostile: Led, opened: Opened) -> None:
    page = opened(hostile.page.url).page
    is_up(page)
    expect(page.locator("#node-table tbody")).to_contain_text("<img src=x onerror=hacked=1>")
    page.locator("#rollouts").scroll_into_view_if_needed()
    for written in (IMAGE, SCRIPT):
        expect(page.locator("#rollout-group")).to_contain_text(written)
    assert made_of_strangers(page) == []


@pytest.mark.parametrize(
    ("scheme", "size"),
    [pytest.param(*way, marks=[] if place < 2 else pytest.mark.long) for place, way in enumerate(EVERY_WAY)],
)
def test_everybody_can_use_it(hostile: Led, opened: Opened, scheme: Scheme, size: tuple[int, int]) -> None:
    page = opened(hostile.page.with_token).page
    is_up(page)
    assert faults_in(page, scheme, size) == []


def test_the_keyboard_reaches_all_controls(hostile: Led, opened: Opened) -> None:
    page = opened(hostile.page.with_token).page
    is_up(page)
    assert passed_over(page) == []


def test_the_keyboard_sorts_the_table_of_nodes(hostile: Led, opened: Opened) -> None:
    page = opened(hostile.page.url).page
    is_up(page)
    heading = page.locator("#node-table th[data-column=name]")
    heading.get_by_role("button").focus()
    for way in ("ascending", "descending"):
        page.keyboard.press("Enter")
        expect(heading).to_have_attribute("aria-sort", way)
        roles = page.locator("#node-table tbody tr:not(.space):visible th").all_inner_texts()
        assert roles == sorted(roles, reverse=way == "descending")


def test_names_are_shown_where_the_owner_meant_them(hostile: Led, opened: Opened) -> None:
    """A name with a mark that turns the writing does not turn the rest of the row."""
    page = opened(hostile.page.url).page
    is_up(page)
    assert NICKNAME[-1] not in page.locator("#node-table").inner_text()
