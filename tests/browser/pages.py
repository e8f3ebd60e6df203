"""What the tests ask of a page, whatever it shows."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.browser.chromium import NARROW, PATIENCE_MS, WIDE
from tests.integration.processes import Learner, Node, eventually

Scheme = Literal["light", "dark"]
GRAVE = ("serious", "critical")

TABBABLE = "a[href], button, input, select, textarea, summary, [tabindex='0']"

REACHABLE = """(selector) => [...document.querySelectorAll(selector)].filter(
    (element) => !element.disabled && element.checkVisibility({ visibilityProperty: true }))
    .map((element, at) => (element.dataset.reached = String(at)))"""
"""Number the controls that are shown, in the document's order."""

FOCUSED = "document.activeElement?.dataset?.reached ?? ''"


class Address(NamedTuple):
    """Where a run's page is, as dashboard.json says."""

    url: str
    token: str

    @property
    def with_token(self) -> str:
        return f"{self.url}/?token={self.token}"


def address_of(learner: Learner) -> Address:
    path = learner.run_dir / "dashboard.json"

    def served() -> bool:
        assert learner.process.poll() is None, learner.output()
        return path.exists() and learner.says("page http")

    eventually(served, learner, "the page is served")
    return Address(**json.loads(path.read_text()))


def kept_address(node: Node) -> str:
    """The address that `echo-node dashboard` prints."""
    eventually(lambda: node.says("page http"), node, "the kept run is served")
    line = next(line for line in node.output().splitlines() if "page http" in line)
    return line.partition("page ")[2].split()[0]


def grave_faults(page: Page) -> list[str]:
    """What axe-core calls serious or critical: its rule, and where."""
    found: dict[str, Any] = Axe().run(page).response
    return [
        f"{fault['id']} ({fault['impact']}): {', '.join(node['html'][:160] for node in fault['nodes'][:4])}"
        for fault in found["violations"]
        if fault["impact"] in GRAVE
    ]


def faults_in(page: Page, scheme: Scheme, size: tuple[int, int]) -> list[str]:
    """What is wrong with a page in that scheme and size: grave_faults, and whether it is wider than its window."""
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": size[0], "height": size[1]})
    # Two frames: what draws itself when its size changed has done it.
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return [*grave_faults(page), *([f"{wider} px wider than the window"] if wider > 0 else [])]


EVERY_WAY: tuple[tuple[Scheme, tuple[int, int]], ...] = (
    ("light", NARROW),
    ("dark", WIDE),
    ("dark", NARROW),
    ("light", WIDE),
)


def passed_over(page: Page) -> list[str]:
    """The controls that are shown and that the Tab key does not come to."""
    count = len(page.evaluate(REACHABLE, TABBABLE))
    reached = set()
    page.evaluate("document.activeElement?.blur?.()")
    for _ in range(count + 20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate(FOCUSED))
    missing = [str(number) for number in range(count) if str(number) not in reached]
    return [
        page.locator(f"[data-reached='{number}']").first.evaluate("(it) => it.outerHTML.slice(0, 200)")
        for number in missing
    ]


def is_up(page: Page) -> None:
    """Wait until the page shows figures and a sampler."""
    expect(page.locator("#tile-reward .value")).to_contain_text("0")
    expect(page.locator("#node-table tbody")).to_contain_text("sampler")


def made_of_strangers(page: Page) -> list[str]:
    """What only mark-up of strangers can have made, and marks that turn the writing of what follows."""
    made: list[str] = page.evaluate(
        "[...document.querySelectorAll('img, iframe, main script, a[href^=javascript]')].map((it) => it.outerHTML)"
    )
    text = page.locator("body").inner_text()
    turned = [repr(mark) for mark in ("\u202e", "\u2066", "\x1b", "\0") if mark in text]
    return [*made, *turned, *(["it ran"] if page.evaluate("window.hacked") else [])]


STEP = "Number((document.getElementById('steps').textContent.match(/[0-9][0-9,]*/) ?? ['0'])[0].replaceAll(',', ''))"


def step_shown(page: Page) -> int:
    """The step that the header shows, 0 if none."""
    return int(page.evaluate(STEP))


def takes_steps_on(page: Page, count: int, since: int | None = None) -> None:
    """Wait until the header shows `count` steps more than `since`, or than now."""
    least = (step_shown(page) if since is None else since) + count
    patience_ms = PATIENCE_MS + 2_000 * count
    page.wait_for_function(f"(least) => {STEP} >= least", arg=least, timeout=patience_ms)
