"""Debian's Chromium without a screen, and a page that is watched: whatever it complains of or asks other hosts for."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, sync_playwright

ABSENT = "chromium is not on the PATH; Debian: apt-get install chromium"

FLAGS = (
    "--no-sandbox",  # Chromium refuses to run as root with one, and CI is root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

PATIENCE_MS = 60_000.0
"""Longest wait for anything in a page, on two busy cores; a test that passes waits for what it asks, not for this."""

NARROW, WIDE = (360, 740), (1920, 1080)
"""The two sizes of window that the page has to work in, CSS pixels."""

REPORTS = """
window.reports = [];
document.addEventListener("securitypolicyviolation", (event) =>
    window.reports.push(`${event.violatedDirective}: ${event.blockedURI}`));
window.shifted = 0;
new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shifted += entry.value;
}).observe({ type: "layout-shift", buffered: true });
"""
"""Runs before the page's own scripts: what the CSP stopped, and how far the layout moved by itself."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a profile of its own. While it runs, no event loop can be started in this thread."""
    program = shutil.which("chromium")
    if program is None:
        raise FileNotFoundError(ABSENT)
    with tempfile.TemporaryDirectory(prefix="echo-node-chromium-") as home, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program,
            args=["--headless=new", *FLAGS],
            env={"HOME": home, "XDG_CONFIG_HOME": home, "XDG_CACHE_HOME": home, "PATH": "/usr/bin:/bin"},
        )
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page in a context of its own, and what went wrong in it so far."""

    def __init__(self, context: BrowserContext) -> None:
        context.set_default_timeout(PATIENCE_MS)
        context.add_init_script(REPORTS)
        self.context = context
        self.page: Page = context.new_page()
        self._host = ""
        self._complaints: list[str] = []
        self._excused: list[str] = []
        self._elsewhere: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self._complaints.append(f"uncaught: {error}"))
        self.page.on("request", self._on_request)

    def open(self, url: str) -> Page:
        self._host = urlsplit(url).netloc
        self.page.goto(url)
        return self.page

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, uncaught exceptions, and what the content security policy stopped."""
        reports: list[str] = self.page.evaluate("window.reports")
        found = [*self._complaints, *(f"content security policy: {report}" for report in reports)]
        return [line for line in found if not any(words in line for words in self._excused)]

    def elsewhere(self) -> list[str]:
        """Requests to another host or port than the page's."""
        return list(self._elsewhere)

    def shifted(self) -> float:
        """The sum of layout shifts that no input explains, as Cumulative Layout Shift counts them."""
        return float(self.page.evaluate("window.shifted"))

    def overflow_px(self) -> int:
        """By how much the page is wider than its window."""
        wider: int = self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        return wider

    def excuse(self, words: str) -> None:
        """Take no complaint with these words for one: a learner that is killed cannot answer."""
        self._excused.append(words)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self._complaints.append(f"console {message.type}: {message.text}")

    def _on_request(self, request: Request) -> None:
        at = urlsplit(request.url)
        if at.scheme not in ("data", "blob") and at.netloc != self._host:
            self._elsewhere.append(request.url)


@contextmanager
def watched(browser: Browser, **settings: Any) -> Iterator[Watched]:
    """A page with these settings of playwright's new_context."""
    context = browser.new_context(**settings)
    try:
        yield Watched(context)
    finally:
        context.close()
