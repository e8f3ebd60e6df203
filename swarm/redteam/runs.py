"""One run of a real swarm on loopback with attackers among its nodes, and what it says of each of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.cli.demo import EVAL_PROMPTS, last_words, learner_url, start_node, stop_nodes
from swarm.errors import EchoError, PeerUnreachable
from swarm.net.client import PeerClient, plain_address
from swarm.node.identity import load_or_create_key
from swarm.redteam.sampler import RELAYS
from swarm.redteam.wire import WIRE, Client
from swarm.types import NodeId

POLL_S = 0.5
LIMIT_S, LIMIT_PER_STEP_S = 240.0, 10.0  # A run that takes longer has hung; a step takes a second beside a dozen nodes
MAX_STALENESS = 2
LEASE_S = 10.0  # Samples take a tenth of a second: what a hoarder holds is had back after this and a minute
SETTINGS = "beat_s = 1.0\nschedule = 'linear'\neval_prompts = {prompts}\neval_every_steps = {steps}\nsteps = {steps}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """So many honest samplers, and these attackers. `measured` is whether the accuracy at the end is wanted."""

    honest: int
    attackers: tuple[str, ...] = ()
    steps: int
    audit: bool = True
    measured: bool = False


@dataclass(slots=True)
class Ran:
    """What a run left: nodes by name, events, summary, what stopped attackers on the wire, and what honest samplers
    printed."""

    nodes: dict[str, set[NodeId]] = field(default_factory=lambda: {"honest": set()})
    events: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    stopped: dict[str, str] = field(default_factory=dict)
    said: str = ""

    def caught(self, name: str) -> tuple[str, int | None] | None:
        """Return what detected this attacker, and after how many rollouts if rollouts were needed; None if nothing."""
        if self.stopped.get(name):
            return self.stopped[name], None
        nodes, withheld = self.nodes[name], self.withheld()
        verdicts = {e["node"]: (e["detector"], e["audited"]) for e in self.events if e["kind"] == "caught"}
        known = [verdicts.get(node) or (("claims", 1) if withheld[node] else None) for node in nodes]
        # Of several identities each has to be caught.
        if known and all(known):
            return max((one for one in known if one), key=lambda one: one[1])
        samplers = [one for one in self.summary["samplers"] if one["node"] in nodes]
        match name:
            case "equivocation" if any(one["verdicts"].get("duplicate") for one in samplers):
                return "duplicates", 1
            case "wrong-chunks" if "sent wrong chunks again and again" in self.said:
                return "digests", None
        return None

    def false_alarms(self) -> int:
        """Return how many honest nodes were caught, or had rollouts withheld."""
        caught = {event["node"] for event in self.events if event["kind"] == "caught"}
        return len((caught | self.withheld().keys()) & self.nodes["honest"])

    def withheld(self) -> Counter[str]:
        """Return how many rollouts of each node were withheld because of their claims."""
        return sum((Counter(e["rollouts"]) for e in self.events if e["kind"] == "withheld"), Counter[str]())


class Swarm:
    """The processes of one run, in `directory`. `tell` gets a line of progress."""

    def __init__(self, directory: Path, tell: Callable[[str], None]) -> None:
        self._directory = directory
        self._tell = tell
        self._run_dir = directory / "run"
        self._processes: list[asyncio.subprocess.Process] = []

    async def run(self, plan: Plan) -> Ran:
        """Run to the end, and end every process whatever happens."""
        ran = Ran()
        wire: dict[str, asyncio.Task[str]] = {}
        try:
            learner = await self._lead(plan)
            url = await learner_url(self._run_dir, learner, self._log("learner"))
            for number in range(plan.honest):
                ran.nodes["honest"].add(await self._join(url, f"honest-{number}"))
            for name in plan.attackers:
                if name in WIRE:
                    client = Client(url)
                    ran.nodes[name], wire[name] = client.nodes, asyncio.create_task(WIRE[name](client))
                else:
                    ran.nodes[name] = {await self._join(url, name, attack=name)}
            await self._watch(plan, learner, url)
        finally:
            for task in wire.values():
                task.cancel()
            ended = await asyncio.gather(*wire.values(), return_exceptions=True)
            await stop_nodes(self._processes)
        ran.stopped = {name: one for name, one in zip(wire, ended, strict=True) if isinstance(one, str)}
        ran.events = [json.loads(line) for line in (self._run_dir / "events.jsonl").read_text().splitlines()]
        ran.summary = json.loads((self._run_dir / "summary.json").read_text())
        ran.said = "".join(self._log(f"honest-{n}").read_text(errors="replace") for n in range(plan.honest))
        return ran

    async def _lead(self, plan: Plan) -> asyncio.subprocess.Process:
        settings = self._directory / "lead.toml"
        text = SETTINGS.format(prompts=EVAL_PROMPTS if plan.measured else 1, steps=plan.steps)
        settings.write_text(f"{text}lease_time_limit_s = {LEASE_S}\n" + ("" if plan.audit else "audit_share = 0.0\n"))
        flags = ("--port", "0", "--max-staleness", str(MAX_STALENESS), "--run-dir", str(self._run_dir))
        return await self._start("learner", "lead", "--host", "127.0.0.1", "--config", str(settings), *flags)

    async def _join(self, url: str, name: str, *, attack: str = "") -> NodeId:
        state = self._directory / name
        state.mkdir()
        role = ("--role", "relay") if attack in RELAYS else ("--engine", "transformers")
        flags = ("join", "--lan", "--bootstrap", url, "--state-dir", str(state), *role)
        # Its key is made before the node starts, which then goes by it: so it is known who is who.
        node = load_or_create_key(state).node_id
        await self._start(name, *((attack,) if attack else ()), *flags, attacks=bool(attack))
        return node

    async def _start(self, name: str, *arguments: str, attacks: bool = False) -> asyncio.subprocess.Process:
        module = "swarm.redteam.sampler" if attacks else "swarm"
        self._processes.append(await start_node(self._log(name), *arguments, module=module))
        return self._processes[-1]

    async def _watch(self, plan: Plan, learner: asyncio.subprocess.Process, url: str) -> None:
        until = time.monotonic() + LIMIT_S + LIMIT_PER_STEP_S * plan.steps
        step = -1
        async with PeerClient(plain_address(url)) as peer:
            while learner.returncode is None:
                if time.monotonic() > until:
                    raise EchoError(f"a run of {plan.steps} steps did not end: {last_words(self._log('learner'))}")
                with suppress(PeerUnreachable):
                    status = json.loads(await peer.get("/v1/status", cap_bytes=4 << 20, timeout_s=5.0))
                    if status["step"] > step:
                        step = status["step"]
                        self._tell(f"step {step} of {plan.steps}")
                await asyncio.sleep(POLL_S)
        if learner.returncode not in (0, 1):
            raise EchoError(f"the learner failed: {last_words(self._log('learner'))}")

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"
