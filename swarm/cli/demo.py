"""`echo-node demo`: real `lead` and `join` processes on this machine, a live view, and a verdict at the end."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
import webbrowser
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random, SystemRandom
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from swarm.broadcast.publishing import base_of_file
from swarm.broadcast.version.manifest import read_layout
from swarm.cli.runs import readers_of, verify_directory
from swarm.dashboard.report import write_report
from swarm.dashboard.server import serve_files, url_of
from swarm.dashboard.source import ShownRun
from swarm.errors import EchoError, PeerUnreachable, UserError
from swarm.net.client import PeerClient, plain_address
from swarm.report.live import LiveView
from swarm.report.samples import last_episode
from swarm.rollout.journal.verify import Report
from swarm.run.directory import LOGS, resumed_config
from swarm.run.local import last_words, learner_url, printed, start_node, stop_nodes
from swarm.sampler.choice import choose_engine, gpu_build
from swarm.settings import TINY_WARM, DemoConfig, LeadConfig
from swarm.settings_file import load_config
from swarm.tasks.base import Read

POLL_S = 0.25

VLLM_START_S = 300.0
"""Two engines that load vLLM side by side take half a minute on two quiet cores, and minutes on busy ones."""

VLLM_MEMORY = 0.8  # Share of the GPU's memory for all engines of the demo together; the learner's model is tiny
EVAL_PROMPTS = 500  # A share of 0.95 is then known to 0.02 (two standard deviations); with 100, the default, to 0.04


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """What a demo shows. The learner has the TOML `settings`, and more as `flags`. It has learned if at least the share
    `learned` of its last held-out answers is right; `measure` says of what. `lead` does the same with `by_hand`."""

    measure: str
    did: str
    settings: str
    learned: float = 0.9
    flags: tuple[str, ...] = ()
    by_hand: str = "--model tiny --task copy"
    setup_s: float = 0.0


# Beats cost nothing here: a killed sampler is noticed in three seconds
QUICK = '[swarm]\nbeat_s = 1.0\n[learn]\nschedule = "linear"\n'
COPY = Show(
    measure=f"exact match on {EVAL_PROMPTS} numbers",
    did="copies digits that it never trained on",
    settings=f"{QUICK}[eval]\ntarget = 0.95\neval_prompts = {EVAL_PROMPTS}\n",
)
LAKE = Show(
    measure="success from held-out starts",
    did="finds its way from where it never trained",
    by_hand="--model tiny --task frozen-lake",
    settings="""[task]
task = "frozen-lake"
[learn]
schedule = "linear"
steps = 140
group_size = 8
learning_rate = 2e-3
warmup_steps = 5
credit = "turn"
turn_discount = 0.3
[eval]
eval_samples = 2   # As training draws: who always makes the likeliest move may go in a circle
target = 0.9       # At this rate a share may fall again by a tenth, so that no margin is waited for
[swarm]
beat_s = 1.0
max_staleness = 1
""",
)
REAL = Path(__file__).parents[2] / "examples" / "smollm2.toml"

STARTING_S = 5.0
"""Half of the kills come within this time of a learner's start: it is loading its model and repeating the batches since
the last checkpoint."""

RUNNING_S = 3.0
"""The other kills come within this time of its first answer to samplers: ten fit into a demo that learns in 30 s."""


class Demo:
    """One demonstration. Lines and view go to stderr if stdout is for JSON."""

    def __init__(self, options: DemoConfig, show: Show, *, to_stderr: bool) -> None:
        self._options = options
        self._show = show
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
        began, used_s, load = time.monotonic(), cpu_s(), os.getloadavg()
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
        spent = {
            "setup_s": round(self._show.setup_s, 2),
            "wall_s": round(time.monotonic() - began, 2),
            "cpu_s": round(cpu_s() - used_s, 2),
            "largest_process_mb": getrusage(RUSAGE_CHILDREN).ru_maxrss >> (20 if sys.platform == "darwin" else 10),
            "load_average_before": load,
            "load_average_after": os.getloadavg(),
        }
        summary = self._finish(report, spent)
        await self._go_on_with_page()
        return summary

    async def _go_on_with_page(self) -> None:
        """Where somebody looks, serve the page at its address until they press Enter, or Ctrl-C."""
        port = urlsplit(url_of(self._run_dir)).port
        if port is None or not (self._view.is_live and sys.stdin.isatty()):
            return
        loop, pressed = asyncio.get_running_loop(), asyncio.Event()
        shown = ShownRun(directory=self._run_dir, readers=self._readers)
        serving = asyncio.create_task(serve_files(shown, port, lambda line: None))
        loop.add_reader(sys.stdin, pressed.set)
        self._say("the page stays where it was until you press Enter")
        try:
            await asyncio.wait({serving, asyncio.create_task(pressed.wait())}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            pass  # Ctrl-C ends only this: the run has its result
        finally:
            loop.remove_reader(sys.stdin)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

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
        often = 10 if options.kill_learner else None
        config.write_text(self._show.settings)
        flags = ["--config", config, "--seed", options.seed, "--run-dir", self._run_dir]
        given = {"steps": options.steps, "max-staleness": options.max_staleness, "checkpoint-every-steps": often}
        flags += [word for name, value in given.items() if value is not None for word in (f"--{name}", value)]
        if options.reward == "random":
            own = tomllib.loads(self._show.settings).get("task", {}).get("rewards", {})
            flags += [word for name, weight in own.items() for word in ("--rewards", f"{name}={weight}")]
            flags += ["--rewards", "random"]
        return ["lead", "--host", "127.0.0.1", "--port", "0", "--samplers", "0", *map(str, flags), *self._show.flags]

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
        await self._start(name, "join", *flags, *arguments)

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
        words = printed(self._logs / f"sampler-{number}.log")
        return bool(self._nodes[1 + number].returncode) or (bool(words) and words[-1].startswith("paused for "))

    def _note(self, status: dict[str, Any]) -> None:
        for sampler in status["samplers"]:
            counts = {f"rollouts_{name}": sampler["verdicts"].get(name, 0) for name in ("accepted", "duplicate")}
            self._by_sampler[sampler["node"]] = {"engine": sampler["engine"].partition("/")[0], **counts}
        # In the middle of learning: half of the steps or half of the reward, whichever comes first.
        half_way = status["step"] >= status["steps"] // 2 or status["metrics"].get("reward", 0.0) >= 0.5
        if self._options.kill_one and not self._killed and half_way:
            self._killed = True
            os.kill(self._nodes[1].pid, signal.SIGKILL)
            self._say(f"killed sampler-0 (SIGKILL) at step {status['step']}")

    # -- killing the learner ---------------------------------------------------------------------------------

    def _draw_kill(self) -> None:
        """Draw when to kill the new learner."""
        self._kill_at = self._kill_when_running_for_s = math.inf
        if self._learner_kills == self._options.kill_learner:
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

    def _finish(self, verified: Report, spent: dict[str, Any]) -> dict[str, Any]:
        final = json.loads((self._run_dir / "summary.json").read_text())
        show, held_out = self._show, final["held_out"]
        before, after = held_out[0]["exact_match"], held_out[-1]["exact_match"]
        learned = after >= show.learned
        report, _ = write_report(self._run_dir, None, self._readers)
        unchanged = self._is_base_unchanged()
        if self._options.environment:
            self._show_episode()
        self._say(f"{show.measure} {before:.3f} -> {after:.3f} in {final['step']} steps and {spent['wall_s']:.0f} s")
        control = self._options.reward == "random"
        self._say(verdict(show.did, learned=learned, control=control, steps=final["steps"]))
        for line in next_steps(self._run_dir, report, show.by_hand):
            self._say(line)
        verdicts = final["verdicts"]
        return {
            "learned": learned,
            "as_it_should": unchanged and learned != control,
            "adapter": self._options.adapter,
            "base_unchanged": unchanged,
            "seed": self._options.seed,
            "held_out_before": before,
            "held_out_after": after,
            "steps": final["step"],
            "turns_per_rollout": final["metrics"].get("episode/turns/mean", 1.0),
            "largest_fall": largest_fall(held_out),
            **spent,
            "verified": not verified.breaches,
            "rollouts_accepted": verified.accepted,
            "rollouts_stale": verdicts.get("stale", 0) + final["rollouts_dropped"].get("stale", 0),
            "versions_published": final["versions_published"],
            "max_staleness_seen": final["max_staleness_seen"],
            "max_staleness": final["max_staleness"],
            "samplers": self._options.samplers,
            "by_sampler": list(self._by_sampler.values()),
            "sampler_killed": self._killed,
            "learner_killed": self._learner_kills,
            "run_dir": str(self._run_dir),
            "report": str(report),
        }

    def _show_episode(self) -> None:
        try:
            lines = last_episode(self._run_dir, self._readers)
        except UserError as fault:
            lines = [f"no episode can be shown: {fault}"]
        for line in lines:
            self._say(line)

    def _readers(self) -> Read:
        return readers_of(self._run_dir, resumed_config(self._run_dir, {}, finished=True))

    def _is_base_unchanged(self) -> bool:
        """Whether the last version has the frozen weights that the run began with; True without an adapter."""
        versions = self._run_dir / "versions"
        layout = read_layout((versions / "layout").read_bytes())
        return layout.adapter is None or base_of_file(versions / "weights.bin", layout) == layout.adapter.base

    def _log_tail(self, name: str) -> str:
        return last_words(self._logs / f"{name}.log")


def show_of(options: DemoConfig) -> Show:
    """Return what is to be shown. With --real, make its model first, unless it is there."""
    if options.environment:
        return LAKE
    if options.adapter is not None:
        return replace(COPY, flags=("--model", TINY_WARM, "--adapter", str(options.adapter)))
    if not options.real:
        return COPY
    if not REAL.is_file():
        raise UserError(f"--real shows an example of a checkout, and there is no {REAL}")
    began, example = time.monotonic(), load_config(LeadConfig, REAL, {})
    task = example.task.replace("examples", os.path.relpath(REAL.parent))
    made = subprocess.run([sys.executable, REAL.with_suffix(".py")], stdout=subprocess.PIPE, text=True, check=False)
    model = made.stdout.strip()
    if made.returncode:
        raise UserError(model or "the model could not be made, as said above")
    return Show(
        measure=f"exact match on {example.eval_prompts} held-out sums",
        did="answers sums that it never trained on",
        settings=REAL.read_text(),
        learned=example.target or 0.0,
        flags=("--model", model, "--task", task),
        by_hand=f"--config {shlex.quote(os.path.relpath(REAL))} --model {shlex.quote(model)}",
        setup_s=time.monotonic() - began,
    )


def cpu_s() -> float:
    """Return the CPU time of all processes that ended and were waited for: children, and theirs."""
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def largest_fall(held_out: Sequence[dict[str, float]]) -> float:
    """Return by how much the share of right answers fell most from one evaluation to the next, from step 20 on."""
    late = [one["exact_match"] for one in held_out if one["version"] >= 20]
    return max([0.0, *(before - after for before, after in pairwise(late))])


def verdict(did: str, *, learned: bool, control: bool, steps: int) -> str:
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


def next_steps(run_dir: Path, report: Path, by_hand: str) -> list[str]:
    """Return commands that the user can run now."""
    command = os.environ.get("ECHO_NODE_COMMAND", "echo-node")
    quoted = shlex.quote(str(run_dir))
    return [
        f"its curves, rollouts and events as a page: {report}",
        "next, serve that page, prove that no rollout was lost, take the model away:",
        f"  {command} dashboard {quoted}",
        f"  {command} verify {quoted}",
        f"  {command} export model {quoted} --best --to my-model",
        "the same by hand, which prints what a friend types to help:",
        f"  {command} lead {by_hand}",
    ]
