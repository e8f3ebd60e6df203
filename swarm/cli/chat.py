"""`chat`: ask the policy of a run that is led on this machine, in the terminal."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from swarm.errors import UserError
from swarm.types import printable

ENDED_AT_ONCE = "(the model ended its answer at once)"
POLL_S = 0.1  # Between two looks for a model that is loading
ANSWER_S = 130.0  # The learner itself says after 120 (QUESTION_S of rollout/api.py) that nobody has answered


def chat(
    run: Annotated[str, typer.Argument(help="Directory of a run that is led, or any model as `serve` takes it.")],
    question: Annotated[str | None, typer.Argument(help="Ask only this. Default: what stdin has, or a chat.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
) -> None:
    """Talk with the policy of a learner that runs here, whose samplers answer, or with a model that is served
    meanwhile. Nothing of it is trained on."""
    with _served(run) as directory:
        talk_with(directory, question, system)


@contextmanager
def _served(run: str) -> Iterator[Path]:
    """Yield the directory that says where to ask."""
    directory = Path(run)
    is_model = any((directory / name).exists() for name in ("checkpoints", "tokenizer.json")) or not directory.exists()
    if (directory / "inference.json").exists() or not is_model:
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="echo-node-") as made:
        command = [sys.executable, "-m", "swarm", "serve", run, "--address", made]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, process_group=0) as serving:
            try:
                while serving.poll() is None and not Path(made, "inference.json").exists():
                    time.sleep(POLL_S)
                if serving.returncode is not None:
                    raise typer.Exit(serving.returncode)  # It has said why
                yield Path(made)
            finally:
                serving.terminate()


def talk_with(run_dir: Path, question: str | None, system: str | None) -> None:
    begun = [] if system is None else [{"role": "system", "content": system}]
    if question is None and not sys.stdin.isatty():
        question = sys.stdin.read()
    if question is not None:
        typer.echo(_answer(run_dir, [*begun, {"role": "user", "content": question}]).rstrip() or ENDED_AT_ONCE)
        return
    typer.echo("/reset begins again, Ctrl-D ends")
    messages = begun
    while True:
        try:
            said = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if said in ("", "/reset"):
            messages = begun if said else messages
            continue
        asked = [*messages, {"role": "user", "content": said}]
        try:
            answer = _answer(run_dir, asked)
        except (UserError, KeyboardInterrupt) as fault:
            # The chat goes on as if this had not been asked.
            typer.echo(f"echo-node: {fault}" if isinstance(fault, UserError) else "", err=True)
            continue
        typer.echo(answer.rstrip() or ENDED_AT_ONCE)
        messages = [*asked, {"role": "assistant", "content": answer}]


def _fault(status: int, body: Any) -> str:
    try:
        return printable(json.load(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the learner answered with the status {status}"


def _answer(run_dir: Path, messages: list[dict[str, str]]) -> str:
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import ProxyHandler, Request, build_opener

    from swarm.inference.server import ADDRESS

    try:
        place = json.loads((run_dir / ADDRESS).read_text())
        headers = {"Authorization": f"Bearer {place['token']}"}
        asked = Request(f"{place['url']}/v1/chat/completions", json.dumps({"messages": messages}).encode(), headers)
        # This machine is asked, without a proxy.
        with build_opener(ProxyHandler({})).open(asked, timeout=ANSWER_S) as answer:
            text = str(json.load(answer)["choices"][0]["message"]["content"])
    except HTTPError as error:
        raise UserError(_fault(error.code, error)) from error
    except TimeoutError as error:
        raise UserError(f"no sampler answered within {ANSWER_S:g} s: `echo-node status` shows who is there") from error
    except (OSError, HTTPException, ValueError, KeyError) as error:
        raise UserError(f"no learner answers in {run_dir}: name the directory of a run that is led now") from error
    # Volunteers drew it: no escape of theirs reaches the terminal.
    return "\n".join(printable(line) for line in text.expandtabs().split("\n"))
