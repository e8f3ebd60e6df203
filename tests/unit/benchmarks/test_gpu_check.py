"""The check of a GPU: what it makes of figures, and a dry run of some of it in real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import CHECKS, Check, Limit, judged, run

RATIOS = Check(
    name="memory", command=(), dry=(), limits=(Limit(path="memory.*.estimate_ratio", least=0.85, most=1.15),)
)


@pytest.mark.parametrize(("ratios", "outcome"), [((0.86, 1.14), "met"), ((1.0, 1.2), "missed"), ((0.8, 1.0), "missed")])
def test_each_of_several_figures_has_to_keep_to_a_limit(ratios: tuple[float, ...], outcome: str) -> None:
    figures = {"memory": [{"estimate_ratio": ratio} for ratio in ratios]}
    found = judged(RATIOS, figures, 1.0, dry=False)
    assert found.outcome == outcome
    assert found.line.startswith(f"estimate_ratio {ratios[0]:.3g}, {ratios[1]:.3g} (at least 0.85 and at most 1.15)")


@pytest.mark.parametrize("figures", [{}, {"memory": None}, {"memory": [{}]}])
def test_figures_that_are_not_there_are_no_pass(figures: dict[str, Any]) -> None:
    assert judged(RATIOS, figures, 1.0, dry=False).outcome == "failed"


def test_what_is_not_installed_is_skipped_by_name_and_what_dies_takes_no_other_with_it() -> None:
    missing = Check(name="vllm-x", command=(), dry=(), limits=(), needs=gpu_check.package("no_such_package"))
    assert (run(missing, dry=True).outcome, run(missing, dry=True).line) == (
        "skipped",
        "no_such_package is not installed",
    )
    dies = Check(name="dies", command=("gpu_parts", "copies", "--parameters", "much"), dry=(), limits=())
    found = run(dies, dry=False)
    assert found.outcome == "failed"
    assert "invalid float value: 'much'" in found.line


def test_every_check_names_a_benchmark_and_its_limits_are_of_its_figures() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        assert Path(gpu_check.__file__).with_name(f"{check.command[0]}.py").exists()
        assert check.dry[0] == check.command[0]
    # Of one card: what only a second one could show is not among them.
    assert sum(check.limit_s for check in CHECKS) < 30 * 60


@pytest.mark.slow
def test_a_dry_run_writes_down_each_check_as_it_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    some = ("mfu-0.6b", "copies", "rank")
    assert gpu_check.main(["--dry-run", "--json", "--out", str(out), *(f"--only={name}" for name in some)]) == 0
    written = json.loads(out.read_text())
    assert [(one["name"], one["outcome"]) for one in written["checks"]] == [(name, "met") for name in some]
    mfu, copies, rank = (one["figures"] for one in written["checks"])
    assert mfu["mfu"]["tokens_per_s"] > 0
    assert copies["stage_share_of_bus"] > 0
    assert (rank["loss_apart"], rank["backend_is_nccl"]) == (pytest.approx(0, abs=1e-6), 0.0)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == written


def test_without_a_gpu_it_says_what_can_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(SystemExit) as ended:
        gpu_check.main([])
    assert ended.value.code == 2
    assert "--dry-run runs all of it on the CPU" in capsys.readouterr().err
