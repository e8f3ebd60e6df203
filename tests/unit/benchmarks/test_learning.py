"""The learning benchmark: its figures, its one-process runs, and that no process of a swarm outlives it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import learning
from benchmarks.learning import Case, OneProcess, figures_of, row
from benchmarks.learning_swarm import Run, Step
from swarm.models.device import as_streamed
from swarm.settings import LeadConfig
from swarm.types import VersionId


def steps(*rewards: float) -> list[Step]:
    return [
        Step(at_s=100 + 2.0 * n, reward=reward, staleness_mean=n / 2, staleness_max=float(n))
        for n, reward in enumerate(rewards)
    ]


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
    runs = [Run(steps=steps(0.1, reward), accuracy=accuracy) for reward, accuracy in ((0.9, 0.8), (0.2, 0.1), (0, 1))]
    found = row(Case("swarm", 4, "tis"), runs)
    assert (found["accuracy"], found["accuracy_min"], found["accuracy_max"], found["runs"]) == (0.8, 0.1, 1, 3)
    assert json.loads(json.dumps(found, allow_nan=False))["seconds_to_reward_0_9"] is None, "most never reach it"


def test_every_batch_is_drawn_by_the_version_that_is_exactly_as_old_as_the_bound(tmp_path: Path) -> None:
    config = LeadConfig(max_staleness=2, steps=4, groups_per_step=3, group_size=4, eval_prompts=3, warmup_steps=0)
    process, ages = OneProcess(config, tmp_path), list[float]()

    def published() -> torch.Tensor:
        return torch.cat([as_streamed(p).float().flatten() for p in process._trainer._model.parameters()])

    def held() -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in process._engine._model.parameters()])

    versions = [published()]
    for number in range(4):
        ages.append(process.step(number).staleness_mean)
        assert process._engine._version == VersionId(incarnation=0, version=max(0, number - 2))
        assert torch.equal(held(), versions[max(0, number - 2)])
        versions.append(published())
    assert ages == [0, 1, 2, 2]
    assert 0 <= process.accuracy() <= 1
    assert torch.equal(held(), versions[-1])


def test_a_short_run_gives_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert learning.main(["--only", "forced", "--staleness", "0", "--seeds", "0", "--steps", "2", "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert (only["mode"], only["max_staleness"], only["runs"], only["staleness_max"]) == ("forced", 0, 1, 0)
