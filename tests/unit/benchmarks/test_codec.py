"""The benchmark of the codec, and the weights that it and the broadcast's send."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import codec
from benchmarks.payload import to_bf16, write_weights


def test_full_weights_and_deltas_are_coded() -> None:
    found = codec.run(1 << 20, 1 << 18, repeat=1, seed=1)
    assert 0.6 < found["full_ratio"] < 0.7
    assert found["delta_ratio"]["1e-6"] < 0.01 < found["delta_ratio"]["1e-5"] < 0.04
    assert found["encode_mb_s"].keys() == found["decode_mb_s"].keys() == {"full", *codec.LEARNING_RATES}


@pytest.mark.parametrize(("lr", "changed"), [(1e-6, 0.0098), (1e-5, 0.066)])
def test_a_step_changes_a_small_share_of_the_weights(tmp_path: Path, lr: float, changed: float) -> None:
    write_weights(tmp_path / "before", 4_000_000, seed=0)
    write_weights(tmp_path / "after", 4_000_000, seed=0, step_lr=lr)
    before, after = (np.fromfile(tmp_path / name, dtype="<u2") for name in ("before", "after"))
    assert float(np.mean(before != after)) == pytest.approx(changed, rel=0.05)


def test_rounding_is_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -1.0, 0.0, -0.0], dtype=np.float32)
    # 1 + 2^-8 lies half-way between two bf16 and goes down to the even one, 1 + 3 * 2^-8 goes up to it.
    assert to_bf16(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0xBF80, 0x0000, 0x8000]
