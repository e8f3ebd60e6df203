"""The simulated benchmark of transfers measures what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import Figures, broadcast_sim


def rows_of(arguments: str, capsys: pytest.CaptureFixture[str], *, status: int = 0) -> list[Figures]:
    assert broadcast_sim.main([*arguments.split(), "--json"]) == status
    found: list[Figures] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    return found


@pytest.mark.long
def test_a_forest_on_lossy_paths_with_deaths_meets_the_target(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = rows_of("--peers 40 --size-mib 48", capsys)
    assert (row["scheme"], row["peers"], row["live_peers"]) == ("forest", 40, 38)
    assert 1.046 < row["ratio"] <= 1.5
    assert row["ratio"] == pytest.approx(row["last_peer_s"] / row["bound_s"])


def test_a_profile_of_the_namespaces_is_simulated_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "equal.toml"
    profile.write_text("[[host]]\nup_mbit = 50\ndown_mbit = 100\n" * 5)
    arguments = f"--profile {profile} --size-mib 8 --schemes chain,star"
    chain, star = rows_of(arguments, capsys)
    assert chain["bound_s"] == star["bound_s"] == pytest.approx(8 * 2**20 / 6.25e6)
    assert 1.046 <= chain["ratio"] <= 1.15
    assert star["ratio"] == pytest.approx(4 * 1.046, rel=0.02)
    (killed,) = rows_of(f"--profile {profile} --size-mib 8 --schemes chain --kill 3@0.5", capsys)
    assert killed["live_peers"] == 3
