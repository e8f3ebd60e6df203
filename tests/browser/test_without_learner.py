"""Pages of runs that nobody leads now, of one that has nothing to show yet, and the page for volunteers."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Opened
from tests.browser.hostile import IMAGE, SCRIPT
from tests.browser.pages import EVERY_WAY, Scheme, address_of, faults_in, kept_address, made_of_strangers
from tests.browser.swarms import ENDLESS, Led
from tests.integration.processes import Node, swarm_in

WAYS = pytest.mark.parametrize(
    ("scheme", "size"),
    [pytest.param(*way, marks=[] if place < 1 else pytest.mark.long) for place, way in enumerate(EVERY_WAY)],
)


@pytest.fixture(scope="module")
def kept(hostile_swarm: Led) -> Iterator[str]:
    """The address of a run whose learner was killed, served from its files."""
    if hostile_swarm.learner.process.poll() is None:
        hostile_swarm.learner.kill()
    learner = hostile_swarm.learner
    serving = Node(learner.log.parent, "kept", "dashboard", str(learner.run_dir))
    hostile_swarm.swarm.nodes.append(serving)
    yield kept_address(serving)
    serving.signal(signal.SIGINT)
    assert serving.wait() in (0, 130), serving.output()


def test_a_kept_run_shows_its_rollouts_as_text(kept: str, opened: Opened) -> None:
    page = opened(kept).page
    page.locator("#rollouts").scroll_into_view_if_needed()
    for written in (IMAGE, SCRIPT):
        expect(page.locator("#rollout-group")).to_contain_text(written)
    assert made_of_strangers(page) == []


def test_nothing_of_a_kept_run_can_be_changed(kept: str, opened: Opened) -> None:
    page = opened(kept).page
    expect(page.locator("#steering-body")).to_contain_text("not led now")
    expect(page.locator("#bottleneck")).not_to_contain_text("waiting for")
    assert page.locator("#steering-body").locator("input, button, select").count() == 0


@WAYS
def test_everybody_can_use_a_kept_run(kept: str, opened: Opened, scheme: Scheme, size: tuple[int, int]) -> None:
    page = opened(kept).page
    expect(page.locator("#steps")).to_have_text(re.compile("step [1-9]"))
    assert faults_in(page, scheme, size) == []


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Led]:
    """A run that waits for its first sampler, with a page for volunteers."""
    with swarm_in(tmp_path_factory.mktemp("empty")) as swarm:
        learner = swarm.lead("--model", "tiny", "--task", "copy", "--port", "0", "--public-page", *ENDLESS)
        yield Led(swarm, learner, address_of(learner))


def test_an_empty_page_says_how_to_join(empty: Led, opened: Opened) -> None:
    page = opened(empty.page.url).page
    expect(page.locator("#bottleneck")).to_contain_text("first sampler")
    expect(page.locator("#join-line")).to_contain_text(empty.learner.address())


@WAYS
def test_everybody_can_use_an_empty_page(empty: Led, opened: Opened, scheme: Scheme, size: tuple[int, int]) -> None:
    page = opened(empty.page.with_token).page
    expect(page.locator("#bottleneck")).to_contain_text("first sampler")
    assert faults_in(page, scheme, size) == []


@WAYS
def test_everybody_can_use_the_page_for_volunteers(
    empty: Led, opened: Opened, scheme: Scheme, size: tuple[int, int]
) -> None:
    page = opened(empty.learner.url() + "/").page
    expect(page.locator("#join-line")).to_contain_text("echo-node join")
    assert faults_in(page, scheme, size) == []
