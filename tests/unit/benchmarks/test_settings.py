"""The benchmark of settings: a short run of a small model, whose versions are kept."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from benchmarks.settings import config_of, run

SMALL = Path(__file__).parents[3] / "examples" / "arithmetic"


def test_a_case_is_the_example_with_its_changes_and_keeps_every_version(tmp_path: Path) -> None:
    config = config_of(str(SMALL), ["steps=2", "eval_every_steps=1", "eval_prompts=4", "max_staleness=1"])
    assert (config.stop, config.learning_rate, config.target) == (("\n",), 1e-5, None)
    found = run(config, tmp_path)
    assert list(found["held_out"]) == [0, 1, 2]
    assert len(found["figures"]["reward"]) == 2
    assert found["cpu_s_per_step"].keys() == {"publish", "install", "draw", "evaluate", "train"}
    assert [len(load_file(tmp_path / step / "model.safetensors")) > 0 for step in ("1", "2")] == [True, True]
