"""What a checker raises, with the command that shows it again."""

from __future__ import annotations

from tests.simulator.rollouts.scenario import Scenario, scenario_named


class InvariantBreach(Exception):
    """The swarm did what it must never do. The message says what, when, and how to see it again."""

    def __init__(self, rule: str, what: str, *, scenario: Scenario, seed: int, now: float) -> None:
        self.replay = f"bin/python -m tests.simulator --seed {seed} --scenario {scenario.name}"
        if scenario.crashes != scenario_named(scenario.name, seed).crashes:
            self.replay += f" --crash-at {','.join(map(str, scenario.crashes))}"
        super().__init__(f"{rule}: {what} (seed {seed}, {now:.6f} virtual seconds)\nreplay: {self.replay}")
