"""What a node has given: over lives and swarms, and as `me` tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.join.given import FILE, Given, read_given
from tests.integration.processes import command


def test_what_was_given_adds_up_over_lives_and_goes_to_the_swarm_it_was_given_to(tmp_path: Path) -> None:
    given = Given(tmp_path / FILE)
    given.keep("a", "one", {"rollouts": 5, "tokens": 50, "seconds": 60})
    for _ in range(2):
        given.keep("b", "other", {"rollouts": 7, "tokens": 80, "passed_bytes": 10, "seconds": 90})
    Given(tmp_path / FILE).keep("a", "one now", {"rollouts": 1, "tokens": 9, "seconds": 3600})
    assert read_given(tmp_path / FILE) == {
        "a": ("one now", {"rollouts": 6, "tokens": 59, "seconds": 3660}),
        "b": ("other", {"rollouts": 2, "tokens": 30, "passed_bytes": 10, "seconds": 30}),
    }


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"a": 3}'])
def test_a_file_that_is_not_there_or_damaged_counts_for_nothing(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / FILE).write_bytes(content)
    assert read_given(tmp_path / FILE) == {}


def test_an_owner_is_told_by_swarm_and_in_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert command("me").returncode == 2
    both: list[dict[str, float]] = [{"rollouts": 1200, "tokens": 30_000, "seconds": 3600}, {"seconds": 3600}]
    for number, counts in enumerate(both):
        (directory := tmp_path / "echo-node" / f"sampler-{number}").mkdir(parents=True)
        Given(directory / FILE).keep("a", "sums", counts)
    Given(tmp_path / "echo-node" / "sampler-1" / FILE).keep("b", "a\x1brt", {"passed_bytes": 25 * 10**8})
    assert command("me").stdout.splitlines() == [
        *("sums", "  2.0 hours, 1,200 rollouts with 30,000 tokens"),
        *("a?rt", "  0.0 hours, 2.50 GB of weights passed on"),
        *("in all", "  2.0 hours, 1,200 rollouts with 30,000 tokens, 2.50 GB of weights passed on"),
    ]
