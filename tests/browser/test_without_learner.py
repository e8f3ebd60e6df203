"""Pages of runs that nobody leads now, of one that has nothing to show yet, and the page for volunteers."""

from __future__ import annotations

import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from playwright.sync_api import expect

from tests.browser.chromium import NARROW
from tests.browser.conftest import Opened
from tests.browser.hostile import IMAGE, SCRIPT
from tests.browser.pages import EVERY_WAY, Scheme, address_of, faults_in, kept_address, made_of_strangers
from tests.browser.swarms import ENDLESS, Led
from tests.integration.processes import Node, eventually, run_command, swarm_in


class Line:
    """A connection to a port of this machine that can be cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._whole = threading.Event()
        self._whole.set()
        self._open: list[socket.socket] = []

    def __enter__(self) -> Line:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()

    def cut(self) -> None:
        self._whole.clear()
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._whole.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                if not self._whole.is_set():
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._target))
                self._open += near, far
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=_pass_on, args=(one, other), daemon=True).start()


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
    with suppress(OSError):
        other.shutdown(socket.SHUT_RDWR)


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


def test_a_kept_run_is_shown_as_one_after_a_cut(kept: str, opened: Opened) -> None:
    """Nothing new comes of it: that it answers again is all there is to hear."""
    with Line(int(kept.rstrip("/").rpartition(":")[2])) as line:
        watched = opened(f"http://127.0.0.1:{line.port}/")
        expect(watched.page.locator("#connection")).to_contain_text("kept run")
        line.cut()
        expect(watched.page.locator("#connection")).to_contain_text("reconnecting")
        line.mend()
        expect(watched.page.locator("#connection")).to_contain_text("kept run")
        assert "last known" not in watched.page.title()
        watched.excuse("net::ERR_")


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


def test_a_report_shows_a_run_without_a_server_and_prints(kept: str, hostile_swarm: Led, opened: Opened) -> None:
    to = hostile_swarm.learner.log.parent / "report.html"
    done = run_command("report", str(hostile_swarm.learner.run_dir), "--to", str(to))
    assert done.returncode == 0, done.stderr
    watched = opened(to.as_uri())
    page = watched.page
    expect(page.locator("#connection")).to_contain_text("report")
    expect(page.locator("#steps")).to_have_text(re.compile("step [1-9]"))
    expect(page.locator("#tile-reward .value")).to_contain_text(re.compile("[0-9]"))
    expect(page.locator("#charts .uplot").first).to_be_attached()
    expect(page.locator("#lane-legend")).to_contain_text("train")
    for written in (IMAGE, SCRIPT):
        expect(page.locator("#rollout-group")).to_contain_text(written)
    assert made_of_strangers(page) == []
    assert page.locator(".served").evaluate_all("them => them.filter((it) => it.checkVisibility()).length") == 0
    assert faults_in(page, "light", NARROW) == []
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 720, "height": 1000})
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert watched.overflow_px() <= 0


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Led]:
    """A run that waits for its first sampler, with a page that needs the token, and one for volunteers."""
    with swarm_in(tmp_path_factory.mktemp("empty")) as swarm:
        pages = ("--dashboard", "0.0.0.0:0", "--public-page", "127.0.0.1:0")
        learner = swarm.lead("--model", "tiny", "--task", "copy", "--port", "0", *pages, *ENDLESS)
        yield Led(swarm, learner, address_of(learner))


def test_an_empty_page_says_how_to_join(empty: Led, opened: Opened) -> None:
    page = opened(empty.page.with_token).page
    expect(page.locator("#bottleneck")).to_contain_text("first sampler")
    expect(page.locator("#join-line")).to_contain_text(empty.learner.address())


def test_the_link_with_the_token_can_be_clicked_on_another_site(empty: Led, opened: Opened) -> None:
    watched = opened(empty.page.with_token)  # So that this page's own requests are not those to another host
    watched.page.goto(f"data:text/html,<a href='{empty.page.with_token}'>the run</a>")
    watched.context.clear_cookies()  # Not before: the page asks again and again, and would be refused
    watched.page.get_by_text("the run").click()
    expect(watched.page.locator("#bottleneck")).to_contain_text("first sampler")


@WAYS
def test_everybody_can_use_an_empty_page(empty: Led, opened: Opened, scheme: Scheme, size: tuple[int, int]) -> None:
    page = opened(empty.page.with_token).page
    expect(page.locator("#bottleneck")).to_contain_text("first sampler")
    assert faults_in(page, scheme, size) == []


@WAYS
def test_everybody_can_use_the_page_for_volunteers(
    empty: Led, opened: Opened, scheme: Scheme, size: tuple[int, int]
) -> None:
    eventually(lambda: empty.learner.says("page for volunteers"), empty.learner, "the page for volunteers is served")
    line = next(line for line in empty.learner.output().splitlines() if "page for volunteers" in line)
    page = opened(line.partition("page for volunteers ")[2]).page
    expect(page.locator("#join-line")).to_contain_text("echo-node join")
    assert faults_in(page, scheme, size) == []
