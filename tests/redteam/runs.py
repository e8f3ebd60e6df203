"""One run of a real swarm on loopback with attackers among its nodes, and what it says of each of them."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.audit.auditing import evidence_in
from swarm.node.identity import load_or_create_key
from swarm.run.local import learner_url, start_node, stop_nodes
from swarm.tasks.digits import CopyTask
from swarm.types import NodeId, Prompt, Score
from tests.redteam.sampler import ENGINES, HANGING, NOTED, RAISING
from tests.redteam.wire import RELAYS, WIRE, Client

LIMIT_S, LIMIT_PER_STEP_S = 120.0, 4.0  # A run that takes longer has hung; a step takes a second beside a dozen nodes
MAX_STALENESS = 2
EVAL_PROMPTS = 500  # Where the accuracy at the end counts: a share of 0.95 is then known to 0.02
FLATTERED_EVERY = 20  # Steps: answers to held-out prompts can flatter only until the model itself knows them
SETTINGS = """\
[swarm]
beat_s = 1.0
[learn]
schedule = 'linear'
steps = {steps}
seed = {seed}
[eval]
eval_every_steps = {eval_every}
eval_prompts = {prompts}
"""
FLAWED = "[task]\ntask = 'python:tests.redteam.runs:FlawedCopy'\nreward_timeout_s = 2.0\n"


class FlawedCopy(CopyTask):
    """The copy task with faults in its reward: it raises on `====`, and never returns on `=====`."""

    def score(self, prompt: Prompt, completion: str) -> Score:
        while completion == "=" * HANGING:
            time.sleep(1.0)
        if completion == "=" * RAISING:
            raise ValueError("no digits")
        return super().score(prompt, completion)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackPlan:
    """So many honest samplers, and these attackers, a node each. `measured` is whether the accuracy at the end is
    wanted."""

    honest: int
    attackers: tuple[str, ...] = ()
    steps: int
    seed: int = 0
    measured: bool = True


@dataclass(slots=True)
class Ran:
    """What a run left: nodes by name, events, the learner's evidence, summary, what stopped attackers on the wire, what
    honest samplers printed, what the attacker noted, whether it `ended` with its last step; else `held_out` is 0."""

    nodes: dict[str, set[NodeId]] = field(default_factory=lambda: {"honest": set()})
    events: list[dict[str, Any]] = field(default_factory=list)
    evidence: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    stopped: dict[str, str] = field(default_factory=dict)
    printed: str = ""
    noted: float | None = None
    ended: bool = True
    held_out: float | None = None

    def caught(self, name: str) -> tuple[str, int | None] | None:
        """Return what detected this attacker, and after how many audited rollouts if any were needed; None if
        nothing. Of several nodes each has to be caught; of a pair that steals, the thief."""
        if self.stopped.get(name):
            return self.stopped[name], None
        nodes, verdicts = self.nodes[name], self.verdicts()
        known = [verdicts[node] for node in nodes if node in verdicts]
        if known and (len(known) == len(nodes) or name == "stolen-answers"):
            return max(known, key=lambda verdict: verdict[1] or 0)
        samplers = [one for one in self.summary.get("samplers", ()) if one["node"] in nodes]
        match name:
            case "equivocation" if any(one["verdicts"].get("duplicate") for one in samplers):
                return "duplicates", None
            case "wrong-chunks" if "sent wrong chunks again and again" in self.printed:
                return "digests", None
        return None

    def verdicts(self) -> dict[NodeId, tuple[str, int | None]]:
        """Return which nodes were caught, by what, and after how many audited rollouts; those too that had rollouts
        withheld because of their claims."""
        withheld = [NodeId(node) for event in self.events if event["kind"] == "withheld" for node in event["rollouts"]]
        caught = {e["node"]: (e["detector"], e["audited"]) for e in self.events if e["kind"] == "caught"}
        return dict.fromkeys(withheld, ("claims", None)) | caught

    def false_alarms(self) -> int:
        return len(self.verdicts().keys() & self.nodes["honest"])

    def alarms(self) -> list[dict[str, Any]]:
        """Return what was said of honest nodes, with the evidence against those that were caught."""
        honest = self.nodes["honest"]
        withheld = [e for e in self.events if e["kind"] == "withheld" and honest & e["rollouts"].keys()]
        return [*withheld, *(one for one in self.evidence if one["node"] in honest)]


class Swarm:
    """The processes of one run, in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._run_dir = directory / "run"
        self._processes: list[asyncio.subprocess.Process] = []

    async def run(self, plan: AttackPlan) -> Ran:
        """Run to the end, and end every process whatever happens."""
        ran = Ran()
        wire: dict[str, asyncio.Task[str]] = {}
        try:
            learner = await self._lead(plan)
            url = await learner_url(self._run_dir, learner, self._log("learner"))
            for number in range(plan.honest):
                ran.nodes["honest"].add(await self._join(url, f"honest-{number}"))
            for number, name in enumerate(plan.attackers):
                if name in WIRE:
                    client = Client(url)
                    ran.nodes[name], wire[name] = client.nodes, asyncio.create_task(WIRE[name](client))
                else:
                    ran.nodes.setdefault(name, set()).add(await self._join(url, f"{name}-{number}", attack=name))
            with suppress(TimeoutError):
                async with asyncio.timeout(LIMIT_S + LIMIT_PER_STEP_S * plan.steps):
                    await learner.wait()
        finally:
            for task in wire.values():
                task.cancel()
            ended = await asyncio.gather(*wire.values(), return_exceptions=True)
            await stop_nodes(self._processes)
        ran.stopped = {name: one for name, one in zip(wire, ended, strict=True) if isinstance(one, str)}
        self._read(plan, ran)
        return ran

    def _read(self, plan: AttackPlan, ran: Ran) -> None:
        """A run that hung or ended early may lack a summary."""
        ran.events = [json.loads(line) for line in (self._run_dir / "events.jsonl").read_text().splitlines()]
        ran.evidence = evidence_in(self._run_dir)
        with suppress(FileNotFoundError):
            ran.summary = json.loads((self._run_dir / "summary.json").read_text())
        ran.printed = "".join(self._log(f"honest-{n}").read_text(errors="replace") for n in range(plan.honest))
        ran.noted = max((float(path.read_text()) for path in self._directory.glob(f"*/{NOTED}")), default=None)
        last: dict[str, Any] = (ran.summary.get("held_out") or [{}])[-1]
        ran.ended = last.get("version") == plan.steps
        if plan.measured:
            ran.held_out = last["exact_match"] if ran.ended else 0.0

    async def _lead(self, plan: AttackPlan) -> asyncio.subprocess.Process:
        settings = self._directory / "lead.toml"
        prompts = EVAL_PROMPTS if plan.measured else 1
        flatters = any(ENGINES[name].held_out for name in plan.attackers if name in ENGINES)
        eval_every = FLATTERED_EVERY if flatters else plan.steps
        text = SETTINGS.format(prompts=prompts, steps=plan.steps, eval_every=eval_every, seed=plan.seed)
        is_flawed = {"raising-answers", "hanging-answers"} & {*plan.attackers}
        settings.write_text(text + (FLAWED if is_flawed else ""))
        flags = ("--port", "0", "--max-staleness", str(MAX_STALENESS), "--run-dir", str(self._run_dir))
        given = ("lead", "--host", "127.0.0.1", "--config", str(settings), *flags)
        return await self._start("learner", *given, module="tests.redteam.learner")

    async def _join(self, url: str, name: str, *, attack: str = "") -> NodeId:
        state = self._directory / name
        state.mkdir()
        role = ("--role", "relay") if attack in RELAYS else ("--engine", "transformers")
        flags = ("join", "--lan", "--bootstrap", url, "--state-dir", str(state), *role)
        # Its key is made before the node starts, which then goes by it: so it is known who is who.
        node = load_or_create_key(state).node_id
        module = "tests.redteam.sampler" if attack else "swarm"
        await self._start(name, *((attack,) if attack else ()), *flags, module=module)
        return node

    async def _start(self, name: str, *arguments: str, module: str) -> asyncio.subprocess.Process:
        self._processes.append(await start_node(self._log(name), *arguments, module=module))
        return self._processes[-1]

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"
