"""What the learner knows about its samplers."""

from __future__ import annotations

import pytest

from swarm.rollout import tally
from swarm.types import NodeId
from tests.builders import ALICE, BOB


def test_of_who_names_another_class_of_engine_than_before_none_is_known() -> None:
    known = tally.Tally()
    for engine in ("a", "a", "b", "b"):
        known.runs(ALICE, engine)
    known.runs(BOB, "b")
    assert (known.engine_of(ALICE), known.engine_of(BOB)) == ("", "b")


def test_the_last_samplers_engines_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "MAX_NODES", 2)
    known = tally.Tally()
    for node in ("a", "b", "c"):
        known.runs(NodeId(node), "x")
    assert [known.engine_of(NodeId(node)) for node in ("a", "b", "c")] == ["", "x", "x"]
