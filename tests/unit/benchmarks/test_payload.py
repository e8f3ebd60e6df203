"""What the broadcast benchmark sends: noise that stays noise, and weights one Adam step apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zstandard

from benchmarks.payload import layout_of, to_bf16, write_random, write_weights

NBYTES = 2_000_002


def test_the_layout_has_every_byte() -> None:
    layout = layout_of(NBYTES)
    assert layout.total_bytes == NBYTES
    assert len(layout.tensors) > 1


def test_noise_does_not_compress_and_a_seed_repeats_it(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_random(tmp_path / name, NBYTES, seed=seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c
    assert len(a) == NBYTES
    assert len(zstandard.compress(a)) >= NBYTES


@pytest.mark.parametrize(("lr", "changed"), [(1e-6, 0.0098), (3e-6, 0.025), (1e-5, 0.066)])
def test_a_step_changes_a_small_share_of_the_weights_by_one_place(tmp_path: Path, lr: float, changed: float) -> None:
    """As much as the codec's own benchmark has it."""
    write_weights(tmp_path / "before", 8_000_000, seed=0)
    write_weights(tmp_path / "after", 8_000_000, seed=0, step_lr=lr)
    before, after = (np.fromfile(tmp_path / name, dtype="<u2") for name in ("before", "after"))
    assert float(np.mean(before != after)) == pytest.approx(changed, rel=0.05)
    steps = np.abs(after.astype(np.int32) - before.astype(np.int32))
    assert float(np.mean(steps <= 1)) > 0.98


def test_rounding_is_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -1.0, 0.0, -0.0], dtype=np.float32)
    # 1 + 2^-8 lies half-way between two bf16 and goes down to the even one, 1 + 3 * 2^-8 goes up to it.
    assert to_bf16(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0xBF80, 0x0000, 0x8000]
