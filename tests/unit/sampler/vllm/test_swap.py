"""The name by which vLLM reads a version."""

from __future__ import annotations

from pathlib import Path

from swarm.sampler.vllm.swap import _linked
from tests.builders import v


def test_a_version_has_a_name_of_its_own_for_as_long_as_it_is_read(tmp_path: Path) -> None:
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"weights")
    others = [tmp_path / name for name in ("weights.bin.partial", "weights.changed")]
    for other in others:
        other.write_bytes(b"")
    (tmp_path / "weights.bin.0.6").hardlink_to(weights)  # left by one that was killed
    with _linked(weights, v(7)) as path:
        assert path.name == "weights.bin.0.7"
        assert path.samefile(weights)
        assert sorted(tmp_path.iterdir()) == sorted([weights, path, *others])
    assert sorted(tmp_path.iterdir()) == sorted([weights, *others])
