"""The whole swarm on a virtual clock: what `echo-node simulate` runs.

Real are the rollout plane, the relay forest's planner, the estimator, the activation and the cost book. Simulated are
time, engines (capacity_sampler), transfers as a fluid (capacity_weights), gossip as sampled delays (capacity_news), and
the lives of nodes (capacity_fleet). The rules of the house:
- A volunteer that is there fetches weights, stays warm, and is paid while it is active. A rented machine is started
  when it is activated, paid from then on, and given back once it is on standby and has handed in what it had begun.
- What the learner knows is late: a sampler that vanishes is noticed after three missed beats, a node without an engine
  by gossip. Activation is asked at every batch, and at once when an active sampler is gone.
- FAILED_SHARE of all generations fail; their samples are leased again.
All that happens depends on the scenario, the settings and the seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from statistics import fmean

from swarm.capacity.scenario import Departure, Scenario, demand_of
from swarm.rollout.leases import MISSED_BEATS
from swarm.sim.capacity import CapacityFigures, Learner, Tally, figures_between, tally_of
from swarm.sim.capacity_choice import Choice, Choose
from swarm.sim.capacity_desk import BEAT_S, Desk
from swarm.sim.capacity_fleet import HOUR_S, Node, nodes_of
from swarm.sim.capacity_news import death_s, newcomer_s
from swarm.sim.capacity_sampler import Occupancy, Sampler
from swarm.sim.capacity_timeline import POINTS, Mark, Moment, StepTaken, Timeline
from swarm.sim.capacity_weights import Ports, Traffic, Weights
from swarm.sim.world import World
from swarm.types import NodeId, Rollout

FAILED_SHARE = 0.001
"""Generations that fail: an engine out of memory, a box that is restarted by its owner. Nobody publishes the figure;
one in a thousand is visible and decides nothing."""

NOTICE_S = MISSED_BEATS * BEAT_S + 0.01
"""Until the watch of silence has noticed a sampler that vanished."""

WARMUP_SHARE, WARMUP_STEPS = 0.1, 10
"""Before figures count: a tenth of the time, or ten steps if that is less. Engines start, places are empty."""
