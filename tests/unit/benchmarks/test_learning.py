"""The learning benchmark: its figures, its one-process runs, and that no process of a swarm outlives it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import learning
from benchmarks.learning import Case, figures_of, plot, row
from benchmarks.learning_forced import OneProcess, run
from benchmarks.learning_swarm import Run, RunFailed, Step, nodes_in, read_run
from swarm.models.device import as_streamed
from swarm.settings import LeadConfig
from swarm.types import VersionId

NOBODY = "127.0.0.1:1"
"""A bootstrap where nobody answers."""


def steps(*rewards: float, every_s: float = 2.0) -> list[Step]:
    return [
        Step(at_s=100 + n * every_s, reward=reward, staleness_mean=n / 2, staleness_max=float(n))
        for n, reward in enumerate(rewards)
    ]


# -- figures -------------------------------------------------------------------------------------------------


def test_the_figures_of_one_run() -> None:
    assert figures_of(Run(steps=steps(*[0.2] * 9, 0.5, 0.9, 0.7), accuracy=0.75)) == {
        "accuracy": 0.75,
        "reward_last10": pytest.approx((7 * 0.2 + 0.5 + 0.9 + 0.7) / 10),
        "reward_per_step": pytest.approx(3.9 / 12),
        "reward_per_s": pytest.approx(3.7 / 22),
        "staleness_mean": 2.75,
        "staleness_max": 11.0,
        "seconds": 22.0,
        "steps_to_reward_0_9": 11,
        "seconds_to_reward_0_9": 20.0,
        "curve": [0.5],
    }


def test_a_row_has_the_median_and_the_range_of_its_seeds() -> None:
    runs = [Run(steps=steps(0.1, reward), accuracy=accuracy) for reward, accuracy in ((0.9, 0.8), (0.2, 0.1), (1, 1))]
    found = row(Case("forced", 4, "tis"), runs)
    assert [found[name] for name in ("mode", "max_staleness", "objective", "runs")] == ["forced", 4, "tis", 3]
    assert (found["accuracy"], found["accuracy_min"], found["accuracy_max"]) == (0.8, 0.1, 1)
    assert (found["steps_to_reward_0_9"], found["seconds_to_reward_0_9"]) == (2, 2.0)
    assert found["staleness_max"] == 1


def test_a_reward_that_most_seeds_never_reach_is_null() -> None:
    found = row(Case("swarm", 16, "grpo"), [Run(steps=steps(0.1, reward), accuracy=0) for reward in (0.9, 0.2, 0.3)])
    assert json.loads(json.dumps(found, allow_nan=False))["seconds_to_reward_0_9"] is None


def test_the_picture_has_a_chart_for_each_freshness_and_a_curve_for_each_bound() -> None:
    runs = [Run(steps=steps(*[0.1] * 20), accuracy=0)]
    drawn = plot([row(Case("swarm", bound, "grpo", fresh), runs) for fresh in ("adaptive", "off") for bound in (1, 8)])
    svg = ElementTree.fromstring(drawn)
    words = list(svg.itertext())
    assert sum("S = 1 (4.8)" in one for one in words) == sum("S = 8 (4.8)" in one for one in words) > 0
    assert len(svg.findall(".//{*}path[@class='line c1']")) == 2


# -- one process ---------------------------------------------------------------------------------------------


def config(max_staleness: int, seed: int = 0) -> LeadConfig:
    return LeadConfig(
        max_staleness=max_staleness, seed=seed, steps=5, groups_per_step=3, group_size=4, eval_prompts=3, warmup_steps=0
    )


def held(process: OneProcess) -> tuple[VersionId | None, torch.Tensor]:
    """The version that the engine says it has, and its weights."""
    weights = torch.cat([p.detach().flatten() for p in process._engine._model.parameters()])
    return process._engine._version, weights.clone()


def published(process: OneProcess) -> torch.Tensor:
    """The trainer's weights as a version of them would be."""
    return torch.cat([as_streamed(p).float().flatten() for p in process._trainer._model.parameters()])


def test_every_batch_is_drawn_by_the_version_that_is_exactly_as_old_as_the_bound(tmp_path: Path) -> None:
    process = OneProcess(config(2), tmp_path)
    versions = [published(process)]
    ages = list[float]()
    for number in range(5):
        step = process.step(number)
        ages.append(step.staleness_mean)
        version, weights = held(process)
        assert version == VersionId(incarnation=0, version=max(0, number - 2))
        assert torch.equal(weights, versions[version.version])
        versions.append(published(process))
    assert ages == [0, 1, 2, 2, 2]
    assert not torch.equal(versions[0], versions[5])


def test_the_newest_version_is_what_is_evaluated(tmp_path: Path) -> None:
    process = OneProcess(config(3), tmp_path)
    process.step(0)
    assert 0 <= process.accuracy() <= 1
    version, weights = held(process)
    assert version == VersionId(incarnation=0, version=1)
    assert torch.equal(weights, published(process))


def test_a_run_in_one_process_is_told_by_its_seed(tmp_path: Path) -> None:
    def rewards(seed: int, name: str) -> list[float]:
        directory = tmp_path / name
        directory.mkdir()
        return [step.reward for step in run(config(1, seed), directory).steps]

    first = rewards(0, "first")
    assert len(first) == 5
    assert rewards(0, "again") == first
    assert rewards(1, "other") != first


# -- a swarm -------------------------------------------------------------------------------------------------


def write_run(run_dir: Path, count: int, evaluated: int) -> None:
    line = {"reward": 0.5, "staleness/mean": 1.5, "staleness/max": 2.0}
    lines = [json.dumps({**line, "time": 100.0 + n}) for n in range(count)]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    held_out = [{"version": 0, "exact_match": 0.0}, {"version": evaluated, "exact_match": 0.9}]
    (run_dir / "summary.json").write_text(json.dumps({"held_out": held_out}))


def test_a_finished_run_is_read_from_its_files(tmp_path: Path) -> None:
    write_run(tmp_path, 3, 3)
    found = read_run(tmp_path, 3)
    assert found.accuracy == 0.9
    assert found.steps[2] == Step(at_s=102.0, reward=0.5, staleness_mean=1.5, staleness_max=2.0)


@pytest.mark.parametrize(("count", "evaluated"), [(2, 2), (3, 2)])
def test_a_run_that_stopped_early_is_no_run(count: int, evaluated: int, tmp_path: Path) -> None:
    write_run(tmp_path, count, evaluated)
    with pytest.raises(RunFailed):
        read_run(tmp_path, 3)


def test_a_process_that_fails_is_reported_in_its_own_words(tmp_path: Path) -> None:
    with nodes_in(tmp_path) as nodes:
        nodes.start("learner", "lead", "--host", "127.0.0.1", "--steps", "0", "--run-dir", str(tmp_path / "run")).wait()
        with pytest.raises(RunFailed, match=r"learner ended with status 2.*--steps 0"):
            nodes.check()


def test_no_process_outlives_an_interrupt(tmp_path: Path) -> None:
    started = list[subprocess.Popen[bytes]]()

    def interrupted() -> None:
        with nodes_in(tmp_path) as nodes:
            state = str(tmp_path / "relay")
            started.append(nodes.start("relay", "join", "--role", "relay", "--bootstrap", NOBODY, "--state-dir", state))
            assert started[0].poll() is None
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert started[0].returncode is not None


# -- the command line ----------------------------------------------------------------------------------------


def test_a_swarm_has_each_freshness_and_each_rank_trains_at_its_own_rate() -> None:
    asked = "--staleness 0,4 --model tiny-warm --task sort --adapters 0,8"
    options = learning.parse(asked.split())
    found = learning.cases(options)
    assert [case for case in found if not case.adapter] == [
        ("forced", 0, "grpo", "off", 0),
        ("forced", 4, "grpo", "off", 0),
        ("swarm", 0, "grpo", "adaptive", 0),
        ("swarm", 4, "grpo", "adaptive", 0),
        ("swarm", 4, "grpo", "off", 0),
    ]
    configs = [learning.config_of(case, options, 1) for case in found[:2]]
    assert [(one.adapter, one.resolved_learning_rate) for one in configs] == [(None, 3e-4), (8, 3e-3)]


def test_a_short_run_gives_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert learning.main(["--only", "forced", "--staleness", "0", "--seeds", "0", "--steps", "2", "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert (only["mode"], only["max_staleness"], only["runs"], only["staleness_max"]) == ("forced", 0, 1, 0)
