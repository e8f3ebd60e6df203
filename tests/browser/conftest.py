"""The ring of the browser. Where there is no Chromium its tests skip and say so; where it is required they fail."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.chromium import ABSENT, PATIENCE_MS, Watched, chromium, watched
from tests.browser.swarms import Led, hostile_run
from tests.integration.processes import swarm_in

REQUIRED = os.environ.get("ECHO_NODE_PROGRAMS") == "required"
"""As in .ci/run as root, where a skip would hide that nothing of it was tested."""


Opened = Callable[..., Watched]

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One for the ring. It ends before the tests of another ring begin, since no event loop runs beside it."""
    if shutil.which("chromium") is None:
        (pytest.fail if REQUIRED else pytest.skip)(ABSENT)
    with chromium() as started:
        yield started


@pytest.fixture
def opened(browser: Browser) -> Iterator[Opened]:
    """Opens pages; at the end of the test none of them may have complained or asked another host."""
    with ExitStack() as stack:
        pages: list[Watched] = []

        def make(url: str = "", **settings: Any) -> Watched:
            page = stack.enter_context(watched(browser, **settings))
            pages.append(page)
            if url:
                page.open(url)
            return page

        yield make
        assert [page.complaints() for page in pages] == [[]] * len(pages)
        assert [page.elsewhere() for page in pages] == [[]] * len(pages)


@pytest.fixture(scope="package")
def hostile_swarm(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Led]:
    directory = tmp_path_factory.mktemp("hostile")
    with swarm_in(directory) as swarm:
        yield hostile_run(swarm, directory)


@pytest.fixture
def hostile(hostile_swarm: Led) -> Led:
    """A live run of strangers who try to be more than text. A test may kill its learner."""
    if hostile_swarm.learner.process.poll() is not None:
        hostile_swarm.resume()
    return hostile_swarm
