"""`bin/demo --engine all`: samplers with vLLM, mlx and transformers teach one model."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.integration.processes import run_command


def _of(directory: Path) -> list[psutil.Process]:
    """Processes that write into the demo's directories: nodes, engines, and what these started."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(directory) in file.path for file in process.open_files()):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.long
@pytest.mark.timeout(600)  # Three engines on two cores, of which vLLM takes most
def test_three_engines_teach_one_model(tmp_path: Path) -> None:
    """Nothing that they hand in is held against anybody: a share is drawn again by the learner."""
    run_dir = tmp_path / "run"
    done = run_command("demo", "--engine", "all", "--json", "--run-dir", str(run_dir), timeout_s=560)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "vLLM is up in 1 sampler after" in done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["held_out_before"] < 0.1
    assert summary["held_out_after"] >= 0.9
    assert summary["verified"]
    assert summary["max_staleness_seen"] <= summary["max_staleness"]
    assert sorted(sampler["engine"] for sampler in summary["by_sampler"]) == ["mlx", "transformers", "vllm"]
    for sampler in summary["by_sampler"]:
        assert sampler["rollouts_accepted"] > 0.02 * summary["rollouts_accepted"], summary
        # Some come after their group was dropped. That none is leased twice is shown by test_session.
        assert sampler["rollouts_duplicate"] < 0.02 * sampler["rollouts_accepted"]
    events = [json.loads(line)["kind"] for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert not {"caught", "withheld"} & set(events)
    _, alive = psutil.wait_procs(_of(tmp_path), timeout=30)
    assert alive == []
