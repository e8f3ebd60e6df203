"""Why a node does not draw: several reasons at once, the first of which is told."""

from __future__ import annotations

import asyncio

from swarm.join.owner import Holds
from tests.unit.wires import many_turns


async def test_a_node_draws_again_when_the_last_reason_is_lifted() -> None:
    holds = Holds()
    held: list[str] = []
    holds.on_hold = lambda: held.append(holds.reason)
    holds.set("hours", "")
    assert (holds.free.is_set(), held) == (True, [])
    holds.set("battery", "on battery")
    holds.set("owner", "by its owner")
    assert held == ["on battery"] * 2
    free = asyncio.create_task(holds.free.wait())
    assert holds.reason == "on battery"
    holds.set("battery", "")
    holds.set("hours", "")
    await many_turns()
    assert holds.reason == "by its owner"
    assert not free.done()
    holds.set("owner", "")
    await free
    assert holds.reason == ""
