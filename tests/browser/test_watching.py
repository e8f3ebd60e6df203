"""The watch itself: a page that misbehaves is seen to."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, Route

from tests.browser.chromium import Watched, watched

PAGE = """<!doctype html><html lang="en"><title>It misbehaves</title><body><p>One</p>
<script src="/it.js"></script></body></html>"""


def _served(page: Watched, script: str) -> None:
    """Serve PAGE with this script at http://here.test/; other hosts answer nothing."""

    def answer(route: Route) -> None:
        if route.request.url == "http://here.test/":
            policy = {"Content-Security-Policy": "default-src 'self'; connect-src *"}
            route.fulfill(body=PAGE, content_type="text/html", headers=policy)
        elif route.request.url == "http://here.test/it.js":
            route.fulfill(body=script, content_type="text/javascript")
        else:
            route.fulfill(body="")

    page.page.route("**/*", answer)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("console.error('no such series')", "console error: no such series"),
        ("null.length", "uncaught: Cannot read"),
        ("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=1>')", "content security policy: script"),
    ],
)
def test_a_complaint_is_seen(browser: Browser, script: str, words: str) -> None:
    with watched(browser) as page:
        _served(page, script)
        page.open("http://here.test/")
        page.page.wait_for_function("() => document.readyState == 'complete'")
        assert any(words in line for line in page.complaints()), page.complaints()


def test_a_request_elsewhere_is_seen(browser: Browser) -> None:
    with watched(browser) as page:
        _served(page, "fetch('http://there.test/count', {mode: 'no-cors'}).finally(() => window.asked = true)")
        page.open("http://here.test/")
        page.page.wait_for_function("() => window.asked")
        assert page.elsewhere() == ["http://there.test/count"]


def test_what_moves_by_itself_and_what_sticks_out_is_measured(browser: Browser) -> None:
    push = "const box = document.createElement('div'); box.style.height = '300px'; box.style.width = '5000px';"
    script = f"{push} requestAnimationFrame(() => setTimeout(() => document.body.prepend(box)))"
    with watched(browser) as page:
        _served(page, script)
        page.open("http://here.test/")
        page.page.wait_for_function("() => window.shifted > 0")
        assert page.overflow_px() > 3000
