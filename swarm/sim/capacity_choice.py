"""The learner's estimator and activation in a simulated swarm, told what a learner would see."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from swarm.capacity.activation import Activated, Activation, StoodBy
from swarm.capacity.estimator import Estimator, StartValues
from swarm.capacity.fleet import Disseminate, Worker
from swarm.capacity.overlap import sustained
from swarm.capacity.scenario import BYTES_PER_MBIT, Scenario, delta_bytes, lengths_of
from swarm.capacity.selection import Rules
from swarm.dissemination import disseminate_by
from swarm.sim.capacity_figures import Settings


class Choice:
    """Who is active. A node says its rate and its links when it joins; a machine that could be rented is known by what
    the market says of it. Figures of the scenario stand in for what is not observed yet."""

    def __init__(self, scenario: Scenario, settings: Settings, rules: Rules) -> None:
        self._scenario = scenario
        self._settings = settings
        self._estimator = Estimator(
            StartValues(train_step_s=scenario.learner.train_step_s, lengths=lengths_of(scenario))
        )
        self._activation = Activation(rules)
        self._everybody = rules.activate == "all" and rules.budget_per_hour is None
        self._changed = True
        self._gone: set[str] = set()
        self._came = 0
        self.disseminate_by = lru_cache(maxsize=16)(self._disseminate_by)
        period_s = settings.publish_every_steps * scenario.learner.train_step_s
        self._sustained = sustained(self.disseminate_by(self._version_bytes), period_s=period_s)

    def joined(self, worker: Worker, *, now: float) -> None:
        """The learner knows of a node, or of an offer."""
        estimator, name = self._estimator, worker.name
        prices = (worker.cost_per_hour, worker.down_cost_per_gb, worker.up_cost_per_gb)
        fault = estimator.joined(name, worker.device_class, *prices, now=now)
        assert fault is None, fault
        self._changed = True
        self._came += 1
        estimator.rate(name, worker.rollouts_per_s, worker.samples_at_once, worker.lockstep, now=now)
        estimator.link(name, worker.uplink_bytes_per_s, worker.downlink_bytes_per_s, worker.public, now=now)

    def left(self, name: str, *, vanished: bool, now: float) -> None:
        self._estimator.left(name, vanished=vanished, now=now)
        self._changed = True
        self._gone.add(name)

    def generated(self, name: str, tokens: Sequence[float], *, now: float) -> None:
        """Rollouts of these lengths were accepted."""
        self._estimator.generated(name, [max(1, round(count)) for count in tokens], now=now)

    def installed(self, name: str, install_s: float, *, now: float) -> None:
        self._estimator.installed(name, install_s, now=now)

    def stepped(self, train_step_s: float, waited_s: float, *, now: float) -> None:
        """A batch was taken after `waited_s`."""
        self._estimator.trained(train_step_s, now=now)
        self._estimator.idle(waited_s / (waited_s + train_step_s), now=now)

    @property
    def calls_for_decision(self) -> bool:
        """Whether what happened since the last decision calls for another one soon."""
        return self._activation.calls_for_decision(gone=self._gone, came=self._came)

    def decide(self, *, now: float) -> tuple[list[str], list[str]]:
        """Who is to be active from now on, and who on standby, of those for whom that changes."""
        if self._everybody and not self._changed:
            return [], []  # It asks the model all the same, which takes long.
        self._changed = False
        self._gone, self._came = set(), 0
        settings, learner = self._settings, self._scenario.learner
        demand = self._estimator.demand(
            groups_per_step=learner.rollouts_per_step // learner.group_size,
            group_size=learner.group_size,
            publish_every_steps=settings.publish_every_steps,
            max_staleness=settings.max_staleness,
        )
        idle = self._estimator.idle_share()
        changes = self._activation.decide(
            demand,
            self._estimator.workers(now),
            self._sustained,
            now=now,
            idle_share=None if idle is None else idle.value,
        )
        activated = [change.node for change in changes if isinstance(change, Activated)]
        stood_by = [change.node for change in changes if isinstance(change, StoodBy)]
        for name in activated:
            self._estimator.activated(name, now=now)
        for name in stood_by:
            self._estimator.stood_by(name, now=now)
        return activated, stood_by

    @property
    def _version_bytes(self) -> float:
        if not self._settings.deltas:
            return self._scenario.model.bytes_bf16
        return delta_bytes(self._scenario, self._settings.publish_every_steps)

    def _disseminate_by(self, encoded_bytes: float) -> Disseminate:
        return disseminate_by(
            learner_uplink_bytes_per_s=self._scenario.learner.up_mbps * BYTES_PER_MBIT,
            encoded_bytes=encoded_bytes,
            apply_s=self._scenario.delta.apply_s,
            scheme=self._settings.scheme,
        )
