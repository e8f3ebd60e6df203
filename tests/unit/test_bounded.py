"""A table that forgets."""

from __future__ import annotations

from swarm.bounded import Bounded


def test_the_entry_set_longest_ago_goes_however_entries_come() -> None:
    table: Bounded[str, int] = Bounded(2)
    table["a"], table["b"] = 1, 2
    table["a"] = 3
    table.setdefault("c", 4)
    assert list(table.items()) == [("a", 3), ("c", 4)]
    assert table.setdefault("a", 5) == 3
    table.update({"d": 6, "e": 7})
    assert list(table) == ["d", "e"]
