"""What a journal keeps of a rollout when its payload is pruned: over a million rollouts it is less than over few."""

from __future__ import annotations

from pathlib import Path

from swarm.rollout.journal.entries import BatchTaken, Entry, GroupOpened, RolloutAccepted, RolloutScored, SamplesLeased
from swarm.rollout.journal.index import DIGEST_BYTES, reading
from swarm.rollout.journal.journal import DATABASE, Journal
from swarm.types import NodeId, Score
from tests.builders import rollout, v

GROUPS, GROUP_SIZE = 64, 16  # Of a batch
STEPS = 4
MAX_BYTES = 100
USED = (
    "SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
)


def group(number: int) -> list[Entry]:
    node = NodeId(f"{number:052d}")
    drawn = [rollout(group_id=f"t{number}", index=index, tokens=(3,)) for index in range(GROUP_SIZE)]
    return [
        GroupOpened(number=number, prompt_number=number, version=v(0), max_staleness=9),
        SamplesLeased(number=number, node=node, samples=tuple((index, 0) for index in range(GROUP_SIZE))),
        *(RolloutAccepted(number=number, node=node, rollout=one) for one in drawn),
        *(RolloutScored(number=number, index=one.index, score=Score(reward=0.5, exact=False)) for one in drawn),
    ]


async def test_a_rollout_leaves_a_hundred_bytes(tmp_path: Path) -> None:
    journal = Journal(tmp_path, group_size=GROUP_SIZE)
    await journal.start()
    for step in range(STEPS):
        numbers = range(step * GROUPS, (step + 1) * GROUPS)
        await journal.write([*(entry for number in numbers for entry in group(number))])
        await journal.write([BatchTaken(step=step, max_staleness=9, numbers=tuple(numbers))])
    while await journal.prune(oldest_step=STEPS, keep_rollouts=0):
        pass
    await journal.close()
    with reading(tmp_path / DATABASE) as found:
        (nbytes,) = found.execute(USED).fetchone()
    assert DIGEST_BYTES < nbytes / (STEPS * GROUPS * GROUP_SIZE) <= MAX_BYTES
