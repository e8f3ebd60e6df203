"""Which attackers meet which learner, what is expected of each, and the table of what came of it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.redteam.runs import Plan, Ran, Swarm
from swarm.redteam.sampler import ENGINES

HONEST_BESIDE = 3  # Honest samplers beside a crowd of attackers
HONEST = 4  # Samplers of a run whose accuracy is wanted: four honest ones, or three and one attacker
WORST = "invented-log-probs"  # Alone it stops a run from learning, so its accuracy is told even without --full
MOST_LOST = 0.05  # Held-out accuracy that one attacker of four may cost

EXPECTED = {
    "wrong-model": "draws or log-probs",
    "wrong-precision": "draws or log-probs",
    "old-version": "draws or log-probs",
    "invented-log-probs": "log-probs or claims",
    "temperature": "draws",
    "truncation": "draws",
    "copies": "draws",
    "oracle": "draws",
    "sleeper": "draws, of a share of its rollouts",
    "unmeasured-class": "nobody: named as suspect only",
    "easy-half": "drops",
    "hoarded-leases": "nobody: its leases fall due",
    "equivocation": "duplicates: the first answer counts",
    "wrong-chunks": "digests: refused, had from others",
    "withheld-chunks": "nobody: had from others",
    "lying-bitmaps": "nobody: had from others",
    "floods": "status 429",
    "slow-bodies": "status 408",
    "bombs": "status 413, 400",
    "replays": "status 401",
    "sybils": "draws, log-probs or claims, of each identity",
}
"""By attack: the detector and what it leads to."""

NOT_TARGETED = {"unmeasured-class", "hoarded-leases", "withheld-chunks", "lying-bitmaps"}
"""What nobody claims to catch within a run of minutes. It is run and told all the same."""


@dataclass(slots=True, kw_only=True)
class Row:
    """What came of an attack, with the accuracy of runs with one attacker of four, audit on and off, if there were."""

    name: str
    targeted: bool
    caught: bool
    after_rollouts: int | None
    detector: str
    expected: str
    held_out_on: float | None = None
    held_out_off: float | None = None

    def cells(self) -> tuple[str, ...]:
        after, on, off = (
            "" if n is None else f"{n:.3g}" for n in (self.after_rollouts, self.held_out_on, self.held_out_off)
        )
        return (self.name, self.detector or "nobody", after, on, off, self.expected)


@dataclass(slots=True, kw_only=True)
class Report:
    attacks: list[Row]
    false_alarms: int = 0
    held_out_honest: float | None = None
    wall_s: float = 0.0

    @property
    def as_expected(self) -> bool:
        """Whether all that is claimed to be caught was and cost little, and no honest node was caught."""
        least = (self.held_out_honest or 0.0) - MOST_LOST
        costly = [row for row in self.attacks if row.held_out_on is not None and row.held_out_on < least]
        missed = [row for row in self.attacks if not row.caught]
        return not self.false_alarms and not any(row.targeted for row in [*costly, *missed])

    def as_object(self) -> dict[str, Any]:
        return {**asdict(self), "as_expected": self.as_expected}

    def table(self) -> str:
        """Return a line for each attack, in columns, and one about honest nodes."""
        head = ("attack", "caught by", "after", "held-out on", "off", "expected")
        rows = [head, *(row.cells() for row in self.attacks)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        honest = (
            "" if self.held_out_honest is None else f"; held-out of honest samplers alone {self.held_out_honest:.3f}"
        )
        return "\n".join([*lines, f"false alarms: {self.false_alarms}{honest}; {self.wall_s:.0f} s"])


def chosen(only: str) -> tuple[str, ...]:
    """Return the attacks named in `only`, all if it is empty. Raise UserError for a name that is none."""
    names = tuple(dict.fromkeys(only.split(","))) if only else tuple(EXPECTED)
    if unknown := [name for name in names if name not in EXPECTED]:
        raise UserError(f"--only {unknown[0]}: one of {', '.join(EXPECTED)}")
    return names


def crowds(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return who attacks together: engines that answer wrongly in one run, all others in another."""
    answering = tuple(name for name in names if name in ENGINES and name != "easy-half")
    others = tuple(name for name in names if name not in answering)
    return [crowd for crowd in (answering, others) if crowd]


async def campaign(
    names: Sequence[str], measured: Sequence[str], *, steps: int, crowd_steps: int, tell: Callable[[str], None]
) -> Report:
    """Run all attackers in crowds; then each of `measured` alone among honest samplers, with the audit and without."""
    report = Report(attacks=[])
    began = time.monotonic()

    async def ran(words: str, plan: Plan) -> Ran:
        with tempfile.TemporaryDirectory(prefix="echo-node-redteam-") as directory:
            ran = await Swarm(Path(directory), lambda line: tell(f"running: {words}, {line}")).run(plan)
        report.false_alarms += ran.false_alarms()
        return ran

    async def accuracy(*attackers: str, audit: bool = True) -> float:
        plan = Plan(honest=HONEST - len(attackers), attackers=attackers, steps=steps, audit=audit, measured=True)
        words = " ".join([*attackers, "audited" if audit else "not audited"]) if attackers else "honest samplers alone"
        return float((await ran(words, plan)).summary["held_out"][-1]["exact_match"])

    for crowd in crowds(names):
        words = f"{len(report.attacks) + len(crowd)} of {len(names)} attackers"
        met = await ran(words, Plan(honest=HONEST_BESIDE, attackers=crowd, steps=crowd_steps))
        report.attacks += [row_of(name, met.caught(name)) for name in crowd]
    if measured:
        report.held_out_honest = await accuracy()
    for row in [row for row in report.attacks if row.name in measured]:
        row.held_out_on, row.held_out_off = await accuracy(row.name), await accuracy(row.name, audit=False)
    report.wall_s = round(time.monotonic() - began, 1)
    return report


def row_of(name: str, caught: tuple[str, int | None] | None) -> Row:
    detector, after = caught or ("", None)
    return Row(
        name=name,
        targeted=name not in NOT_TARGETED,
        caught=caught is not None,
        after_rollouts=after,
        detector=detector,
        expected=EXPECTED[name],
    )
