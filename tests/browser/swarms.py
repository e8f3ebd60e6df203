"""Runs to look at: real learners on loopback, whose samplers have no model, so that they are up in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.browser.pages import Address, address_of
from tests.integration.processes import Learner, Node, Swarm, eventually

ENDLESS = ("--steps", "1000000")

STEPS_PER_S = 2.0
"""About the pace of the hostile run: the page has something to show in seconds, and the run stays small."""


@dataclass(slots=True)
class Led:
    """A run, the learner that leads it or led it last, and its page, which is the same in all lives."""

    swarm: Swarm
    learner: Learner
    page: Address
    lives: int = 1

    def resume(self) -> None:
        """Go on with a run whose learner has ended."""
        self.lives += 1
        self.learner = self.swarm.resume(self.learner, name=f"life-{self.lives}")
        assert address_of(self.learner) == self.page


def hostile_run(swarm: Swarm, directory: Path) -> Led:
    """A run in which all that strangers choose is mark-up: prompts, completions, a nickname. It has taken steps."""
    # Imports torch, which looking for Chromium need not wait for.
    from tests.browser.hostile import NICKNAME, hostile_model, hostile_questions

    swarm.lead_with(audit_share=0.0)
    swarm.draw_at(16 * 12 * STEPS_PER_S / 8)
    learner = swarm.lead(
        *("--model", str(hostile_model(directory / "model"))),
        *("--task", f"jsonl:{hostile_questions(directory / 'questions.jsonl')}", "--max-new-tokens", "24"),
        *("--seed", "1", "--port", "0", *ENDLESS),
    )
    swarm.scripted(learner.url(), "--nickname", NICKNAME, name="hostile")
    takes_steps(learner, 3)
    return Led(swarm, learner, address_of(learner))


def takes_steps(learner: Node, count: int) -> None:
    """Wait until the run has taken `count` steps."""

    def taken() -> bool:
        assert learner.process.poll() is None, learner.output()
        return bool(learner.status()["step"] >= count)

    eventually(taken, learner, f"{count} steps")
