"""The report of a run: its page as one HTML file, with a snapshot in place of the server. It opens without a network,
and its Content-Security-Policy forbids it to ask for anything.

Prompts, completions, reasons and names are strangers' words. They are in the file as JSON in which no tag can begin or
end, and the page puts them into text nodes. A report is written to another name first, so that a reader sees the old or
the new one, whole.
"""

from __future__ import annotations

import json
import re
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from swarm.dashboard.digest import digest
from swarm.dashboard.rollouts import read_groups, sampled_steps
from swarm.dashboard.source import SOON, encode, kept_timeline, last_status, snapshot_of
from swarm.errors import Damaged, UserError
from swarm.files import write_atomically
from swarm.report.figures import FigureFiles
from swarm.run.timeline import MAX_ASKED
from swarm.tasks.base import Read

STATIC = Path(__file__).parent / "static"
MARK = "<!-- echo-node report -->"  # The second line of every report: a file with it may be overwritten
GROUPS_OF_A_STEP = 6  # From each of three steps
TEXT_CHARS = 400_000  # Of all the rollouts of a step

MODULE = '<script type="module" src="static/app.js"></script>'
LINKED = re.compile(
    r'<link rel="(icon|stylesheet)" href="static/([^"]+)"[^>]*>|<script src="static/([^"]+)" defer></script>'
)


def report_of(
    run_dir: Path, readers: Callable[[], Read], *, now: float, status: Mapping[str, Any] | None = None
) -> tuple[str, str]:
    """Return the report, and what it lacks, or "". `status` is that of the run's node, where it is led now; `now` is
    the wall clock, in seconds. Blocking."""
    files = FigureFiles(run_dir)
    files.look(is_last=True)
    found = files.figures
    at = now if status is not None else found.ended or found.began or now
    # A report may be passed on: how to join and the addresses of other people's nodes are not in it.
    known = {**(status or found.summary or last_status(found)), "join": "", "publics": [], "leaves": []}
    shown = encode(digest(known, found.config, began=found.began, now=at, live=status is not None))
    rollouts = _rollouts(run_dir, readers)
    kept = {
        "snapshot": msgspec.Raw(snapshot_of(files, shown, found.events, name=run_dir.absolute().name)),
        "written": now,
        "answers": {
            "api/timeline": _timeline(run_dir),
            "api/rollouts": rollouts,
            "api/events": {"events": [], "next": None},
        },
    }
    return _page(encode(kept).decode()), rollouts["fault"]


def _timeline(run_dir: Path) -> dict[str, Any]:
    timeline, until = kept_timeline(run_dir)
    lanes = timeline.answer([], 0.0, SOON, now=until)["all"][:MAX_ASKED]
    return {**timeline.answer([one["lane"] for one in lanes], 0.0, SOON, now=until), "all": lanes}


def _rollouts(run_dir: Path, readers: Callable[[], Read]) -> dict[str, Any]:
    """Groups from the last step that is kept, the middle one and the first, as the page asks for them."""
    try:
        if not (steps := sampled_steps(run_dir)):
            raise UserError("the run has recorded no rollouts, or keeps none of them any more")
        ask = partial(read_groups, run_dir, readers(), before=int(SOON), count=GROUPS_OF_A_STEP, chars=TEXT_CHARS)
        found = [ask(step=step) for step in reversed(steps)]
    except (Damaged, UserError, OSError, ImportError) as fault:
        return {"groups": [], "next": None, "fault": str(fault)}
    faults = dict.fromkeys(one["fault"] for one in found if one["fault"])
    return {"groups": [group for one in found for group in one["groups"]], "next": None, "fault": "; ".join(faults)}


def _page(kept: str) -> str:
    """index.html with all that it loads inside it. Its modules come by an import map, each as a data URL."""
    inline: dict[str, list[str]] = {"script": ["data:"], "style": []}

    def within(tag: str, text: str, attributes: str = "") -> str:
        inline[tag].append(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'")
        return f"<{tag}{attributes}>{text}</{tag}>"

    def linked(match: re.Match[str]) -> str:
        kind, style, script = match.groups()
        if kind == "icon":
            return ""
        return within("style", _static(style)) if style else within("script", _static(script))

    modules = {path.name: path.read_text().replace('from "./', 'from "page/') for path in STATIC.glob("*.js")}
    urls = {f"page/{name}": f"data:text/javascript;base64,{_base64(text)}" for name, text in modules.items()}
    page = LINKED.sub(linked, _static("index.html"))
    code = [
        # A "<" within a string of JSON: whatever is in it, no tag begins there.
        f'<script type="application/json" id="kept">{kept.replace("<", chr(92) + "u003c")}</script>',
        within("script", json.dumps({"imports": urls}), ' type="importmap"'),
        within("script", 'import "page/app.js";', ' type="module"'),
    ]
    page = page.replace(MODULE, "").replace("</body>", "\n".join([*code, "</body>"]))
    allowed = "; ".join(f"{tag}-src {' '.join(some)}" for tag, some in inline.items())
    policy = f'<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; {allowed}">'
    return page.replace("<!doctype html>", f"<!doctype html>\n{MARK}", 1).replace("<head>", f"<head>\n  {policy}", 1)


def _static(name: str) -> str:
    return (STATIC / name).read_text()


def _base64(text: str) -> str:
    return b64encode(text.encode()).decode()


def write_report(run_dir: Path, to: Path | None, readers: Callable[[], Read]) -> tuple[Path, str]:
    """Write the report of `run_dir` to `to`, by default to report.html in it. Return where it is, and what it lacks.
    Raise UserError if it cannot be written."""
    path = to or run_dir / "report.html"
    if path.exists() and not _is_report(path):
        raise UserError(f"{path} exists and is not a report: remove it, or name another file with --to")
    if not path.absolute().parent.is_dir():
        raise UserError(f"{path.parent} is not a directory: make it, or name another file with --to")
    page, lacks = report_of(run_dir, readers, now=time.time())
    try:
        write_atomically(path, page.encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    return path, lacks


def _is_report(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return MARK in file.read(200)
    except OSError:
        return False
