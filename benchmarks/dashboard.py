"""What the page of a large swarm costs its reader and its learner: the real server, page and Chromium.

bin/python -m benchmarks.dashboard
bin/python -m benchmarks.dashboard --screenshots docs    # instead: pictures of a demo that runs meanwhile

A process of its own serves the page of a run whose status is one that a learner gave (tests/unit/report/status.json),
with SAMPLERS samplers, all of which change each second. The run takes a step a second, and has a history. Each repeat
opens the page again, scrolls to the table of nodes and watches updates:

- `update_ms`: what the page itself measures of the main thread for all messages of a frame, from JSON to the last
  drawing; its median, 95th percentile (`_p95`) and maximum (`_max`) over the updates.
- `script_ms`, `layout_ms`, `style_ms`, `task_ms`: of the main thread for each update, by Chromium's own count.
- `long_tasks`: tasks over 50 ms for each update, and `longest_ms` of them all.
- `between_s`: from update to update. The server makes them rarer where a digest takes over 1 % of its time.
- `loop_ms`: CPU time of the server's event loop for one digest, from status to JSON.
- `bytes_per_s` that one reader gets, as they are on the line.

Each is the median of the repeats, with their lowest and highest. Exit status 1 if the median update takes over 50 ms.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

from benchmarks import Figures, parser_of, said
from swarm.dashboard.server import Dashboard
from swarm.dashboard.source import ShownRun, Source
from swarm.run.timeline import Timeline
from tests.browser.chromium import WIDE, Watched, chromium, watched
from tests.browser.pages import STEP, Scheme

RECORDED = Path(__file__).parents[1] / "tests" / "unit" / "report" / "status.json"
SAMPLERS, LINKS = 1000, 2000

PICTURE_STEPS = 45  # By then most of the demo's curve is there, and its swarm still works
PATIENCE_S = 300.0
SIZES = {"wide": (1920, 1200), "narrow": (360, 1560)}  # CSS pixels
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
MAX_BYTES = 300_000
UPDATE_TARGET_MS = 50.0  # Beyond it a click waits noticeably
HISTORY_STEPS = 2000  # Of the run before the page is opened: curves are thinned by then
UP_S = 60.0  # Longest wait for the server and for the page to be drawn
SPAWN = multiprocessing.get_context("spawn")
OBSERVE = """
window.updates = [];
window.tasks = [];
const frame = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (draw) => frame((at) => {
    const began = performance.now();
    draw(at);
    if (draw.name === "update") window.updates.push(performance.now() - began);
});
new PerformanceObserver((list) => window.tasks.push(...list.getEntries().map((entry) => entry.duration)))
    .observe({ type: "longtask" });
"""

COUNTS = {"script_ms": "ScriptDuration", "layout_ms": "LayoutDuration", "style_ms": "RecalcStyleDuration"}
COUNTS["task_ms"] = "TaskDuration"


# -- the run ---------------------------------------------------------------------------------------------------


def swarm_of(samplers: int, links: int) -> dict[str, Any]:
    """The recorded status with this many samplers and links. All samplers are known by gossip, and each has a part of a
    version under way."""
    status: dict[str, Any] = json.loads(RECORDED.read_text())
    ids = [f"{number:032x}" for number in range(max(samplers, links))]
    (measured, *_), (public, *_) = status["capacity"]["inputs"]["by_node"].values(), status["publics"]
    sampler = status["samplers"][0]
    status["samplers"] = [{**sampler, "node": node, "nickname": node[-6:]} for node in ids[:samplers]]
    status["publics"] = [{**public, "node": node} for node in ids[:samplers]]
    status["capacity"] |= {"idle_share": 0.3, "binds": "rate", "rollouts_per_s_needed": 1e9}
    status["capacity"]["inputs"]["by_node"] = dict.fromkeys(ids[:samplers], measured)
    status["cost"]["by_node"] = dict.fromkeys(ids[:samplers], 1.0)
    status["links"] = [[status["node"], node, 1000, "0.3"] for node in ids[:links]]
    status["broadcasts"][max(status["broadcasts"])]["progress"] = dict.fromkeys(ids[:samplers], 0.5)
    return status


class Simulated:
    """A run of many samplers: its files, and a status that is another one each time."""

    def __init__(self, directory: Path, samplers: int) -> None:
        self._directory = directory
        self._random = random.Random(1)
        self._status = swarm_of(samplers, LINKS)
        self._step = 0
        self._write("config.json", json.dumps({"model": "simulated", "task": "copy", "beat_s": 1.0, "steps": 100_000}))
        now = time.time() - HISTORY_STEPS
        self._take([now + number for number in range(HISTORY_STEPS)])
        self.timeline = Timeline(now)
        for sampler in self._status["samplers"]:
            self.timeline.note(str(sampler["node"]), "draw", time.time())

    def status(self) -> Mapping[str, Any]:
        self._status["step"] = self._step
        for sampler in self._status["samplers"]:
            sampler["rollouts_per_s"] = self._random.uniform(1, 20)
            sampler["silent_s"] = self._random.uniform(0, 1)
            sampler["verdicts"] = {"accepted": sampler["verdicts"]["accepted"] + self._random.randint(0, 20)}
        return self._status

    async def go_on(self) -> None:
        while True:
            self._take([time.time()])
            await asyncio.sleep(1)

    def _take(self, times: list[float]) -> None:
        lines = []
        for at in times:
            self._step += 1
            figures = {name: self._random.random() for name in self._status["metrics"]}
            lines.append(json.dumps({**figures, "step": self._step, "time": at}))
        self._write("metrics.jsonl", "\n".join(lines))

    def _write(self, name: str, text: str) -> None:
        with (self._directory / name).open("a") as file:
            file.write(text + "\n")


class TimedSource(Source):
    """Keeps how much CPU time of the event loop each digest took."""

    took_ms: list[float]

    def _reckon(self, *arguments: Any) -> None:
        began = time.thread_time()
        super()._reckon(*arguments)
        self.took_ms.append(1e3 * (time.thread_time() - began))


def serve(directory: Path, samplers: int, pipe: Connection) -> None:
    """Tell the port, and at any word how long the digests since the last one took, until the word is "end"."""
    asyncio.run(_serve(directory, samplers, pipe))


def _unread() -> Any:
    raise OSError("a simulated run has no rollouts")


async def _serve(directory: Path, samplers: int, pipe: Connection) -> None:
    run = Simulated(directory, samplers)
    shown = ShownRun(directory=directory, readers=_unread, status=run.status, timeline=lambda: run.timeline)
    page = Dashboard(shown, token="benchmark")
    page._source = source = TimedSource(page._run, page._feed)
    source.took_ms = []
    port = await page.start("127.0.0.1", 0)
    stepping = asyncio.create_task(run.go_on())
    await asyncio.to_thread(pipe.send, port)
    while await asyncio.to_thread(pipe.recv) != "end":
        await asyncio.to_thread(pipe.send, source.took_ms)
        source.took_ms = []
    stepping.cancel()
    await page.close()


@contextmanager
def served(samplers: int) -> Iterator[tuple[str, Connection]]:
    with tempfile.TemporaryDirectory(prefix="echo-node-dashboard-") as directory:
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=serve, args=(Path(directory), samplers, theirs))
        process.start()
        try:
            if not ours.poll(UP_S):
                raise TimeoutError(f"the server said nothing for {UP_S:g} s")
            yield f"http://127.0.0.1:{ours.recv()}", ours
        finally:
            ours.send("end")
            process.join(UP_S)


# -- one repeat ------------------------------------------------------------------------------------------------


def measure(seen: Watched, url: str, server: Connection, updates: int) -> Figures:
    seen.context.add_init_script(OBSERVE)
    page = seen.open(url)
    page.wait_for_function("() => document.querySelector('#node-count').textContent.includes('nodes')")
    page.locator("#nodes").scroll_into_view_if_needed()
    counts = seen.context.new_cdp_session(page)
    counts.send("Performance.enable")
    counts.send("Network.enable")
    received: list[float] = []
    counts.on("Network.dataReceived", lambda data: received.append(float(data["dataLength"])))
    _wait_for(page, 2)
    page.evaluate("() => { window.updates.length = 0; window.tasks.length = 0; }")
    received.clear()
    server.send("figures")
    server.recv()
    before, began = _counts(counts), time.monotonic()
    _wait_for(page, updates)
    after, lasted_s = _counts(counts), time.monotonic() - began
    took, tasks = page.evaluate("() => [window.updates, window.tasks]")
    server.send("figures")
    loop_ms: list[float] = server.recv()
    return {
        "update_ms": statistics.median(took),
        "update_ms_p95": statistics.quantiles(took, n=20, method="inclusive")[-1],
        "update_ms_max": max(took),
        **{name: 1e3 * (after[count] - before[count]) / len(took) for name, count in COUNTS.items()},
        "long_tasks": len(tasks) / len(took),
        "longest_ms": max(tasks, default=0.0),
        "loop_ms": statistics.median(loop_ms),
        "loop_ms_max": max(loop_ms),
        "bytes_per_s": sum(received) / lasted_s,
        "between_s": lasted_s / len(took),
    }


def _wait_for(page: Page, updates: int) -> None:
    limit = 1e3 * (UP_S + 5 * updates)
    # By default it looks in each frame, and the browser would draw 60 of them a second for it.
    page.wait_for_function("(count) => window.updates.length >= count", arg=updates, timeout=limit, polling=200)


def _counts(session: Any) -> dict[str, float]:
    found = session.send("Performance.getMetrics")["metrics"]
    return {one["name"]: float(one["value"]) for one in found}


def repeats(samplers: int, updates: int, count: int) -> list[Figures]:
    found = []
    with served(samplers) as (url, server), chromium() as browser:
        for _ in range(count):
            with watched(browser, viewport={"width": WIDE[0], "height": WIDE[1]}) as seen:
                found.append(measure(seen, url, server, updates))
                if complaints := seen.complaints():
                    raise RuntimeError(f"the page complained: {complaints}")
    return found


def summary(found: list[Figures]) -> Figures:
    columns = {name: [one[name] for one in found] for name in found[0]}
    return {name: {"median": statistics.median(of), "low": min(of), "high": max(of)} for name, of in columns.items()}


# -- pictures for README.md and docs/ -----------------------------------------------------------------------------


def take_pictures(to: Path) -> None:
    """Write `to`/dashboard-WIDTH-SCHEME.png. Raise RuntimeError if the demo ends before, or a picture is too large."""
    with tempfile.TemporaryDirectory(prefix="echo-node-pictures-") as directory:
        run_dir = Path(directory) / "demo"
        command = [sys.executable, "-m", "swarm", "demo", "--seed", "1", "--run-dir", str(run_dir)]
        demo = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            url = _page_of(run_dir, demo)
            with chromium() as browser:
                for width in SIZES:
                    for scheme in SCHEMES:
                        _take(browser, url, width, scheme, to / f"dashboard-{width}-{scheme}.png")
        finally:
            demo.terminate()
            demo.wait(PATIENCE_S)


def _page_of(run_dir: Path, demo: subprocess.Popen[bytes]) -> str:
    """The page's address with its token, once there is one."""
    path, until = run_dir / "dashboard.json", time.monotonic() + PATIENCE_S
    while not path.exists():
        if demo.poll() is not None or time.monotonic() > until:
            raise RuntimeError("the demo shows no page: run it by itself, and see what it says")
        time.sleep(0.1)
    known: dict[str, str] = json.loads(path.read_text())
    return f"{known['url']}/?token={known['token']}"


def _take(browser: Browser, url: str, width: str, scheme: Scheme, to: Path) -> None:
    columns, rows = SIZES[width]
    with watched(browser, viewport={"width": columns, "height": rows}, color_scheme=scheme) as seen:
        page = seen.open(url)
        page.wait_for_function(f"(least) => {STEP} >= least", arg=PICTURE_STEPS, timeout=1e3 * PATIENCE_S)
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        page.screenshot(path=to)
    if to.stat().st_size > MAX_BYTES:
        raise RuntimeError(f"{to} has {to.stat().st_size:,} bytes: show less in it")
    print(f"{to}: {to.stat().st_size:,} bytes")


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--updates", type=int, default=40, help="watched in each repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--screenshots", type=Path, metavar="DIR", help="take pictures of a demo instead")
    options = parser.parse_args(arguments)
    if options.screenshots is not None:
        take_pictures(options.screenshots)
        return 0
    found = said(summary(repeats(SAMPLERS, options.updates, options.repeats)))
    return int(found["update_ms"]["median"] > UPDATE_TARGET_MS)


if __name__ == "__main__":
    sys.exit(main())
