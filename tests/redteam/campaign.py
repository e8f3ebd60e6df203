"""Which attackers meet which learner, and what came of it: as a table, and as an object for scripts."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from tests.redteam.runs import AttackPlan, Ran, Swarm
from tests.redteam.sampler import ENGINES
from tests.redteam.wire import NODES, RELAYS, WIRE

SAMPLERS = 4  # Of a run whose accuracy is wanted, attackers included unless there are five
MAX_LOST = 0.05  # Held-out accuracy that an attacker may cost if it is not caught
NAMES = tuple(dict.fromkeys((*ENGINES, *NODES, *RELAYS, *WIRE)))
NOT_TARGETED = {"hoarded-leases", "withheld-chunks", "lying-bitmaps"}  # By no guard, within minutes
FLATTERING = {"held-out-oracle"}  # It raises the held-out accuracy, which therefore cannot show that it is harmless


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackRow:
    """What came of an attack: whether each of its nodes was caught with every seed, after how many audited rollouts at
    most; whether every run ended, with which accuracy at least; the mean of what the attacker noted (sampler.py)."""

    name: str
    targeted: bool
    caught: bool
    audited: int | None
    detector: str
    ended: bool
    held_out: float | None
    noted: float | None

    def line(self) -> str:
        by = f"{'' if self.caught else 'not always '}{self.detector}" if self.detector else "nobody"
        audited, held_out = ("" if n is None else f"{n:.3g}" for n in (self.audited, self.held_out))
        return f"{self.name:20}{by:24}{audited:9}{held_out if self.ended else 'stuck'}".rstrip()


@dataclass(slots=True, kw_only=True)
class CampaignReport:
    """`control` has the held-out accuracy of honest samplers alone, by seed; `alarms` what was said of honest ones."""

    attacks: list[AttackRow] = field(default_factory=list)
    control: list[float] = field(default_factory=list)
    false_alarms: int = 0
    alarms: list[dict[str, Any]] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def as_expected(self) -> bool:
        """Whether every targeted attacker was caught or harmless, no run was stuck, and no honest node was caught."""
        least = min(self.control, default=0.0) - MAX_LOST
        harmless = {row.name for row in self.attacks if row.held_out is not None and row.held_out >= least} - FLATTERING
        stopped = (row.ended and (row.caught or row.name in harmless) for row in self.attacks if row.targeted)
        return not self.false_alarms and all(stopped)

    def as_object(self) -> dict[str, Any]:
        return {**asdict(self), "control": {"held_out": self.control}, "as_expected": self.as_expected}

    def table(self) -> str:
        head = f"{'attack':20}{'caught by':24}{'audited':9}held-out"
        control = ", ".join(f"{one:.3f}" for one in self.control) or "not run"
        last = f"false alarms: {self.false_alarms}; honest samplers alone: {control}; {self.wall_s:.0f} s"
        return "\n".join([head, *(row.line() for row in self.attacks), last])


def row_of(name: str, runs: Sequence[Ran]) -> AttackRow:
    """Return what came of an attack in runs with different seeds."""
    known = [verdict for ran in runs if (verdict := ran.caught(name)) is not None]
    return AttackRow(
        name=name,
        targeted=name not in NOT_TARGETED,
        caught=len(known) == len(runs),
        audited=max((audited for _, audited in known if audited is not None), default=None),
        ended=all(ran.ended for ran in runs),
        detector=", ".join(sorted({detector for detector, _ in known})),
        held_out=min((ran.held_out for ran in runs if ran.held_out is not None), default=None),
        noted=runs[0].noted,
    )


def chosen(only: str) -> tuple[str, ...]:
    """Return the attacks named in `only`, all if it is empty. Raise UserError for a name that is none."""
    names = tuple(dict.fromkeys(only.split(","))) if only else NAMES
    if unknown := [name for name in names if name not in NAMES]:
        raise UserError(f"--only {unknown[0]}: one of {', '.join(NAMES)}")
    return names


def plans(names: Sequence[str], *, steps: int, crowd_steps: int, seed: int) -> list[AttackPlan]:
    """Return the runs of one seed: honest samplers alone, each attacker that hands in answers alone among them, and all
    other attackers together."""
    teams = [(name,) * ENGINES[name].nodes for name in names if name in ENGINES]
    crowd = tuple(name for name in names if name not in ENGINES)
    alone = [
        AttackPlan(honest=SAMPLERS - len(team) % SAMPLERS, attackers=team, steps=steps, seed=seed) for team in teams
    ]
    together = AttackPlan(honest=SAMPLERS - 1, attackers=crowd, steps=crowd_steps, seed=seed, measured=False)
    control = AttackPlan(honest=SAMPLERS, steps=steps, seed=seed)
    return ([control, *alone] if teams or not names else []) + ([together] if crowd else [])


async def campaign(
    names: Sequence[str], *, steps: int, crowd_steps: int, seeds: int, tell: Callable[[str], None]
) -> CampaignReport:
    """Run these attackers with each seed; without any, honest samplers alone."""
    report, began = CampaignReport(), time.monotonic()
    runs: defaultdict[str, list[Ran]] = defaultdict(list)
    for plan in [one for seed in range(seeds) for one in plans(names, steps=steps, crowd_steps=crowd_steps, seed=seed)]:
        with tempfile.TemporaryDirectory(prefix="echo-node-redteam-") as directory:
            ran = await Swarm(Path(directory)).run(plan)
        report.false_alarms += ran.false_alarms()
        report.alarms += [{"seed": plan.seed, "attackers": plan.attackers, **one} for one in ran.alarms()]
        report.control += [] if plan.attackers or ran.held_out is None else [ran.held_out]
        for name in (attackers := dict.fromkeys(plan.attackers)):
            runs[name].append(ran)
        caught = ", ".join(name for name in attackers if ran.caught(name)) or "nobody"
        held_out = "" if ran.held_out is None else f"held-out {ran.held_out:.3f}, "
        words = f"{held_out}caught {caught}; false alarms {ran.false_alarms()}"
        tell(f"seed {plan.seed}, {', '.join(attackers) or 'honest samplers'}: {words}")
    report.attacks = [row_of(name, runs[name]) for name in names]
    report.wall_s = round(time.monotonic() - began, 1)
    return report
