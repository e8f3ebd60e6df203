"""Run directories: made once, locked, resumed with what may change and nothing else."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import UserError
from swarm.learner.checkpoint.files import checkpoint_path, commit
from swarm.run.directory import (
    BASE,
    LOGS,
    SUMMARY,
    Origin,
    begin_again,
    create_run_directory,
    forked_config,
    kept_line,
    locked,
    read_values,
    remove_run_directory,
    resumed_config,
    write_config,
)
from swarm.run.prompts import open_task
from swarm.settings import CHANGEABLE, LeadConfig


def made(tmp_path: Path, **values: Any) -> Path:
    path = tmp_path / "run"
    create_run_directory(path, LeadConfig(**values))
    return path


def test_a_run_is_resumed_as_it_was_configured(tmp_path: Path) -> None:
    config = LeadConfig(seed=7, learning_rate=0.5, group_size=4, bootstrap=("127.0.0.1:1",))
    create_run_directory(tmp_path / "run", config)
    again = resumed_config(tmp_path / "run", {"seed": None, "steps": None})
    assert again == config.model_copy(update={"run_dir": tmp_path / "run"})
    changes = {"steps": 300, "max_staleness": 4, "trainer_ranks": 2, "host": "::1", "tokens_per_micro_batch": 4096}
    assert changes.keys() <= CHANGEABLE
    assert resumed_config(tmp_path / "run", changes) == again.model_copy(update=changes)
    with pytest.raises(UserError, match="already holds a run or other files"):
        create_run_directory(tmp_path / "run", LeadConfig())


@pytest.mark.parametrize(("name", "value"), [("seed", 1), ("rewards", {"random": 1.0})])
def test_what_makes_a_run_what_it_is_cannot_change_but_may_be_said_again(tmp_path: Path, name: str, value: Any) -> None:
    path = made(tmp_path, task="jsonl:x", rewards=["numeric=1", "boxed=0.1"])
    with pytest.raises(UserError, match=f"--{name} cannot change when a run is resumed: begin a new one"):
        resumed_config(path, {name: value})
    kept = json.loads((path / "config.json").read_text())[name]
    again = ["boxed=0.1", "numeric"] if name == "rewards" else kept
    assert getattr(resumed_config(path, {name: again}), name) == kept


def test_a_model_and_a_file_of_questions_may_have_been_moved(tmp_path: Path) -> None:
    path = made(tmp_path, task="jsonl:here/q.jsonl")
    again = resumed_config(path, {"model": "/other/base", "task": "hf:/other/q.csv"})
    assert (again.model, again.task) == ("/other/base", "hf:/other/q.csv")
    for task in ("copy", "gym:leg_counting", "python:my:Task"):
        with pytest.raises(UserError, match="--task cannot change when a run is resumed"):
            resumed_config(path, {"task": task})


def test_a_file_changes_what_may_change_and_flags_go_before_it(tmp_path: Path) -> None:
    path, file = made(tmp_path, task="sort"), tmp_path / "more.toml"
    file.write_text('[task]\ntask = "sort"\n[eval]\ntarget = 0.5\n[learn]\nsteps = 300\n')
    again = resumed_config(path, {"steps": 400}, file)
    assert (again.target, again.steps) == (0.5, 400)
    file.write_text("[task]\nmax_prompt_tokens = 99\n")
    with pytest.raises(UserError, match="--max-prompt-tokens cannot change when a run is resumed"):
        resumed_config(path, {}, file)
    file.write_text('[task]\ntask = "copy"\n')
    with pytest.raises(UserError, match="--task cannot change when a run is resumed"):
        resumed_config(path, {}, file)
    for content, words in (
        ("alarms = 1\n", "line 1: alarms is no setting"),
        ("[learn]\nsteps = 0\n", r"more.toml, line 2: learn.steps = 0: "),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=words):
            resumed_config(path, {}, file)


def test_the_port_that_samplers_know_is_kept(tmp_path: Path) -> None:
    path = made(tmp_path, port=0)
    assert resumed_config(path, {}).port == 0
    (path / "node.json").write_text('{"url": "http://127.0.0.1:4321", "join": "echo1:x"}\n')
    assert resumed_config(path, {}).port == 4321
    assert resumed_config(path, {"port": 5}).port == 5
    write_config(path, LeadConfig(port=77))
    assert resumed_config(path, {}).port == 77, "a port that was asked for is asked for again"


def test_what_is_no_run_is_said_so(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match="is not a run directory"):
            resumed_config(path, {})
    for content in (b"", b"{", b"[]", b"\xff", b'{"stepz": 1}', b'{"steps": -1}'):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(UserError, match=r"config\.json is damaged or of another release") as error:
            resumed_config(tmp_path, {})
        assert "\n" not in str(error.value)


def test_a_finished_run_goes_on_only_with_more_to_do(tmp_path: Path) -> None:
    path = made(tmp_path, steps=200, target=0.5)
    (path / SUMMARY).write_text("{}")
    for flags in ({}, {"steps": 200}, {"steps": 100}, {"target": 0.5}):
        with pytest.raises(UserError, match="is finished: pass --steps with more than 200 to go on"):
            resumed_config(path, flags)
    assert resumed_config(path, {}, finished=True).steps == 200
    assert resumed_config(path, {"steps": 201}).steps == 201
    assert resumed_config(path, {"target": 0.75}).target == 0.75
    write_config(path, LeadConfig(steps=200, max_cost=8.0))
    for flags in ({}, {"max_cost": 8.0}, {"max_cost": 5.0}):
        with pytest.raises(UserError, match="more than 200 or --max-cost with more than 8 to go on"):
            resumed_config(path, flags)
    assert resumed_config(path, {"max_cost": 9.0}).max_cost == 9.0
    begin_again(path, resumed_config(path, {"steps": 300}))
    assert resumed_config(path, {}).steps == 300, "it was made longer and killed"


def test_one_learner_leads_a_run(tmp_path: Path) -> None:
    path = made(tmp_path)
    with locked(path), pytest.raises(UserError, match="another learner leads the run"), locked(path):
        pass
    with locked(path):
        pass


def test_a_run_is_closed_to_other_users_also_one_of_an_older_release(tmp_path: Path) -> None:
    path = made(tmp_path)
    for before in (path.stat().st_mode, 0o755):
        path.chmod(before)
        with locked(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_run_that_never_began_leaves_nothing_but_logs(tmp_path: Path) -> None:
    """Those of a demo say why."""
    path = tmp_path / "runs" / "first"
    (path / LOGS).mkdir(parents=True)
    (path / LOGS / "learner.log").write_text("no such model\n")
    create_run_directory(path, LeadConfig())
    (path / "journal").mkdir()
    remove_run_directory(path, keep_logs=True)
    assert [entry.relative_to(path) for entry in path.rglob("*")] == [Path(LOGS), Path(LOGS) / "learner.log"]
    create_run_directory(path, LeadConfig())
    remove_run_directory(path, keep_logs=False)
    assert not path.exists()


def trained(path: Path, *steps: int) -> Path:
    """Checkpoints of a run, as far as a fork reads them."""
    for step in steps:
        partial = path / "checkpoints" / "partial"
        partial.mkdir(parents=True)
        (partial / "trainer.json").write_text(f'{{"step": {step}, "lineage": "", "parameters": 1}}')
        (partial / "config.json").write_text("{}")
        (partial / "model.safetensors").write_text(f"weights of {step}")
        (partial / "trainer.safetensors").write_text("optimiser")
        commit(partial, checkpoint_path(path / "checkpoints", step))
    return path


def test_a_fork_has_the_settings_of_its_origin_but_for_what_is_said(tmp_path: Path) -> None:
    path = trained(made(tmp_path, seed=7, group_size=4, port=77, state_dir=tmp_path / "key"), 2, 4)
    file = tmp_path / "more.toml"
    file.write_text('[learn]\ngroups_per_step = 8\nobjective = "cispo"\n')
    flags = {"learning_rate": 0.5, "objective": "tis", "run_dir": tmp_path / "fork", "seed": None}
    config, origin = forked_config(path, flags, file)
    assert (config.learning_rate, config.objective, config.groups_per_step) == (0.5, "tis", 8)
    assert (config.seed, config.group_size, config.port) == (7, 4, 77)
    assert config.state_dir is None
    adapted, _ = forked_config(path, {"run_dir": tmp_path / "fork", "adapter": 4})
    rates = [one.resolved_learning_rate for one in (resumed_config(path, {}), adapted)]
    assert rates == [1e-3, 1e-2], "nobody had asked for that of the run"
    assert origin == Origin(run=path, step=None, best=False, model="tiny")
    assert open_task(config).held_out(20) == open_task(resumed_config(path, {})).held_out(20)


def test_a_fork_holds_the_model_that_it_begins_with_and_says_where_it_is_from(tmp_path: Path) -> None:
    path = trained(made(tmp_path), 2, 4)
    before = {one: one.read_bytes() for one in path.rglob("*") if one.is_file()}
    said: list[str] = []
    for step, came_from in ((None, 4), (2, 2)):
        config, origin = forked_config(path, {"run_dir": tmp_path / f"fork-{step}"}, step=step)
        assert config.run_dir is not None
        create_run_directory(config.run_dir, config, origin, said.append)
        assert (config.run_dir / BASE / "model.safetensors").read_text() == f"weights of {came_from}"
        assert not (config.run_dir / BASE / "trainer.safetensors").exists()
        told = read_values(config.run_dir)["from"]
        assert told == {"run": str(path), "step": came_from, "best": False, "model": "tiny"}
    assert said[0] == f"a new run with the model of {path} after 4 steps, and a fresh optimiser"
    assert {one: one.read_bytes() for one in path.rglob("*") if one.is_file()} == before


def test_a_fork_that_was_moved_is_resumed_and_forked_again(tmp_path: Path) -> None:
    config, origin = forked_config(trained(made(tmp_path), 4), {"run_dir": tmp_path / "fork"})
    create_run_directory(tmp_path / "fork", config, origin, lambda line: None)
    moved = (tmp_path / "fork").rename(tmp_path / "moved")
    again = resumed_config(moved, {})
    assert again.model == str(moved / BASE)
    begin_again(moved, again)
    assert read_values(moved)["from"]["step"] == 4
    assert forked_config(trained(moved, 6), {})[1].model == "tiny"


def test_a_fork_without_a_model_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    path = made(tmp_path)
    with pytest.raises(UserError, match="leave --model out"):
        forked_config(path, {"model": "tiny"})
    with pytest.raises(UserError, match="give one of them"):
        forked_config(path, {}, step=1, best=True)
    with pytest.raises(UserError, match="is not a run directory"):
        forked_config(tmp_path / "nowhere", {})
    config, origin = forked_config(path, {"run_dir": tmp_path / "fork"})
    with pytest.raises(UserError, match="has no checkpoint yet"):
        create_run_directory(tmp_path / "fork", config, origin)
    assert not (tmp_path / "fork").exists()


def test_what_is_kept_is_said_with_the_command_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_NODE_COMMAND", "bin/echo-node")
    go_on = f"go on with:  bin/echo-node lead --resume {tmp_path}"
    kept = [kept_line(tmp_path, *at, steps=9) for at in [(None, None), (7, 5), (7, 7), (0, None)]]
    assert kept == [
        f"stopped while it was starting; {tmp_path} keeps what it held; {go_on}",
        f"stopped at step 7 of 9; {tmp_path} keeps the checkpoint of step 5, the batches since step 5, "
        f"to be trained on again; {go_on}",
        f"stopped at step 7 of 9; {tmp_path} keeps the checkpoint of step 7; {go_on}",
        f"stopped at step 0 of 9; {tmp_path} keeps what it held; {go_on}",
    ]
    (tmp_path / SUMMARY).write_text("{}")
    assert kept_line(tmp_path, 9, 9, steps=9) == f"finished at step 9; run directory {tmp_path}"
