"""What a crash of the learner leaves behind: committed entries and whole checkpoints, on a virtual clock.

Theory of operation. Entries queue in memory. One transaction at a time takes all that is queued when it begins, and is
committed after a random delay; who waits for what it queued goes on then (group commit). A crash loses the queue and
those who wait; the transaction under way is committed or not, as chance has it. A checkpoint is there as a whole or
not at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from swarm.plan.simulate.world import Callback, World
from swarm.rollout.journal.entries import Entry
from tests.simulator.rollouts.ledger import Ledger


class Disk:
    """The journal and the checkpoints of one run. `commit_s` is the mean time of a transaction."""

    def __init__(self, world: World, ledger: Ledger, *, commit_s: float) -> None:
        self._world = world
        self._commit_s = commit_s
        self._queue: list[Entry] = []
        self._under_way: list[Entry] = []
        self._waiting: deque[tuple[int, Callback]] = deque()
        self._enqueued = 0
        self._committed = 0
        self._life = 0
        self.ledger = ledger
        self.checkpoint: tuple[int, bytes] = (0, b"")

    def enqueue(self, entries: Sequence[Entry]) -> None:
        """Have `entries` committed soon."""
        self._queue += entries
        self._enqueued += len(entries)
        self._begin()

    def write(self, then: Callback) -> None:
        """Run `then` once everything enqueued so far is committed."""
        if self._committed == self._enqueued:
            then()
        else:
            self._waiting.append((self._enqueued, then))

    def flush(self) -> None:
        """Commit at once all that is enqueued, telling nobody: the end of a run."""
        self.ledger.read([*self._under_way, *self._queue])
        self._under_way, self._queue = [], []

    def crash(self) -> None:
        """Lose what is in memory."""
        self._life += 1
        if self._under_way and self._world.random.random() < 0.5:
            self.ledger.read(self._under_way)
        self._queue, self._under_way = [], []
        self._waiting.clear()
        self._committed = self._enqueued

    def _begin(self) -> None:
        if self._under_way or not self._queue:
            return
        self._under_way, self._queue = self._queue, []
        life = self._life
        delay_s = self._world.random.uniform(0.0, 2 * self._commit_s)
        self._world.schedule(delay_s, "committed", lambda: self._commit(life))

    def _commit(self, life: int) -> None:
        if life != self._life:
            return
        self.ledger.read(self._under_way)
        self._committed += len(self._under_way)
        self._under_way = []
        self._begin()
        while life == self._life and self._waiting and self._waiting[0][0] <= self._committed:
            self._waiting.popleft()[1]()
