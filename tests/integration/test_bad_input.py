"""Bad input: one clear line on stderr that says what to do next, exit status 2, nothing left behind."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.integration.processes import command


def _refused(*arguments: str) -> str:
    """The one line that the command says before it gives up."""
    alone = ("--host", "127.0.0.1") if arguments[0] == "lead" and "--host" not in arguments else ()
    done = command(*arguments, *alone)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "joins with" not in done.stdout
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("echo-node: ")
    return done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--task", "chess"), "known tasks: copy"),
        (("--max-staleness", "-1"), "greater than or equal to 0"),
        (("--max-staleness", "1", "--publish-every-steps", "3"), "lower the one or raise the other"),
        (("--model", "/", "--task", "copy"), "no config.json"),
        (("--config", "/no/such.toml"), "cannot read the configuration"),
        (("--bootstrap", "echo1:abc"), "copy the whole line"),
    ],
)
def test_lead_refuses(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    run_dir = tmp_path / "run"
    assert words in _refused("lead", "--port", "0", "--run-dir", str(run_dir), *arguments)
    assert not run_dir.exists()


@pytest.mark.slow
def test_lead_refuses_a_task_before_anything_is_trained(tmp_path: Path) -> None:
    data, run_dir = tmp_path / "sums.jsonl", tmp_path / "run"
    rows = [{"prompt": f"{n}=", "answer": n, "held_out": n % 4 == 0} for n in range(20)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ("--task", f"jsonl:{data}", "--max-new-tokens", "8", "--rewards", "numeric=1", "--chat")
    line = _refused("lead", "--port", "0", "--run-dir", str(run_dir), *asked)
    assert "chat needs a chat template, and the model 'tiny' has none" in line
    assert not run_dir.exists()


@pytest.mark.slow
def test_lead_check_says_what_it_found_and_leaves_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = command("lead", "--check", "--host", "127.0.0.1", "--port", "0", "--run-dir", str(run_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the model has " in done.stdout
    assert done.stdout.endswith("the run can begin: leave --check out\n")
    assert list(tmp_path.iterdir()) == []


def test_lead_refuses_a_port_in_use_and_leaves_no_run_directory(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        line = _refused("lead", "--host", "127.0.0.1", "--port", port, "--run-dir", str(tmp_path / "run"))
    assert f"port {port}" in line
    assert "--port" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--bootstrap", "host:port:x"), "is not an address"),
        (("--bootstrap", "127.0.0.1", "--engine", "sglang"), "'auto', 'transformers', 'vllm' or 'mlx'"),
    ],
)
def test_join_refuses(arguments: tuple[str, ...], words: str) -> None:
    assert words in _refused("join", *arguments)


def test_status_of_nobody_is_one_line() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        assert "no node answers" in _refused("status", f"127.0.0.1:{port}")


def test_demo_refuses_the_directory_of_another_demo(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    assert "choose another --run-dir" in _refused("demo", "--run-dir", str(tmp_path / "run"))


def test_demo_refuses_to_kill_its_only_sampler(tmp_path: Path) -> None:
    assert "--samplers 2" in _refused("demo", "--samplers", "1", "--kill-one", "--run-dir", str(tmp_path / "run"))


@pytest.mark.slow
def test_an_unknown_device_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "lead.toml").write_text('[trainer]\ndevice = "abacus"\n')
    arguments = ("lead", "--port", "0", "--run-dir", str(tmp_path / "run"), "--config", str(tmp_path / "lead.toml"))
    assert "--device abacus" in _refused(*arguments)
