"""A process of the learner that dies: its callbacks end with it, and so does what it was doing.

Theory of operation. `point` is called before each effect that is performed, and counts them. At the counts that the
scenario names something dies: the trainer alone, which the process goes on without for a while, or the process itself,
with its trainer or with the trainer surviving it for a moment; then NodeCrashed unwinds what was being done, and
nothing that was scheduled or awaited in that life happens any more.
"""

from __future__ import annotations

from collections.abc import Callable

from swarm.plan.simulate.world import Callback, World
from tests.simulator.rollouts.disk import Disk
from tests.simulator.rollouts.scenario import Crash, Death, Scenario


class NodeCrashed(Exception):
    """Unwinds what the learner's node was doing when it died."""


class Process:
    """Lives of one process, one after another. `on_death(what)` clears up."""

    def __init__(self, world: World, scenario: Scenario, disk: Disk, on_death: Callable[[Death], None]) -> None:
        self._world = world
        self._disk = disk
        self._deaths = {one.effect: one.what for one in scenario.crashes if isinstance(one, Crash)}
        self._on_death = on_death
        self._inside = False
        self.life = 0
        self.up = False
        self.points = 0
        self.crashes = 0

    def start(self) -> None:
        self.up = True

    def point(self) -> None:
        """Something may die here. Raises NodeCrashed."""
        self.points += 1
        death = self._deaths.get(self.points)
        if death is None:
            return
        self._world.note(f"crash {death} at effect {self.points}")
        self.crashes += 1
        if death != "trainer":
            self.life += 1
            self.up = False
            self._disk.crash()
        self._on_death(death)
        if death != "trainer":
            raise NodeCrashed

    def guarded(self, callback: Callback) -> Callback:
        """`callback`, unless this life is over by then."""
        life = self.life

        def run() -> None:
            if life == self.life:
                self._run(callback)

        return run

    def _run(self, callback: Callback) -> None:
        """A crash unwinds everything that this process was in the middle of, not the innermost call alone."""
        if self._inside:
            callback()
            return
        self._inside = True
        try:
            callback()
        except NodeCrashed:
            pass
        finally:
            self._inside = False

    def serve(self, handler: Callback) -> None:
        """Handle what came from outside; a process that is down does not hear it."""
        if self.up:
            self.guarded(handler)()

    def later(self, delay_s: float, label: str, callback: Callback) -> None:
        self._world.schedule(delay_s, label, self.guarded(callback))

    def once_committed(self, callback: Callback) -> None:
        """Run `callback` once all that was enqueued so far is on record."""

        def committed() -> None:
            self.point()
            callback()

        self._disk.write(self.guarded(committed))
