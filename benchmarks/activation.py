"""How far the choice of samplers is from the cheapest there is, by an integer program (HiGHS, through scipy).

bin/python -m benchmarks.activation --json

FLEETS random fleets of each of SIZES: rates within a factor of ten, prices per rollout lognormal, a third with metered
traffic, downlinks of 5 to 200 MB/s, which decide how much of a sampler's work arrives in time; departures of none, 1 in
50 and 1 in 10 hours.
The learner needs 15 to 70 % of what the fleet could do. What is needed is the selection's own: the model's least rate
for the set it chose, and its margins. The program minimises the summed price of a set with at least that rate, to a
relative gap of 1e-4; the excess is of the selection's price over the program's (tests/property compares with all
subsets, each with its own reserve). Exit status 1 if the worst excess is over 2 %.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from random import Random

import numpy
from scipy.optimize import Bounds, LinearConstraint, milp

from benchmarks import Figures, ended, parser_of, said
from swarm.pay.fleet import Demand, Dissemination, Lengths, Worker
from swarm.pay.prices import PricedOffer
from swarm.pay.selection import Market, Rules, Search

FLEETS, SIZES = 20, (50, 100, 200, 500)
VERSION_BYTES = 160e6  # A delta of an 8B model at 1 %
GROUP_SIZE = 8
TRAIN_STEP_S = 150.0
MAX_EXCESS = 0.02
GAP = 1e-4
LENGTHS = Lengths.lognormal(median=2600, sigma=0.9, cap=8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fleet. Prices per hour; `choice_s` is the time of the selection."""

    chosen: int
    price: float
    min_price: float
    choice_s: float

    @property
    def excess(self) -> float:
        return self.price / self.min_price - 1.0


def fleet_of(size: int, random: Random) -> list[Worker]:
    fleet = []
    for number in range(size):
        rate = random.uniform(0.05, 0.5)
        metered = random.choice((0.0, 0.0, 0.02))
        fleet.append(
            Worker(
                name=f"n{number:03}",
                device_class=f"class {number % 8}",
                rollouts_per_s=rate,
                samples_at_once=max(1, round(rate * 100)),
                cost_per_hour=rate * random.lognormvariate(0.0, 0.45),
                down_cost_per_gb=metered,
                up_cost_per_gb=metered,
                downlink_bytes_per_s=random.uniform(5e6, 200e6),
                start_s=300.0,
                departures_per_hour=random.choice((0.0, 0.02, 0.1)),
            )
        )
    return fleet


def from_learner(workers: object) -> Dissemination:
    """Everybody from a learner whose uplink does not bind, so that the program may know each install beforehand."""
    assert isinstance(workers, list)
    return Dissemination(
        install_s=tuple(5.0 + VERSION_BYTES / worker.downlink_bytes_per_s for worker in workers),
        down_bytes=(VERSION_BYTES,) * len(workers),
        up_bytes=(0.0,) * len(workers),
        learner_up_bytes=VERSION_BYTES * len(workers),
    )


def demand_of(fleet: list[Worker], random: Random) -> Demand:
    wanted = random.uniform(0.15, 0.7) * sum(worker.rollouts_per_s for worker in fleet) * TRAIN_STEP_S
    return Demand(
        train_step_s=TRAIN_STEP_S,
        groups_per_step=max(1, round(wanted / GROUP_SIZE)),
        group_size=GROUP_SIZE,
        publish_every_steps=1,
        max_staleness=random.choice((4, 6)),
        lengths=LENGTHS,
    )


def offers_of(demand: Demand, fleet: list[Worker]) -> list[PricedOffer]:
    """All samplers at what they cost and give in this kind of broadcast."""
    market = Market(demand, fleet, from_learner, kept=())
    names = [worker.name for worker in fleet]
    market.suppose(names, market.plan(names))
    return market.offers()


def min_price(offers: list[PricedOffer], need: float) -> float:
    """By the integer program: minimise the price of a set with a rate of at least `need`."""
    prices = numpy.array([offer.price_per_hour for offer in offers])
    rates = numpy.array([offer.useful_rollouts_per_s for offer in offers])
    found = milp(
        prices,
        constraints=LinearConstraint(rates.reshape(1, -1), lb=need),
        integrality=numpy.ones(len(offers)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": GAP, "time_limit": 60.0},
    )
    if not found.success:
        raise RuntimeError(f"the integer program was not solved: {found.message}")
    return float(found.fun)


def row_of(size: int, seed: int) -> Row | None:
    random = Random(seed)
    fleet = fleet_of(size, random)
    demand = demand_of(fleet, random)
    begun = time.perf_counter()
    selection = Search(demand, fleet, from_learner, Rules()).select()
    choice_s = time.perf_counter() - begun
    if not (selection.feasible and selection.has_margin):
        return None
    least = min_price(offers_of(demand, fleet), selection.needed_rollouts_per_s)
    return Row(chosen=len(selection.active), price=selection.cost_per_hour, min_price=least, choice_s=choice_s)


def summary(rows: list[Row], infeasible: int) -> Figures:
    excesses, choices_s = [100 * row.excess for row in rows], [row.choice_s for row in rows]
    return {
        "fleets": len(rows),
        "infeasible": infeasible,
        "median_excess_percent": round(statistics.median(excesses), 4),
        "max_excess_percent": round(max(excesses), 4),
        "median_choice_s": round(statistics.median(choices_s), 3),
        "max_choice_s": round(max(choices_s), 3),
    }


def main() -> int:
    options = parser_of(__doc__).parse_args()
    rows, infeasible = list[Row](), 0
    for size in SIZES:
        tried = [row_of(size, 10_000 + number) for number in range(FLEETS)]
        found = [row for row in tried if row is not None]
        infeasible += len(tried) - len(found)
        rows += found
        active = statistics.fmean(row.chosen for row in found)
        said({"samplers": size, "active": active, **summary(found, len(tried) - len(found))})
    figures = summary(rows, infeasible)
    return ended(options, figures, met=figures["max_excess_percent"] <= 100 * MAX_EXCESS)


if __name__ == "__main__":
    sys.exit(main())
