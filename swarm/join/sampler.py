"""The sampler node: one session after another until the run is over."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

import msgspec

from swarm.aio import unless_stopped
from swarm.broadcast.receiver.receiver import Receiver
from swarm.confine import has_gpu
from swarm.errors import ChildFailed, EchoError, InUseElsewhere, ProtocolError, UserError, first_fault
from swarm.join.joining import JoiningNode
from swarm.join.link import LearnerLink, SwarmChanged
from swarm.node.bootstrap import Greeting
from swarm.node.identity import SECRETS
from swarm.rollout.messages import DEVICE_CLASS_LENGTH, Offer
from swarm.sampler.choice import choose_engine
from swarm.sampler.client import SUBMIT_PATH, RolloutClient
from swarm.sampler.session import Ending, SamplerStatus, Session
from swarm.sampler.spool import Spool
from swarm.sampler.worker import EngineWorker, ProofFailed
from swarm.settings import JoinConfig

CPU_MEMORY_SHARE = 0.25  # Of the free memory, for the weights, in addition to the engine's own copy

MAX_FAULTS = 5  # Sessions in a row that may fail without an accepted rollout: then this machine is to blame, not chance
FAULT_PAUSE_S = 2.0  # Pause before a new session, times the number of faults so far

PAUSE_S = 600.0
"""Pause after MAX_FAULTS, for the cause to pass (somebody else fills the GPU, the disk is full). The node still relays
weights meanwhile."""

PORTION_S = 120.0
"""After which a machine that its cloud may take away hands over what it has of a completion: half of this is lost of
each if there is no notice."""

OWNER, BY_OWNER = "owner", "by its owner, until `echo-node resume`"  # Source and reason of a hold
PAUSED = "paused"  # A file in the state directory while the owner's pause lasts: it outlives a restart of the node

PROOF_WINDOW_S = 3600.0
"""If two engines within this time fail to hold the weights that they were given, a new engine does not help. Rollouts
accepted in between prove nothing: they may have been drawn with the previous weights."""


class SamplerNode(JoiningNode):
    """A sampler."""

    role = "sampler"

    def __init__(
        self, config: JoinConfig, say: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(config, say)
        self._clock = clock
        self._has_left = False
        self._status = SamplerStatus()
        self._engine: EngineWorker | None = None
        self._ending = Ending()
        self._holds.on_hold = lambda: self._ending.ask(0.0)

    def request_stop(self, grace_s: float | None = None) -> bool:
        grace_s = self._config.grace if grace_s is None else grace_s
        self._stop.set()
        self._ending.ask(grace_s)
        busy = self._status.state == "sampling" and grace_s > 0
        waits = f"waiting for the samples under way, {grace_s:,.0f} s at most" if busy else "telling the learner"
        self._say(f"leaving; {waits} (again to leave at once)")
        return True

    def last_words(self) -> str:
        """Return a line on what became of the node's work; "" if the node was not asked to leave."""
        if not self._stop.is_set():
            return ""
        if self._card is None:
            return self._log.keep("ended before it was in a swarm")
        if self._has_left:
            return self._log.keep(f"left the swarm; {self._totals()}")
        kept = "samples that were drawn and not handed in are kept for the next start of this node"
        return self._log.keep(f"left at once; {kept}")

    def drawn(self) -> dict[str, float]:
        return {"rollouts": self._status.verdicts["accepted"], "tokens": self._status.accepted_tokens}

    def _totals(self) -> str:
        """Return what this process has contributed, and what became of the rest."""
        counts = self._status.verdicts
        rest = {name: count for name, count in sorted(counts.items()) if count and name != "accepted"}
        others = ", ".join(f"{count:,} {name}" for name, count in rest.items())
        refused = f" (and {others})" if others else ""
        station = self._network.station
        return (
            f"{counts['accepted']:,} of its rollouts were accepted, {self._status.accepted_tokens:,} tokens{refused}; "
            f"weights: {station.download.total_bytes / 1e6:,.1f} MB received, "
            f"{station.upload.total_bytes / 1e6:,.1f} MB passed on"
        )

    async def run(self) -> None:
        """Sample until the run is over or a stop is requested. Raise ProofFailed if two engines fail their proofs,
        and UserError if none fits or comes up."""
        self._chosen = await asyncio.to_thread(choose_engine, self._config.engine, self._config.device)
        self._say(self._chosen.line)
        await super().run()
        self._has_left = True
        self._status.state = "finished"
        if not self._stop.is_set():
            self._say(self._totals())

    def status(self) -> dict[str, Any]:
        data = self._data.status()
        return {
            **self._network.status(),
            "state": self._state(data.get("syncing")),
            "bootstrap": list(self._config.bootstrap),
            "verdicts": dict(self._status.verdicts),
            "accepted_tokens": self._status.accepted_tokens,
            "dropped": self._status.drops.counts,
            **(self._engine.status() if self._engine else {}),
            **data,
        }

    def _state(self, syncing: dict[str, Any] | None) -> str:
        """Return what the node does now, with the reason if it draws nothing."""
        if self._holds.reason:
            return f"paused: {self._holds.reason}"
        if self._status.standby:
            return f"standby: {self._status.standby}"
        if syncing and self._engine is not None and self._engine.installed is None:
            return f"syncing: {syncing['share']:.0%} of version {syncing['version']}"
        return self._status.state

    def memory_share(self) -> float:
        # On a CPU the engine's own copy, in float32, is twice as large as the map.
        return super().memory_share() if self._config.device != "cpu" and has_gpu() else CPU_MEMORY_SHARE

    def _set_state(self, state: str) -> None:
        self._status.state = state

    async def _take_part(self, found: Greeting, receiver: Receiver) -> bool:
        # Of a model that does not fit no weights are fetched: the first session asks its engine.
        receiver.opening.may_fetch.clear()
        if (self._directory / PAUSED).exists():
            self._holds.set(OWNER, BY_OWNER)
        spool = await asyncio.to_thread(Spool, self._directory / "spool", found.hello.swarm, self._say)
        return await self._serve(receiver, spool)

    async def _serve(self, receiver: Receiver, spool: Spool) -> bool:
        """Run one session after another. Return True when the run is over, False to look for a swarm again."""
        faults, proof_failed_at = 0, -math.inf
        while not self._stop.is_set():
            if self._holds.reason:
                # Until it draws it is a relay, which needs no room for a model.
                receiver.opening.may_fetch.set()
                await self._wait_until_free()
                continue
            accepted = self._status.verdicts["accepted"]
            try:
                if await self._session(receiver, spool):
                    return True
                continue
            except (EchoError, ExceptionGroup) as error:
                fault = first_fault(error)
            self._is_elsewhere = isinstance(fault, InUseElsewhere)
            if isinstance(fault, SwarmChanged):
                self._say(f"{fault}; joining it")
                return False
            if not isinstance(fault, ChildFailed | ProtocolError):
                raise fault
            faults = 1 if self._status.verdicts["accepted"] > accepted else faults + 1
            if isinstance(fault, ProofFailed):
                if self._clock() - proof_failed_at < PROOF_WINDOW_S:
                    raise ProofFailed(f"leaving: a new engine does not hold what it was given either: {fault}")
                proof_failed_at = self._clock()
            if faults == MAX_FAULTS:
                if isinstance(fault, ChildFailed) and not self._status.has_started:
                    raise UserError(
                        f"leaving: the engine failed to start {MAX_FAULTS} times in a row, the last: {fault}"
                    )
                await self._pause(fault)
                faults = 0
            else:
                self._say(f"{fault}; starting again ({faults} of {MAX_FAULTS} faults in a row)")
                await unless_stopped(self._stop, asyncio.sleep(FAULT_PAUSE_S * faults))
        return False

    async def _asked(self, request: dict[str, Any]) -> str:
        mark = self._directory / PAUSED
        match request:
            case {"do": "pause"}:
                self._holds.set(OWNER, BY_OWNER)
                try:
                    mark.touch()
                except OSError as error:
                    return f"paused, but a restart will lift it: {error}"
                return "paused, also after a restart; `echo-node resume` lifts it"
            case {"do": "resume"}:
                mark.unlink(missing_ok=True)
                self._holds.set(OWNER, "")
                return f"still paused: {self._holds.reason}" if self._holds.reason else "drawing again"
        return await super()._asked(request)

    async def _wait_until_free(self) -> None:
        self._say(f"paused: {self._holds.reason}; this node still passes weights on")
        await unless_stopped(self._stop, self._holds.free.wait())
        if not self._stop.is_set():
            self._say("nothing holds this node any more: drawing again")

    async def _pause(self, fault: BaseException) -> None:
        """Pause, with the reason in the status: what broke MAX_FAULTS sessions will probably break the next one."""
        self._say(f"paused for {PAUSE_S / 60:g} minutes after {MAX_FAULTS} faults in a row, the last: {fault}")
        self._status.state = f"paused: {fault}"
        await unless_stopped(self._stop, asyncio.sleep(PAUSE_S))

    async def _session(self, receiver: Receiver, spool: Spool) -> bool:
        """Work for the learner with one engine, which starts while the node looks for the learner. Return True if the
        run is over."""
        longest = self._card.sample_tokens if self._card else 0
        engine = self._engine = EngineWorker(
            self._directory,
            kind=self._chosen.kind,
            options=msgspec.structs.replace(self._config.engine_options, sample_tokens=longest),
            secrets=[self._directory / name for name in SECRETS],
            threads=self._config.threads,
            portion_s=PORTION_S if self._config.spot else None,
        )
        launch = asyncio.create_task(self._launch(engine, receiver))
        ending = self._ending = Ending()
        try:
            self._status.state = "looking for the learner"
            link = LearnerLink(self._network, self._say, on_busy=self._put_off)
            hello = await unless_stopped(ending.asked, link.find())
            if hello is None:
                return False
            session = Session(
                client=RolloutClient(link, self._network.node),
                beat_s=hello.beat_s,
                engine=engine,
                launch=launch,
                spool=spool,
                receiver=receiver,
                offer=lambda: self._offer(engine, receiver),
                status=self._status,
                on_change=lambda: self._network.set_held(engine.installed),
                say=self._say,
            )
            return await session.run(ending)
        finally:
            launch.cancel()
            await asyncio.gather(launch, return_exceptions=True)
            await engine.stop()
            self._engine = None

    async def _launch(self, engine: EngineWorker, receiver: Receiver) -> None:
        """Start the engine, and let weights be fetched if it has room for the model. Raise UserError if it has not.
        Other nodes have layout and weights, also while the learner is away."""
        await engine.launch()
        self._say((await engine.reckon(await receiver.opening.layout())).said)
        receiver.opening.may_fetch.set()

    def _offer(self, engine: EngineWorker, receiver: Receiver) -> Offer:
        """Return what this node is and costs, so that the learner can choose."""
        config = self._config
        return Offer(
            device_class=engine.device_class[:DEVICE_CLASS_LENGTH],
            samples_at_once=engine.places,
            lockstep=engine.lockstep,
            full_rollouts_per_s=float(f"{engine.rates.full_rollouts_per_s:.3g}"),
            cost_per_hour=config.cost_per_hour,
            traffic_cost_per_gb=config.traffic_cost_per_gb,
            uplink_bytes_per_s=float(f"{receiver.uplink_bytes_per_s:.2g}"),
            sent_bytes=self._network.station.upload.total_bytes,
            received_bytes=self._network.station.download.total_bytes,
            nickname=config.nickname,
            downlink_bytes_per_s=config.max_download * 1e6 / 8 if config.max_download else 0.0,
        )

    def _put_off(self, path: str) -> None:
        """Count submissions that the learner had no room for; each is submitted again."""
        if path == SUBMIT_PATH:
            self._status.verdicts["overloaded"] += 1
