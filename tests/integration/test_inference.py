"""`echo-node chat` as a process, against the real endpoint."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import PeerUnreachable
from swarm.inference.server import ADDRESS, serving
from tests.integration.processes import free_port
from tests.unit.inference.scripted import RULES, ScriptedPolicy, drawn, endpoint, letters

pytestmark = pytest.mark.integration


async def typed(*words: str, stdin: str = "", where: Path | None = None) -> tuple[int, str, str]:
    """Return the exit status, stdout and stderr of a command."""
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "swarm", *words, cwd=where, **pipes)
    out, err = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def chat(run_dir: Path, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
    return await typed("chat", str(run_dir), *arguments, stdin=stdin)


async def test_a_question_is_answered_by_the_policy(tmp_path: Path) -> None:
    policy = ScriptedPolicy(drawn("yes$"))
    async with serving(endpoint(policy), tmp_path):
        assert await chat(tmp_path, "is it so?") == (0, "y e s\n", "")
    assert policy.asked == [tuple(letters().encode("is it so?").ids)]
    assert policy.rules == [RULES]


async def test_a_question_from_a_pipe_follows_the_system_prompt_and_no_escape_of_a_volunteer_s_reaches_the_terminal(
    tmp_path: Path,
) -> None:
    policy = ScriptedPolicy(drawn("a\x1bb\nc$"))
    async with serving(endpoint(policy), tmp_path):
        status, out, _ = await chat(tmp_path, "--system", "be short ", stdin="who?")
    assert (status, out.replace(" ", "")) == (0, "a?b\nc\n")
    assert policy.asked == [tuple(letters().encode("be short who?").ids)]


async def test_a_fault_is_one_line(tmp_path: Path) -> None:
    async with serving(endpoint(ScriptedPolicy(PeerUnreachable("no sampler is there: start one"))), tmp_path):
        assert await chat(tmp_path, "?") == (2, "", "echo-node: no sampler is there: start one\n")
    told = f"echo-node: no learner answers in {tmp_path}: name the directory of a run that is led now\n"
    assert await chat(tmp_path, "?") == (2, "", told)
    # A learner that was killed leaves its address behind.
    (tmp_path / ADDRESS).write_text(json.dumps({"url": f"http://127.0.0.1:{free_port()}", "token": "t"}))
    assert await chat(tmp_path, "?") == (2, "", told)


async def test_a_model_that_nobody_trains_is_served_for_a_chat_and_for_any_client(tmp_path: Path) -> None:
    """`chat MODEL` serves it meanwhile; what comes of the process is gone with the chat."""
    pytest.importorskip("torch", reason="torch is not installed")
    status, out, err = await typed("chat", "tiny", "12=")
    assert status == 0, err
    assert out.strip()
    (line,) = [line for line in err.splitlines() if line.startswith("base_url ")]
    port = int(line.split()[1].split(":")[2].partition("/")[0])
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_what_cannot_be_served_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    status, out, err = await chat(tmp_path, "?")
    assert (status, out) == (2, "")
    assert "cannot be loaded" in err.splitlines()[-1]


@pytest.mark.slow
async def test_a_served_model_judges_answers(tmp_path: Path) -> None:
    """The tiny model knows digits alone, so that the judge of the test takes any answer for a yes."""
    pytest.importorskip("openai", reason="the extra agents is not installed")
    (tmp_path / "judge").mkdir()
    recipe = (Path(__file__).parents[2] / "examples" / "judge.py").read_text()
    (tmp_path / "judge.py").write_text(recipe.replace('"yes" in', 'len(answer.choices[0].text) > 0 or "yes" in'))
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "held_out": n == 9} for n in range(10)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = (sys.executable, "-m", "swarm", "serve", "tiny", "--address", "judge")
    serving = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, stderr=asyncio.subprocess.PIPE)
    try:
        assert serving.stderr is not None
        while b"base_url" not in (line := await serving.stderr.readline()):
            assert line, "it ended"
        tried = (*("tasks", "try", "jsonl:sums.jsonl", "--reward", "judge.py:score", "-n", "1"), "--answer", "2")
        status, out, err = await typed(*tried, where=tmp_path)
        assert status == 0, err
        assert "1.0" in out
    finally:
        serving.terminate()
        await serving.wait()
