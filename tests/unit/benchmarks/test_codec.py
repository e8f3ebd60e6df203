"""The codec's benchmark on made weights; and on real versions, how these are found, read and counted in three forms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks import codec, codec_real


def test_full_weights_and_deltas_are_coded_by_all() -> None:
    found = codec.run(1 << 20, 1 << 18, repeat=1, seed=1)
    assert 0.6 < found["full_ratio"] < 0.7
    assert found["delta_ratio"]["1e-6"] < 0.01 < found["delta_ratio"]["1e-5"] < found["peers"]["zstd-1"]["full_ratio"]


def _version(path: Path, moved: int) -> None:
    path.mkdir(parents=True)
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(64, 1024, generator=draw).mul(0.02).to(torch.bfloat16)
    weights.view(torch.int16)[::7, : 10 * moved] += moved
    save_file({"a": weights, "b": torch.ones(8, dtype=torch.bfloat16)}, path / "model.safetensors")


def test_consecutive_versions_are_compared_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for step in (0, 2, 10):
        _version(tmp_path / f"step-{step}", step)
    rows = codec_real.run([tmp_path])
    assert [(row["from"], row["to"]) for row in rows] == [("step-0", "step-2"), ("step-2", "step-10")]
    # Ten rows of 64 are moved, the first time 20 words of each, and then 100.
    assert [row["changed"] for row in rows] == [200, 1000]
    assert [row["TRL"] for row in rows] == [1200, 6000]
    assert all(row["raw_bytes"] == 2 * (64 * 1024 + 8) for row in rows)
    assert all(0 < row["echo-node"] < row["TRL"] and 0 < row["PULSE"] < row["TRL"] for row in rows)
    assert codec_real.run([tmp_path / "step-0", tmp_path / "step-2"]) == rows[:1]


def test_a_file_of_words_is_a_version(tmp_path: Path) -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    words.tofile(tmp_path / "v1")
    words[5] += 1
    words.tofile(tmp_path / "v2")
    (row,) = codec_real.run([tmp_path])
    assert (row["changed"], row["TRL"]) == (1, 6)


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(8)}, tmp_path / "float.safetensors")
    _version(tmp_path / "one", 0)
    with pytest.raises(SystemExit, match="two or more"):
        codec_real.run([tmp_path / "one"])
    with pytest.raises(SystemExit, match="a is F32, and only BF16"):
        codec_real.run([tmp_path / "float.safetensors", tmp_path / "one"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=r"no \.safetensors"):
        codec_real.run([tmp_path / "empty", tmp_path / "one"])
