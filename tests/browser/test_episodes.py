"""The page of a run of episodes: a conversation for each, of strangers' words that stay words."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from swarm.dashboard.server import Dashboard
from swarm.dashboard.source import ShownRun
from swarm.run.directory import create_run_directory
from swarm.settings import LeadConfig
from swarm.tasks.base import Read
from tests.browser.chromium import NARROW, WIDE
from tests.browser.conftest import Opened
from tests.browser.hostile import IMAGE, SCRIPT
from tests.browser.pages import Scheme, faults_in, made_of_strangers
from tests.builders import prompt
from tests.unit.episodes import TWO, played, record_episodes


@pytest.fixture
def episodes(tmp_path: Path) -> Iterator[str]:
    """The address of a run with one group of two episodes, served by a thread of its own."""
    run_dir = tmp_path / "run"
    create_run_directory(run_dir, LeadConfig(run_dir=run_dir))
    addresses: list[str] = []
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        words: Read = (
            prompt,
            lambda tokens: f"{IMAGE}{SCRIPT} " + "+".join(map(str, tokens)),
            lambda prompt, said: [],
        )
        page = Dashboard(ShownRun(directory=run_dir, readers=lambda: words))
        addresses.append(f"http://127.0.0.1:{await page.start('127.0.0.1', 0)}")
        ready.set()
        await asyncio.to_thread(over.wait)
        await page.close()

    def work() -> None:
        record_episodes(run_dir, played(TWO, seats=(0, 3)), reward=1.0)
        asyncio.run(serve())

    thread = threading.Thread(target=work)  # The browser's driver has a loop in this one
    thread.start()
    assert ready.wait(20)
    yield addresses[0]
    over.set()
    thread.join(20)


@pytest.mark.parametrize(("scheme", "size"), [("light", NARROW), ("dark", WIDE)])
def test_an_episode_is_a_conversation(episodes: str, opened: Opened, scheme: Scheme, size: tuple[int, int]) -> None:
    page = opened(episodes).page
    page.locator("#rollouts").scroll_into_view_if_needed()
    first = page.get_by_role("region", name="Episode 0")
    expect(first).to_contain_text(f"{SCRIPT} 7+8")
    heads = first.locator(".meta").all_inner_texts()
    assert heads[0] == "player 1 · reward 1 · by alice · version 0"
    assert heads[1:3] == ["environment to player 1", "environment to player 2"]
    assert [each.get_attribute("class") for each in first.locator(":scope > div").all()] == [
        "said",
        "read",
        "read",
        "said",
        "read",
    ]
    assert page.get_by_role("region", name="Episode 1").locator(".meta").first.inner_text().startswith("model · reward")
    assert made_of_strangers(page) == []
    assert faults_in(page, scheme, size) == []
