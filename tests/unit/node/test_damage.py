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
from swarm.learner.checkpoint.files import STATE, TENSORS, TrainerState, being_written, commit
from swarm.node.identity import load_or_create_key, next_generation
from swarm.node.metrics import RunLog
from swarm.node.network import NodeNetwork
from swarm.node.prompts import RECORD, check_data, open_task
from swarm.node.rundir import (
    BASE,
    ORIGIN,
    create_run_directory,
    note_life,
    read_values,
    resumed_config,
    write_config,
    write_json,
)
from swarm.node.salvage import salvage
from swarm.rollout.journal.journal import DATABASE, SEGMENTS, Journal
from swarm.rollout.journal.verify import verify_run
from swarm.settings import LeadConfig
from tests.unit.rollout.journal.test_journal import SIZE
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
    (run_dir / "best.partial").mkdir()
    _write_model(run_dir / "best.partial")
    (run_dir / "best.partial/best.json").write_text('{"version": 2, "exact_match": 0.75}')
    commit(run_dir / "best.partial", run_dir / "best")
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
    note_life(run_dir, step=0, device="cpu")
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
    """Have all rows in the database itself, so that damage to it is damage to them, and as a checkpoint leaves it."""
    with closing(sqlite3.connect(run_dir / DATABASE)) as found:
        found.execute("UPDATE meta SET value = ? WHERE name = 'synced'", (STEPS,))
        found.commit()
        found.execute("PRAGMA wal_checkpoint(TRUNCATE)")


@pytest.fixture
def run_dir(whole: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*_: object, **__: object) -> int:
        raise ListensNow

    async def stop(_: object) -> None:
        pass

    monkeypatch.setattr(NodeNetwork, "start", start)
    monkeypatch.setattr(NodeNetwork, "stop", stop)
    monkeypatch.setattr("swarm.node.salvage.sync_path", lambda path: None)
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


RESUMES_WITHOUT = ("best/", "checkpoints/", "model/", "metrics", "events", "environment", "node.json", "summary")
"""What a run that is resumed can do without: it is made again, or an older one is used, with a word."""


ALIKE = ("checkpoints/step-000002/", "rollouts/00000000", "rollouts/00000002")
"""Nothing is done with these that is not done with others beside them."""


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
        run_dir, new = tmp_path / name / "run", tmp_path / name / "new"
        shutil.copytree(whole, run_dir)
        DAMAGES[kind](run_dir / name)
        before = contents(run_dir)
        commands: dict[str, tuple[object, ...]] = {
            "verify": ("verify", run_dir),
            "salvage": ("verify", run_dir, "--salvage", new),
        }
        if not name.startswith(("best/", "checkpoints/", "identity/")):
            commands["rollouts"] = ("export", "rollouts", run_dir, "--to", tmp_path / name / "r.jsonl")
            commands["report"] = ("report", run_dir, "--to", tmp_path / name / "report.html")
        if name.startswith(("best/", "checkpoints/", "config")):
            commands["model"] = ("export", "model", run_dir, "--to", tmp_path / name / "model")
            commands["best"] = ("export", "model", run_dir, "--best", "--to", tmp_path / name / "best")
        for command, arguments in commands.items():
            status = terminal(*arguments)
            assert status in (0, 1, 2), (name, command)
            assert terminal.err.count("\n") <= 1, (name, command, terminal.err)
            assert status == 0 or terminal.err, (name, command)
        assert contents(run_dir) == before, name
        if name == "config.json":
            assert not new.exists()
        else:
            assert terminal("verify", new) == 0, (name, terminal.out, terminal.err)
            assert terminal(*resume(new)) is None, (name, terminal.err)
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
        (DATABASE, "empty", "journal.db is damaged (it is empty or not there)"),
        (DATABASE, "deleted", "journal.db is damaged (it is empty or not there)"),
        ("task.json", "truncated", "task.json is damaged"),
        ("identity/node.key", "truncated", "node.key is not a node key"),
        ("identity/node.key", "deleted", "node.key is gone, by which others know this node"),
        ("identity/generation", "empty", "generation is not a number of starts"),
    ],
)
def test_a_learner_is_refused_before_anybody_hears_of_it(
    run_dir: Path, terminal: Terminal, name: str, kind: str, words: str
) -> None:
    DAMAGES[kind](run_dir / name)
    assert words in terminal.refuses(*resume(run_dir))
    assert (run_dir / "summary.json").exists()


def test_batches_that_cannot_be_trained_on_again_are_refused(run_dir: Path, terminal: Terminal) -> None:
    truncate(run_dir / "checkpoints/step-000004" / TENSORS)
    assert terminal(*resume(run_dir)) is None
    assert "damaged and passed over: step-000004" in terminal.out
    empty(run_dir / SEGMENTS / "00000003.rollouts")
    line = terminal.refuses(*resume(run_dir))
    assert "rollouts of batch 3 are lost" in line
    assert f"echo-node verify {run_dir} --salvage NEW" in line


def test_rows_that_were_changed_are_refused(run_dir: Path, terminal: Terminal) -> None:
    shutil.rmtree(run_dir / "checkpoints/step-000004")
    with closing(sqlite3.connect(run_dir / DATABASE)) as found, found:
        found.execute("UPDATE rollouts SET reward = reward + 1 WHERE number = 7 AND idx = 0")
    assert "the rows of batch 3 were changed" in terminal.refuses(*resume(run_dir))


def test_each_damaged_checkpoint_is_named(run_dir: Path, terminal: Terminal) -> None:
    assert terminal("verify", run_dir) == 0
    truncate(run_dir / "checkpoints/step-000002" / TENSORS)
    flip(run_dir / "checkpoints/step-000004/model.safetensors")
    (run_dir / "best/model.safetensors").unlink()
    assert "checkpoints/step-000002 is damaged" in terminal.refuses("verify", run_dir, "--json")
    *lines, count, last = terminal.out.splitlines()
    assert lines == [
        f"damaged: checkpoints/step-000002: {TENSORS} has 50 bytes instead of 100",
        "damaged: checkpoints/step-000004: model.safetensors is not what was written there",
        "damaged: best: model.safetensors cannot be read: No such file or directory",
    ]
    assert "0 checkpoints, 3 parts damaged; no breach of I1 or I3" in count
    assert list(json.loads(last)["damaged_parts"]) == ["checkpoints/step-000002", "checkpoints/step-000004", "best"]
    flip(run_dir / "checkpoints/step-000002/model.safetensors")
    assert "no checkpoint in" in terminal.refuses("export", "model", run_dir, "--to", run_dir / "m")


def test_an_export_of_an_older_model_says_that_newer_ones_are_damaged(run_dir: Path, terminal: Terminal) -> None:
    flip(run_dir / "checkpoints/step-000004/model.safetensors")
    assert terminal("export", "model", run_dir, "--to", run_dir.parent / "m") == 0
    assert "damaged and passed over: step-000004" in terminal.err
    assert "the model of step 2 in" in terminal.out


# -- salvage -------------------------------------------------------------------------------------------------


def salvaged(run_dir: Path) -> tuple[Path, int, int, str]:
    """The new run directory, its batches, the step that it goes on from, and what was lost. It has no breach."""
    new = run_dir.parent / "new"
    done = salvage(run_dir, new)
    report = verify_run(new, groups_per_step=GROUPS, group_size=SIZE)
    assert report.breaches == []
    assert report.batches == done.batches
    return new, done.batches, done.step, "\n".join(done.lost)


def change(run_dir: Path, *statements: str) -> None:
    with closing(sqlite3.connect(run_dir / DATABASE)) as found, found:
        for statement in statements:
            found.execute(statement)


def test_files_of_a_run_have_one_mode_and_secrets_are_private(run_dir: Path, whole: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in whole.iterdir() if path.is_file()}
    assert len(set(modes.values())) == 1, modes
    assert {path.stat().st_mode & 0o777 for path in (whole / "identity").iterdir()} == {0o600}


def test_a_fork_that_is_salvaged_has_its_first_model_and_its_origin(run_dir: Path) -> None:
    config, origin = (
        resumed_config(run_dir, {}, finished=True),
        {"run": "runs/first", "step": 4, "best": False, "model": "tiny"},
    )
    write_config(run_dir, config, origin)
    (run_dir / BASE).mkdir()
    (run_dir / BASE / "config.json").write_text("{}")
    new, _, _, lost = salvaged(run_dir)
    assert lost == ""
    assert read_values(new)[ORIGIN] == origin
    assert resumed_config(new, {}).model == str(new / BASE)
    assert (new / BASE / "config.json").read_text() == "{}"


def test_of_a_whole_run_nothing_is_lost(run_dir: Path) -> None:
    new, batches, step, lost = salvaged(run_dir)
    assert (batches, step, lost) == (STEPS, 4, "")
    gone = {"summary.json"}
    assert set(files_of(new)) == set(files_of(run_dir)) - gone
    assert (new / "identity/node.key").stat().st_mode & 0o777 == 0o600
    journals = [Journal(path, group_size=SIZE) for path in (run_dir, new)]
    before, after = (journal.load() for journal in journals)
    assert (after.next_batch, after.opened) == (before.next_batch, before.opened)
    assert [group.number for group in after.groups] == [group.number for group in before.groups]
    assert [group.rollouts for group in after.groups] == [group.rollouts for group in before.groups]
    # Samplers know of later versions than the journal may have: what comes next has to be newer than all of them.
    assert after.published is None
    assert all(not group.holders for group in after.groups)


@pytest.mark.parametrize(
    ("statement", "batches", "step"),
    [
        ("UPDATE rollouts SET reward = 9 WHERE number = 6", 3, 2),
        ("UPDATE rollouts SET reward = 9 WHERE number = 2", 1, 0),
        ("DELETE FROM groups WHERE number = 5", 2, 2),
        ("DELETE FROM batches WHERE step = 2", 2, 2),
        ("DELETE FROM rollouts WHERE number = 7 AND idx = 1", 3, 2),
        ("UPDATE rollouts SET oldest = 0 WHERE number = 7", 3, 2),
        ("UPDATE rollouts SET tokens = 1 WHERE number = 7", 3, 2),
        ("UPDATE groups SET number = 1000000 WHERE number = 7", 3, 2),
        ("DELETE FROM nodes", 4, 4),
        ("UPDATE groups SET dropped_at = 2 WHERE number = 8", 4, 4),
        ("UPDATE groups SET version = 9, incarnation = 7 WHERE number = 10", 4, 4),
        ("DELETE FROM groups", 0, 0),
    ],
)
def test_the_journal_ends_before_what_does_not_hold(run_dir: Path, statement: str, batches: int, step: int) -> None:
    change(run_dir, statement)
    new, *found, lost = salvaged(run_dir)
    assert found == [batches, step]
    names = [path.name for path in (new / "checkpoints").iterdir() if path.is_dir()]
    assert sorted(names) == [f"step-{kept:06}" for kept in KEPT if kept <= step]
    assert ("the batches that it was trained on are lost" in lost) == (step < 4)
    steps = [json.loads(line)["step"] for line in (new / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, batches + 1))
    for group in Journal(new, group_size=SIZE).load().groups:
        assert group.version.version <= batches
        assert group.version.incarnation == 0
        assert all(one.rollout.oldest is not None and one.rollout.oldest <= batches for one in group.rollouts)


def test_payloads_count_from_the_checkpoint_on(run_dir: Path) -> None:
    flip(run_dir / SEGMENTS / "00000001.rollouts")
    assert salvaged(run_dir)[1:3] == (4, 4)


def test_without_a_checkpoint_the_run_ends_before_the_first_lost_payload(run_dir: Path) -> None:
    flip(run_dir / SEGMENTS / "00000001.rollouts")
    for step in KEPT:
        flip(run_dir / f"checkpoints/step-{step:06}" / TENSORS)
    _, batches, step, lost = salvaged(run_dir)
    assert (batches, step) == (1, 0)
    assert "checkpoints/step-000002: trainer.safetensors is not what was written there" in lost


def test_what_is_in_the_log_alone_is_salvaged_too(run_dir: Path) -> None:
    """As a learner that was killed leaves it."""
    with closing(sqlite3.connect(run_dir / DATABASE)) as found:
        found.execute("PRAGMA wal_autocheckpoint = 0")
        found.execute("UPDATE rollouts SET reward = 9 WHERE number = 6")
        found.commit()
        left = Path(shutil.copytree(run_dir, run_dir.parent / "left"))
    assert salvaged(left)[1] == 3


def test_a_new_directory_is_asked_for_and_the_learner_has_to_be_stopped(run_dir: Path, terminal: Terminal) -> None:
    from swarm.node.rundir import locked

    with locked(run_dir):
        assert "a learner leads the run" in terminal.refuses("verify", run_dir, "--salvage", run_dir.parent / "new")
    for to in (run_dir, run_dir / "inside", Path("/proc/none")):
        assert "--salvage" in terminal.refuses("verify", run_dir, "--salvage", to) or "cannot write" in terminal.err
    assert terminal("verify", run_dir, "--salvage", run_dir.parent / "new") == 0
    assert "goes on from step 4 with 4 recorded batches: `echo-node lead --resume" in terminal.out
    assert "is not a new directory" in terminal.refuses("verify", run_dir, "--salvage", run_dir.parent / "new")
    check_data(run_dir.parent / "new", open_task(LeadConfig()))


def test_a_key_that_is_lost_is_said_and_the_new_run_has_another(run_dir: Path) -> None:
    truncate(run_dir / "identity/node.key")
    new, _, _, lost = salvaged(run_dir)
    assert "identity/node.key" in lost
    assert "samplers need the new join line" in lost
    assert load_or_create_key(new / "identity")
