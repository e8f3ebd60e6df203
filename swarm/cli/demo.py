"""`echo-node demo`: real `lead` and `join` processes on this machine, a live view, and a verdict at the end."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import signal
import sys
import time
import webbrowser
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

from rich.console import Console

from swarm.broadcast.publishing import base_of_file
from swarm.broadcast.store.place import sweep
from swarm.broadcast.version.manifest import read_layout
from swarm.cli.runs import readers_of, verify_directory
from swarm.dashboard.server import url_of
from swarm.errors import EchoError, PeerUnreachable, UserError
from swarm.net.client import PeerClient, plain_address
from swarm.node.rundir import LOGS, resumed_config
from swarm.report.charts import Chart, Curve, picture
from swarm.report.figures import Column
from swarm.report.live import LiveView
from swarm.report.samples import last_episode
from swarm.rollout.journal.verify import Report
from swarm.sampler.choice import choose_engine, gpu_build
from swarm.settings import TINY_WARM, DemoConfig

POLL_S = 0.25
START_S = 60.0

VLLM_START_S = 300.0
"""Two engines that load vLLM side by side take half a minute on two quiet cores, and minutes on busy ones."""

VLLM_MEMORY = 0.8  # Share of the GPU's memory for all engines of the demo together; the learner's model is tiny
STOP_S = 20.0  # Before a node that was asked to stop is killed: a sampler takes 10 s to drain, 6 to hand over
BEAT_S = 1.0  # Beats on one machine cost nothing, and a killed sampler is noticed in three seconds
TARGET = 0.95  # Held-out exact match at which the demo stops; it promises LEARNED
LEARNED = 0.9
EVAL_PROMPTS = 500  # A share of 0.95 is then known to 0.02 (two standard deviations); with 100, the default, to 0.04

COPIES = "copies digits that it never trained on"
SOLVES = "finds its way from where it never trained"

LAKE_STEPS, LAKE_BOUND = 140, 1
LAKE = """eval_prompts = 100
eval_samples = 2
held_out_share = 0.1
groups_per_step = 32
group_size = 8
learning_rate = 2e-3
warmup_steps = 5
credit = "turn"
turn_discount = 0.3
"""
"""Held-out starts are played twice, as training draws: who always makes the likeliest move may go in a circle."""

STARTING_S = 5.0
"""Half of the kills come within this time of a learner's start: it is loading its model and repeating the batches since
the last checkpoint."""

RUNNING_S = 3.0
"""The other kills come within this time of its first answer to samplers: ten fit into a demo that learns in 30 s."""


class Demo:
    """One demonstration. Lines and view go to stderr if stdout is for JSON."""

    def __init__(self, options: DemoConfig, *, to_stderr: bool) -> None:
        if options.environment:
            most = {"steps": min(options.steps, LAKE_STEPS), "max_staleness": min(options.max_staleness, LAKE_BOUND)}
            options = options.model_copy(update=most)
        self._options = options
        self._console = Console(stderr=to_stderr)
        self._run_dir = options.run_dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
        self._logs = self._run_dir / LOGS
        self._nodes: list[asyncio.subprocess.Process] = []
        self._view = LiveView(self._console, title="echo-node demo", line_s=2.0)
        self._say = self._view.say
        self._killed = False
        self._by_sampler: dict[str, dict[str, Any]] = {}
        self._kill_seed = SystemRandom().randrange(1 << 32) if options.kill_seed is None else options.kill_seed
        self._random = Random(self._kill_seed)
        self._learner_kills = 0
        self._kill_at = math.inf
        self._kill_when_running_for_s = math.inf

    async def run(self) -> dict[str, Any]:
        """Run to the end. Return the summary that --json prints."""
        if self._options.kill_one and self._options.samplers < 2:
            raise UserError("--kill-one needs a second sampler that goes on: --samplers 2 or more")
        for engine in sorted(set(self._options.engines)):
            await asyncio.to_thread(choose_engine, engine)
        began = time.monotonic()
        self._say(f"run directory {self._run_dir}; what the nodes print is in its {LOGS}/")
        try:
            learner = await self._start("learner", *self._lead_arguments())
            url = await learner_url(self._run_dir, learner, self._logs / "learner.log")
            self._show_page(url_of(self._run_dir))
            if self._options.kill_learner:
                self._say(f"kills are drawn with --kill-seed {self._kill_seed}")
                self._draw_kill()
            await self._start_samplers(url)
            await self._watch(url)
        except asyncio.CancelledError:
            words = f"stopping all processes (again to kill them); the run so far is in {self._run_dir}"
            self._console.print(words, highlight=False, soft_wrap=True)
            raise
        finally:
            await stop_nodes(self._nodes)
        report, *_ = await asyncio.to_thread(verify_directory, self._run_dir)
        for breach in report.breaches:
            self._say(f"breach: {breach}")
        return self._finish(time.monotonic() - began, report)

    def _show_page(self, page: str) -> None:
        if page:
            self._say(f"page {page}")
        if page and self._options.open:
            webbrowser.open(page)

    def _lead_arguments(self) -> list[str]:
        options = self._options
        config = self._logs / "lead.toml"
        try:
            self._logs.mkdir(parents=True)
        except FileExistsError as error:
            raise UserError(f"{self._run_dir} holds another demo: choose another --run-dir") from error
        # A learner that will be killed checkpoints often, so that some kills hit a checkpoint that is being written.
        often = "checkpoint_every_steps = 10\n" if options.kill_learner else ""
        what = LAKE if options.environment else f"eval_prompts = {EVAL_PROMPTS}\n"
        config.write_text(f'beat_s = {BEAT_S}\nschedule = "linear"\n{what}{often}')
        flags = ["--config", config, "--steps", options.steps, "--max-staleness", options.max_staleness]
        flags += ["--reward", options.reward, "--seed", options.seed, "--run-dir", self._run_dir]
        # At the lake's learning rate a share may fall again by a tenth or more, so that no margin is waited for.
        flags += ["--target", LEARNED if options.environment else TARGET]
        flags += ["--task", options.environment] if options.environment else []
        if options.adapter is not None:
            flags += ["--model", TINY_WARM, "--adapter", options.adapter]
        return ["lead", "--host", "127.0.0.1", "--port", "0", *map(str, flags)]

    async def _start(self, name: str, *arguments: str) -> asyncio.subprocess.Process:
        process = await start_node(self._logs / f"{name}.log", *arguments)
        self._nodes.append(process)
        return process

    async def _start_samplers(self, url: str) -> None:
        """Start vLLM samplers first: the others are quick, and the run might be over before vLLM has started."""
        engines = self._options.engines
        vllm, others = engines.count("vllm"), ", ".join(one for one in engines if one != "vllm")
        if vllm:
            self._say(f"starting {vllm} samplers with vLLM, and once they are up the others: {others or 'none'}")
        for number, engine in enumerate(engines):
            share = ("--gpu-memory-share", f"{VLLM_MEMORY / vllm:.2f}") if engine == "vllm" and gpu_build() else ()
            await self._join(url, number, engine, *share)
            # While one measures the free memory of a GPU, no other may take any.
            if share or number == vllm - 1:
                await self._wait_for_vllm(url, number + 1)

    async def _join(self, url: str, number: int, engine: str, *arguments: str) -> None:
        name = f"sampler-{number}"
        flags = ("--bootstrap", url, "--state-dir", str(self._logs / name), "--lan", "--engine", engine)
        await self._start(name, "join", *flags, "--device-class", engine, *arguments)

    async def _wait_for_vllm(self, url: str, wanted: int) -> None:
        """Wait until `wanted` vLLM samplers hold weights, or the run ends without them."""
        began, told_s = time.monotonic(), 0.0
        async for status in self._statuses(url):
            for number, process in enumerate(self._nodes[1:]):
                if process.returncode is not None:
                    raise EchoError(f"sampler-{number} ended: {self._log_tail(f'sampler-{number}')}")
            up = sum(s["installed"] is not None for s in status["samplers"]) if status else 0
            waited_s = time.monotonic() - began
            if up >= wanted:
                self._say(f"vLLM is up in {up} sampler{'' if up == 1 else 's'} after {waited_s:.0f} s")
                return
            if waited_s > VLLM_START_S:
                raise EchoError(f"vLLM did not start in {VLLM_START_S:.0f} s: {self._log_tail('sampler-0')}")
            if waited_s - told_s >= 5.0:
                told_s = waited_s
                self._say(f"waiting for vLLM: {up} of {wanted}, {waited_s:.0f} s")

    async def _statuses(self, url: str) -> AsyncIterator[dict[str, Any] | None]:
        """Yield the learner's status, or None if it does not answer, every POLL_S until it has ended."""
        async with PeerClient(plain_address(url)) as peer:
            while self._nodes[0].returncode is None:
                status = None
                with suppress(PeerUnreachable):
                    status = json.loads(await peer.get("/v1/status", cap_bytes=4 << 20, timeout_s=5.0))
                yield status
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._nodes[0].wait()

    async def _watch(self, url: str) -> None:
        with self._view as view:
            async for status in self._statuses(url):
                self._check_samplers()
                await self._kill_learner_if_due(status)
                if status is not None:
                    self._note(status)
                view.update(status)
        if self._nodes[0].returncode not in (0, 1):
            raise EchoError(f"the learner failed: {self._log_tail(self._learner_name())}")
        if not (self._run_dir / "summary.json").exists():
            raise EchoError(f"the learner ended early: {self._log_tail(self._learner_name())}")

    def _check_samplers(self) -> None:
        """Raise EchoError if every sampler is out: a learner would wait for ever, but a demo should not. Exit status 0
        is a normal end; a sampler that pauses comes back too late."""
        if all(self._is_out(number) for number in range(len(self._nodes) - 1)):
            raise EchoError(f"every sampler ended: {self._log_tail('sampler-0')}")

    def _is_out(self, number: int) -> bool:
        words = self._said(f"sampler-{number}")
        return bool(self._nodes[1 + number].returncode) or (bool(words) and words[-1].startswith("paused for "))

    def _note(self, status: dict[str, Any]) -> None:
        for sampler in status["samplers"]:
            counts = {f"rollouts_{name}": sampler["verdicts"].get(name, 0) for name in ("accepted", "duplicate")}
            self._by_sampler[sampler["node"]] = {"engine": sampler["device_class"], **counts}
        # In the middle of learning: half of the steps or half of the reward, whichever comes first.
        half_way = status["step"] >= status["steps"] // 2 or status["metrics"].get("reward", 0.0) >= 0.5
        if self._options.kill_one and not self._killed and half_way:
            self._killed = True
            os.kill(self._nodes[1].pid, signal.SIGKILL)
            self._say(f"killed sampler-0 (SIGKILL) at step {status['step']}")

    # -- killing the learner ---------------------------------------------------------------------------------

    def _draw_kill(self) -> None:
        """Draw when to kill the new learner; the last of several kills comes as it finishes."""
        self._kill_at = self._kill_when_running_for_s = math.inf
        left = self._options.kill_learner - self._learner_kills
        if left == 0 or left == 1 < self._options.kill_learner:
            return
        if self._random.random() < 0.5:
            self._kill_at = time.monotonic() + self._random.uniform(0.0, STARTING_S)
        else:
            self._kill_when_running_for_s = self._random.uniform(0.0, RUNNING_S)

    async def _kill_learner_if_due(self, status: dict[str, Any] | None) -> None:
        """SIGKILL the learner if its time has come, and start a new one that continues the run."""
        state = status["state"] if status is not None else "no answer"
        if state == "running" and math.isinf(self._kill_at):
            self._kill_at = time.monotonic() + self._kill_when_running_for_s
        ending = state in ("finishing", "finished") and self._learner_kills < self._options.kill_learner
        due = ending or time.monotonic() >= self._kill_at
        # Once there is a summary, the samplers are gone and the run cannot continue.
        if not due or (self._run_dir / "summary.json").exists():
            return
        learner = self._nodes[0]
        learner.kill()
        await learner.wait()
        self._learner_kills += 1
        at = f"{state}, step {status['step']}" if status is not None else "not yet up"
        self._say(f"killed the learner (SIGKILL {self._learner_kills}): {at}")
        name = self._learner_name()
        self._nodes[0] = await self._start(name, "lead", "--resume", str(self._run_dir))
        self._nodes.pop()
        self._draw_kill()

    def _learner_name(self) -> str:
        return f"learner-{self._learner_kills}" if self._learner_kills else "learner"

    def _finish(self, wall_s: float, report: Report) -> dict[str, Any]:
        final = json.loads((self._run_dir / "summary.json").read_text())
        held_out = final["held_out"]
        learned = held_out[-1]["exact_match"] >= LEARNED
        picture = self._draw(held_out)
        unchanged = self._is_base_unchanged()
        if self._options.environment:
            self._show_episode()
        what = "success from held-out starts" if self._options.environment else f"exact match on {EVAL_PROMPTS} numbers"
        before, after = held_out[0]["exact_match"], held_out[-1]["exact_match"]
        self._say(f"{what} {before:.3f} -> {after:.3f} in {final['step']} steps and {wall_s:.0f} s")
        did = SOLVES if self._options.environment else COPIES
        self._say(verdict(did, learned=learned, control=self._options.reward == "random", steps=self._options.steps))
        for line in next_steps(self._run_dir, picture):
            self._say(line)
        verdicts = final["verdicts"]
        return {
            "learned": learned,
            "as_it_should": unchanged and learned != (self._options.reward == "random"),
            "adapter": self._options.adapter,
            "base_unchanged": unchanged,
            "seed": self._options.seed,
            "held_out_before": held_out[0]["exact_match"],
            "held_out_after": held_out[-1]["exact_match"],
            "steps": final["step"],
            "turns_per_rollout": final["metrics"].get("episode/turns/mean", 1.0),
            "wall_s": round(wall_s, 2),
            "verified": not report.breaches,
            "rollouts_accepted": report.accepted,
            "rollouts_stale": verdicts.get("stale", 0) + final["rollouts_dropped"].get("stale", 0),
            "versions_published": final["versions_published"],
            "max_staleness_seen": final["max_staleness_seen"],
            "max_staleness": final["max_staleness"],
            "samplers": self._options.samplers,
            "by_sampler": list(self._by_sampler.values()),
            "sampler_killed": self._killed,
            "learner_killed": self._learner_kills,
            "run_dir": str(self._run_dir),
            "picture": str(picture),
        }

    def _show_episode(self) -> None:
        config = resumed_config(self._run_dir, {}, finished=True)
        try:
            lines = last_episode(self._run_dir, lambda: readers_of(self._run_dir, config))
        except UserError as fault:
            lines = [f"no episode can be shown: {fault}"]
        for line in lines:
            self._say(line)

    def _is_base_unchanged(self) -> bool:
        """Whether the last version has the frozen weights that the run began with; True without an adapter."""
        versions = self._run_dir / "versions"
        layout = read_layout((versions / "layout").read_bytes())
        return layout.adapter is None or base_of_file(versions / "weights.bin", layout) == layout.adapter.base

    def _draw(self, held_out: list[dict[str, float]]) -> Path:
        steps = [json.loads(line) for line in (self._run_dir / "metrics.jsonl").read_text().splitlines()]
        greedy = Column.of((one["version"], one["exact_match"]) for one in held_out)
        curves = [
            Curve(name="reward", column=Column.of((one["step"], one["reward"]) for one in steps)),
            Curve(name="exact match (sampled)", column=Column.of((one["step"], one["exact_match"]) for one in steps)),
            Curve(name="held-out (greedy)", column=greedy, dots=True),
        ]
        path = self._run_dir / "learning.svg"
        chart = Chart(title="Learning", unit="share", curves=curves, floor=0, ceiling=1)
        who = "A random tiny model" if self._options.adapter is None else "An adapter of a tiny model that was taught"
        title = "Cross a frozen lake" if self._options.environment else "Copy four digits"
        path.write_text(picture(title, f"{who} learns from its samplers.", [chart]))
        return path

    def _log_tail(self, name: str) -> str:
        return last_words(self._logs / f"{name}.log")

    def _said(self, name: str) -> list[str]:
        return said(self._logs / f"{name}.log")


async def start_node(log: Path, *arguments: str, module: str = "swarm") -> asyncio.subprocess.Process:
    """Start `python -m MODULE ARGUMENTS`, which ends when this process does. What it prints goes to `log`."""
    # For its owner alone: a learner prints its page's address with the token.
    await asyncio.to_thread(log.touch, mode=0o600)
    with log.open("wb") as output:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments, "--stop-with-stdin"),
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            # Several engines share the cores; more threads each would only wait for one another.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )


async def learner_url(run_dir: Path, learner: asyncio.subprocess.Process, log: Path) -> str:
    """Wait until the learner listens, and return where. Raise EchoError if it does not."""
    path = run_dir / "node.json"
    until = time.monotonic() + START_S
    while not path.exists():
        if learner.returncode is not None or time.monotonic() > until:
            raise EchoError(f"the learner did not start: {last_words(log)}")
        await asyncio.sleep(0.05)
    return str(json.loads(path.read_text())["url"])


async def stop_nodes(nodes: Sequence[asyncio.subprocess.Process]) -> None:
    """Ask every node to end, and kill it after STOP_S."""
    for process in nodes:
        if process.returncode is None:
            process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await asyncio.gather(*(process.wait() for process in nodes))
    except (TimeoutError, asyncio.CancelledError):
        for process in nodes:
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*(process.wait() for process in nodes))
    await asyncio.to_thread(sweep)  # Those that were killed left their weights in memory


def said(log: Path) -> list[str]:
    """Return the lines that a node has printed."""
    return log.read_text(errors="replace").strip().splitlines()


def last_words(log: Path) -> str:
    return f"{' | '.join(said(log)[-2:]) or 'it said nothing'} (log: {log})"


def verdict(did: str = COPIES, *, learned: bool, control: bool, steps: int) -> str:
    """Return in a line what a demo has shown. `did` says what a version does that learned."""
    match learned, control:
        case True, False:
            return f"It learned: the last version {did}."
        case False, True:
            return "It did not learn, and that is the success: the reward was random, so there was nothing to learn."
        case True, True:
            return "It learned from a random reward: something is broken, please report it."
        case _:
            return f"It did not learn within {steps} steps: try another --seed, or more --steps."


def next_steps(run_dir: Path, picture: Path) -> list[str]:
    """Return commands that the user can run now."""
    command = os.environ.get("ECHO_NODE_COMMAND", "echo-node")
    quoted = shlex.quote(str(run_dir))
    return [
        f"learning curves: {picture}",
        "next, look at it as a page, prove that no rollout was lost, take the model away:",
        f"  {command} report {quoted}",
        f"  {command} verify {quoted}",
        f"  {command} export model {quoted} --best --to my-model",
        "the same in two terminals; this one prints what to type in the other:",
        f"  {command} lead --model tiny --task copy",
    ]
