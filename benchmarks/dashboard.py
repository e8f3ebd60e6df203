"""Pictures of the live page for README.md and docs/, taken of a demo that runs meanwhile, by Chromium.

bin/python -m benchmarks.dashboard docs
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

from playwright.sync_api import Browser

from benchmarks import parser_of
from tests.browser.chromium import chromium, watched
from tests.browser.pages import STEP, Scheme

PICTURE_STEPS = 45  # By then most of the demo's curve is there, and its swarm still works
PATIENCE_S = 300.0
SIZES = {"wide": (1920, 1200), "narrow": (360, 1560)}  # CSS pixels
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
MAX_BYTES = 300_000


def take_pictures(to: Path) -> None:
    """Write `to`/dashboard-WIDTH-SCHEME.png. Raise RuntimeError if the demo ends before, or a picture is too large."""
    with tempfile.TemporaryDirectory(prefix="echo-node-pictures-") as directory:
        run_dir = Path(directory) / "demo"
        command = [sys.executable, "-m", "swarm", "demo", "--seed", "1", "--run-dir", str(run_dir)]
        demo = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            url = _page_of(run_dir, demo)
            with chromium() as browser:
                for width, scheme in product(SIZES, SCHEMES):
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


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("to", type=Path, metavar="DIR")
    take_pictures(parser.parse_args().to)


if __name__ == "__main__":
    main()
