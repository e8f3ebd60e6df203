"""A run directory that a disk, a copy or a person has damaged: every command says so in one line, or does not mind."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random

import msgspec
import pytest
import typer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from swarm.cli import run as cli
from swarm.learner.checkpoint.files import STATE, TENSORS, TrainerState, being_written, link_best
from swarm.node.identity import load_or_create_key, next_generation
from swarm.node.network import NodeNetwork
from swarm.rollout.journal.journal import DATABASE
from swarm.run.directory import create_run_directory, write_json
from swarm.run.log import RunLog
from swarm.run.prompts import RECORD, open_task
from swarm.settings import LeadConfig
from tests.unit.rollout.journal.test_journal import SIZE, damage
from tests.unit.rollout.journal.test_verify import GROUPS, STEPS, _record

BEGAN = "2025-01-01T00:00:00"
KEPT = (2, 4)
"""Steps of the checkpoints of the run that is damaged here; its journal has four batches."""


COMMANDS = typer.main.get_command(cli.app)


class ListensNow(BaseException):
    """A learner that was not refused is about to be heard of."""


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """Some bits all over the file, the same in each run."""
    content, draw = bytearray(path.read_bytes()), Random(len(path.name))
    for _ in range(1 + len(content) // 1000):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "flipped": flip,
    "empty": empty,
    "deleted": Path.unlink,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run of four steps, made without a trainer; not to be changed."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    config = LeadConfig(
        run_dir=run_dir, groups_per_step=GROUPS, group_size=SIZE, model="tiny", host="127.0.0.1", port=0, steps=4
    )
    create_run_directory(run_dir, config)
    lineages = asyncio.run(_record(run_dir))
    for step in KEPT:
        with being_written(run_dir / f"checkpoints/step-{step:06}", 100) as partial:
            state = TrainerState(step=step, lineage=lineages[step].hex(), parameters=3)
            (partial / STATE).write_bytes(msgspec.json.encode(state))
            (partial / TENSORS).write_bytes(bytes(range(100)))
            _write_model(partial)
    link_best(run_dir / "checkpoints", 2)
    (run_dir / "model").mkdir()
    tokenizer = Tokenizer(WordLevel({letter: at for at, letter in enumerate("?0123456789=")}, unk_token="?"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.save(str(run_dir / "model/tokenizer.json"))
    (run_dir / "model/tokenizer_config.json").write_text('{"pad_token": "?"}')
    log = RunLog(run_dir)
    log.event("evaluated", version=2, exact_match=0.75, prompts=8)
    log.event("sampler_joined", node="a" * 32)
    for step in range(1, STEPS + 1):
        log.metrics({"step": step, "reward": 0.5, "cost_total": 1.0, "rollouts_accepted": 4, "tokens_accepted": 16})
    log.close()
    digest = open_task(config).data_digest
    write_json(run_dir / RECORD, {"data_digest": digest, "most_tokens": 32, "began": BEGAN})
    (run_dir / "node.json").write_text('{"url": "http://127.0.0.1:4321", "join": "echo1:x"}\n')
    (run_dir / "summary.json").write_text('{"state": "finished", "step": 4}\n')
    load_or_create_key(run_dir / "identity")
    next_generation(run_dir / "identity")
    _close_log(run_dir)
    return run_dir


def _write_model(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "qwen3", "dtype": "bfloat16"}')
    (directory / "model.safetensors").write_bytes(bytes(range(100)))


def _close_log(run_dir: Path) -> None:
    """Have all rows in the database itself, so that damage to it is damage to them."""
    with closing(sqlite3.connect(run_dir / DATABASE)) as found:
        found.execute("PRAGMA wal_checkpoint(TRUNCATE)")


@pytest.fixture
def run_dir(whole: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(whole, tmp_path / "run", symlinks=True))


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*_: object, **__: object) -> int:
        raise ListensNow

    async def stop(_: object) -> None:
        pass

    monkeypatch.setattr(NodeNetwork, "start", start)
    monkeypatch.setattr(NodeNetwork, "stop", stop)
    # To put the command line together takes longer than most of these commands.
    monkeypatch.setattr(cli, "app", COMMANDS)


class Terminal:
    """Runs commands as a person does, in this process."""

    def __init__(self, capture: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capture = capture
        self._monkeypatch = monkeypatch
        self.out = self.err = ""

    def __call__(self, *arguments: object) -> int | None:
        """The exit status, None for a learner that would be heard of; anything but a line is raised."""
        self._monkeypatch.setattr(sys, "argv", ["echo-node", *map(str, arguments)])
        self._capture.readouterr()
        try:
            cli.run()
        except SystemExit as end:
            return int(end.code or 0)
        except BaseExceptionGroup as group:
            if group.subgroup(ListensNow) is None:
                raise
            return None
        except ListensNow:
            return None
        finally:
            self.out, self.err = self._capture.readouterr()
        raise AssertionError

    def refuses(self, *arguments: object) -> str:
        """The one line on stderr of a command that ends with 1 or 2."""
        status = self(*arguments)
        assert status in (1, 2), (arguments, status, self.out)
        assert self.err.count("\n") == 1, self.err
        assert self.err.startswith("echo-node: ")
        return self.err


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, listening: None) -> Terminal:
    return Terminal(capsys, monkeypatch)


def files_of(run_dir: Path) -> list[str]:
    names = [path.relative_to(run_dir).as_posix() for path in run_dir.rglob("*") if path.is_file()]
    return sorted(name for name in names if not name.endswith((".lock", "-shm", "-wal")))


def contents(run_dir: Path) -> dict[str, bytes]:
    return {name: (run_dir / name).read_bytes() for name in files_of(run_dir)}


RESUMES_WITHOUT = ("checkpoints/", "model/", "metrics", "events", "node.json", "summary")
"""What a run that is resumed can do without: it is made again, or an older one is used, with a word."""


ALIKE = "checkpoints/step-000002/"
"""Nothing is done with this that is not done with the other next to it."""


def resume(run_dir: Path) -> tuple[object, ...]:
    return ("lead", "--resume", run_dir, "--steps", 9)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] if kind in ("truncated", "empty") else []) for kind in DAMAGES]
)
def test_every_file_and_every_command(whole: Path, tmp_path: Path, terminal: Terminal, kind: str) -> None:
    """No command ends in a traceback, changes what it reads, or says more than one line; what matters is refused."""
    for name in files_of(whole):
        if name.startswith(ALIKE):
            continue
        run_dir = tmp_path / name / "run"
        shutil.copytree(whole, run_dir, symlinks=True)
        DAMAGES[kind](run_dir / name)
        before = contents(run_dir)
        commands: dict[str, tuple[object, ...]] = {"verify": ("verify", run_dir)}
        if not name.startswith(("checkpoints/", "identity/")):
            commands["rollouts"] = ("export", "rollouts", run_dir, "--to", tmp_path / name / "r.jsonl")
            commands["report"] = ("report", run_dir, "--to", tmp_path / name / "report.html")
        if name.startswith(("checkpoints/", "config")):
            commands["model"] = ("export", "model", run_dir, "--to", tmp_path / name / "model")
            commands["best"] = ("export", "model", run_dir, "--best", "--to", tmp_path / name / "best")
        for command, arguments in commands.items():
            status = terminal(*arguments)
            assert status in (0, 1, 2), (name, command)
            assert terminal.err.count("\n") <= 1, (name, command, terminal.err)
            assert status == 0 or terminal.err, (name, command)
        assert contents(run_dir) == before, name
        if terminal(*resume(run_dir)) is not None:
            assert terminal.err.count("\n") == 1, (name, terminal.err)
            assert not name.startswith(RESUMES_WITHOUT), terminal.err
            assert " joins with" not in terminal.out
            # Nothing was begun: it is as it was, but for the lock and the number of starts.
            now = contents(run_dir)
            assert {n for n in before if now.get(n) != before[n]} <= {"identity/generation"}, name
        shutil.rmtree(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("config.json", "truncated", "config.json is damaged or of another release"),
        ("config.json", "deleted", "it has no config.json"),
        (DATABASE, "truncated", "journal.db is damaged"),
        (DATABASE, "empty", "journal.db is damaged (it is empty)"),
        (DATABASE, "deleted", "journal.db is damaged (it is not there)"),
        ("task.json", "truncated", "task.json is damaged"),
        ("identity/node.key", "truncated", "node.key is not a node key"),
        ("identity/node.key", "deleted", "node.key is gone, by which others know this node"),
        ("identity/generation", "empty", "generation is not a number of starts"),
    ],
)
def test_a_learner_is_refused_at_once(run_dir: Path, terminal: Terminal, name: str, kind: str, words: str) -> None:
    DAMAGES[kind](run_dir / name)
    assert words in terminal.refuses(*resume(run_dir))
    assert (run_dir / "summary.json").exists()


def test_batches_that_cannot_be_trained_on_again_are_refused(run_dir: Path, terminal: Terminal) -> None:
    truncate(run_dir / "checkpoints/step-000004" / TENSORS)
    assert terminal(*resume(run_dir)) is None
    assert "damaged and passed over: step-000004" in terminal.out
    damage(run_dir, 7, 0)
    line = terminal.refuses(*resume(run_dir))
    assert "the payload of t7/0 is lost or was changed" in line
    assert f"echo-node lead --from {run_dir}" in line


def test_rows_that_were_changed_are_refused(run_dir: Path, terminal: Terminal) -> None:
    shutil.rmtree(run_dir / "checkpoints/step-000004")
    with closing(sqlite3.connect(run_dir / DATABASE)) as found, found:
        found.execute("UPDATE rollouts SET reward = reward + 1 WHERE number = 7 AND idx = 0")
    assert "the rows of batch 3 were changed" in terminal.refuses(*resume(run_dir))


def test_each_damaged_checkpoint_is_named(run_dir: Path, terminal: Terminal) -> None:
    assert terminal("verify", run_dir) == 0
    truncate(run_dir / "checkpoints/step-000002" / TENSORS)
    flip(run_dir / "checkpoints/step-000004/model.safetensors")
    assert "checkpoints/step-000002 is damaged" in terminal.refuses("verify", run_dir, "--json")
    *lines, count, last = terminal.out.splitlines()
    assert lines == [
        f"damaged: checkpoints/step-000002: {TENSORS} has 50 bytes instead of 100",
        "damaged: checkpoints/step-000004: model.safetensors is not what was written there",
    ]
    assert "0 checkpoints, 2 parts damaged; no rollout was too old, lost or used twice" in count
    assert list(json.loads(last)["damaged_parts"]) == ["checkpoints/step-000002", "checkpoints/step-000004"]
    flip(run_dir / "checkpoints/step-000002/model.safetensors")
    assert "no checkpoint in" in terminal.refuses("export", "model", run_dir, "--to", run_dir / "m")


def test_an_export_of_an_older_model_says_that_newer_ones_are_damaged(run_dir: Path, terminal: Terminal) -> None:
    flip(run_dir / "checkpoints/step-000004/model.safetensors")
    assert terminal("export", "model", run_dir, "--to", run_dir.parent / "m") == 0
    assert "damaged and passed over: step-000004" in terminal.err
    assert "the model of step 2 in" in terminal.out


def test_sqlite_makes_a_broken_index_again(run_dir: Path, terminal: Terminal) -> None:
    """As docs/recovery.md has it."""
    database = run_dir / DATABASE
    with closing(sqlite3.connect(database)) as found:
        (page,) = found.execute("SELECT rootpage FROM sqlite_master WHERE name = 'groups_by_step'").fetchone()
        (size,) = found.execute("PRAGMA page_size").fetchone()
    with database.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    assert "journal.db is damaged" in terminal.refuses(*resume(run_dir))
    with closing(sqlite3.connect(database)) as found:
        dump = "\n".join(found.iterdump())
        (version,) = found.execute("PRAGMA user_version").fetchone()
    with closing(sqlite3.connect(run_dir / "mended.db")) as mended:
        mended.executescript(f"{dump}\nPRAGMA user_version = {version};")
    for path in run_dir.glob("journal.db*"):
        path.unlink()
    (run_dir / "mended.db").replace(database)
    assert terminal("verify", run_dir) == 0, terminal.err
    assert terminal(*resume(run_dir)) is None, terminal.err


def test_files_of_a_run_have_one_mode_and_secrets_are_private(run_dir: Path, whole: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in whole.iterdir() if path.is_file()}
    assert len(set(modes.values())) == 1, modes
    assert {path.stat().st_mode & 0o777 for path in (whole / "identity").iterdir()} == {0o600}
