"""A sampler whose machine has no room for the swarm's samples: it says so and leaves before it fetches any weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.learner.tiny import tiny_model, tiny_tokenizer
from tests.integration.processes import eventually, swarm_in

TOKENS = 1 << 24
"""Of one sample: keys and values of the tiny model in float32 are 17 GB."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The tiny model, of which a sample may be as long as no machine that runs tests has room for four of."""
    directory = tmp_path / "model"
    model = tiny_model(0)
    model.config.max_position_embeddings = TOKENS
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.long
def test_what_does_not_fit_is_refused_in_one_line_before_weights_are_fetched(tmp_path: Path, model: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        learner = swarm.lead("--model", str(model), "--task", "copy", "--port", "0")
        given = ("--engine", "transformers", "--device", "cpu", "--weights", "disk")
        small = swarm.join(learner.url(), *given, "--max-model-len", str(TOKENS), name="small")
        assert small.process.wait(120) == 2
        said = small.output()
        line = next(line for line in said.splitlines() if "too little memory" in line)
        assert f"with 4 samples of {TOKENS:,} tokens and 32.0 GiB each" in line
        assert "--max-model-len" in line
        assert "help with --role relay" in line
        assert "starting again" not in said
        assert "Traceback" not in said
        assert not list((tmp_path / "state-small").glob("swarms/**/weights.bin"))
        fits = swarm.join(learner.url(), *given, "--max-model-len", "64", name="fits")
        eventually(lambda: fits.status().get("verdicts", {}).get("accepted"), fits, "it draws")
        assert "samples of 64 tokens" in fits.output()
        assert list((tmp_path / "state-fits").glob("swarms/**/weights.bin"))
