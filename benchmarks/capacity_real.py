"""The learner's idle share in a real swarm on loopback: predicted from what the swarm measured, against what it was.

bin/python -m benchmarks.capacity --real --json

Nine points, each a learner and SAMPLERS samplers in processes of their own (two each), everybody active. The trainer
takes TRAIN_STEP_S for a step (tests/slow_steps.py), each sampler's engine without a model works at a set pace
(tests/scripted_engine.py), and the learner's uplink is capped so that a version, dealt once and passed on by the
samplers, takes the wanted part of a step. What is wanted only places the point on the grid. A prediction is made from
what was measured in the run itself after its warm-up, nothing else: the mean of a step less the wait for its batch
(metrics.jsonl), and of `capacity.inputs` in `status` the lengths of accepted completions, and each sampler's rate and
install, medians over the steps. Measured is the sum of the waits over the sum of the periods of the same steps.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

from pydantic import BaseModel
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import Figures, said
from benchmarks.capacity import demand_of, unit_of
from benchmarks.learning_swarm import POLL_S, Nodes, RunFailed, lines_of, nodes_in, url_of
from swarm.learner.tiny import tiny_model, tiny_tokenizer
from swarm.pay.fleet import Demand, Lengths, Worker, mean_longest
from swarm.pay.model import predict
from swarm.settings import JoinConfig, LeadConfig
from swarm.settings_file import as_toml
from tests.integration.processes import fetch_status

TRAIN_STEP_S = 4.0  # What the model does not know, questions, scoring and records, takes 0.1 to 0.3 s of two busy cores
SWARMS = 3  # Points that are measured at once: most of their processes sleep most of the time
SAMPLERS = 4
AT_ONCE = 8  # Samples in one batch of an engine
GROUPS, GROUP_SIZE = 8, 4  # A step is one batch of every sampler
MAX_TOKENS = 32  # Lengths are uniform from 1 to this
STEPS = 25  # Measured at each point: what comes of chance in a hundred batches is 1 or 2 points
LIMIT_S = 450.0  # For one point: twice what the slowest takes
HANDLING_S = 0.1  # Of a version's way, what is not its bytes: encoding, checking, installing. Only to place a point.
POINT_POINTS = 5.0  # Most that one point may be off
LEARNING_RATE = 1e-4  # Versions go on changing, and the model stays near what the engines claim
BITS = 8e-6  # Megabits in a byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Where a run is wanted: `broadcast_steps` is T_b / T, `ratio` the rate over the least that is enough, or R / T."""

    max_staleness: int
    broadcast_steps: float
    ratio: float


GRID = tuple(
    Point(max_staleness=bound, broadcast_steps=broadcast, ratio=ratio)
    for bound, ratios in ((1, (1.0, 1.3, 0.7)), (2, (1.3, 0.7, 1.0)), (3, (0.7, 1.0, 1.3)))
    for broadcast, ratio in zip((0.1, 0.4, 0.8), ratios, strict=True)
)  # Each bound with each broadcast, and each ratio once with either


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    unit: str
    tokens_per_s: float
    max_upload_mbit: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run said of itself: inputs of a prediction, and the share to compare it with."""

    demand: Demand
    workers: tuple[Worker, ...]
    install_s: tuple[float, ...]
    idle_share: float
    trainer_s: float
    live_prediction: float
    steps: int


def pace_of(point: Point, version_bytes: float) -> Pace:
    """How fast samplers and the learner's uplink are to be for a point."""
    lengths = Lengths(tokens=tuple(float(n) for n in range(1, MAX_TOKENS + 1)))
    demand = demand_of(point.max_staleness, GROUPS, GROUP_SIZE, TRAIN_STEP_S, lengths)
    broadcast_s = point.broadcast_steps * TRAIN_STEP_S

    def fleet(rate: float) -> tuple[list[Worker], list[float]]:
        each = demand.rollouts_per_step / TRAIN_STEP_S / SAMPLERS
        count = max(1, round(rate / each))
        one = Worker(name="w", rollouts_per_s=each, samples_at_once=AT_ONCE, lockstep=True)
        return [one] * count, [broadcast_s] * count

    unit, rate = unit_of(demand, fleet)
    batch_s = SAMPLERS * AT_ONCE / (point.ratio * rate)
    bytes_s = max(HANDLING_S / 2, broadcast_s - HANDLING_S)
    return Pace(
        unit=unit,
        tokens_per_s=mean_longest(lengths.tokens, AT_ONCE) / batch_s,
        max_upload_mbit=version_bytes * BITS / bytes_s,
    )


# -- a run -----------------------------------------------------------------------------------------------------


def make_model(directory: Path) -> str:
    """Write a larger sister of the embedded model, whose versions are of some 100 kB: a cap lets 64 kB pass at once."""
    config = tiny_model(0).config
    config.update({"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "layer_types": None})
    model: Any = Qwen3ForCausalLM
    model(Qwen3Config(**config.to_dict())).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return str(directory)


def run_point(model: str, point: Point, pace: Pace, stop: Event) -> Measured:
    """A swarm at that pace, until STEPS steps were measured. RunFailed if it does not come so far, or `stop` is set."""
    with tempfile.TemporaryDirectory(prefix="capacity-real-") as directory, nodes_in(Path(directory)) as nodes:
        swarm = _Swarm(nodes, model, point, pace, stop, TRAIN_STEP_S)
        swarm.start()
        swarm.until("every sampler has a rate and an install", swarm.is_measured)
        first = len(swarm.rows()) + 2 * (point.max_staleness + 2)
        inputs: list[Figures] = []
        for step in range(first, first + STEPS):
            swarm.take(step + 1)
            inputs.append(swarm.inputs())
        return measured_of(swarm.rows()[first - 1 : first + STEPS], inputs, point.max_staleness)


def version_bytes(model: str) -> float:
    """What a version of such a run takes on the wire: the median of a few, from a swarm without caps."""
    point = Point(max_staleness=2, broadcast_steps=0.0, ratio=1.0)
    pace = Pace(unit="", tokens_per_s=SAMPLERS * AT_ONCE, max_upload_mbit=None)
    with tempfile.TemporaryDirectory(prefix="capacity-real-") as directory, nodes_in(Path(directory)) as nodes:
        swarm = _Swarm(nodes, model, point, pace, Event(), 1.0)
        swarm.start()
        swarm.take(16)
        spread = fetch_status(swarm.url)["broadcasts"].values()
        return statistics.median(float(one["encoded_bytes"]) for one in spread)


class _Swarm:
    def __init__(self, nodes: Nodes, model: str, point: Point, pace: Pace, stop: Event, train_step_s: float) -> None:
        self._nodes, self._stop, self._directory, self._run_dir = nodes, stop, nodes.directory, nodes.directory / "run"
        # What a scripted engine draws has no task's reward, so no gradient, and versions would be of nothing.
        self._lead = {
            "rewards": {"random": 1.0},
            "model": model,
            "task": "copy",
            "learning_rate": LEARNING_RATE,
            "max_staleness": point.max_staleness,
            "groups_per_step": GROUPS,
            "group_size": GROUP_SIZE,
            "max_new_tokens": MAX_TOKENS,
            "audit_share": 0.0,
            "activate": "all",
            "beat_s": 0.5,
            "eval_prompts": 1,
            **dict.fromkeys(("steps", "eval_every_steps", "checkpoint_every_steps"), 1_000_000),
        }
        if pace.max_upload_mbit is not None:
            self._lead["max_upload"] = pace.max_upload_mbit
        arguments = {"tokens_per_s": pace.tokens_per_s}
        self._join = {"engine": "vllm", "batch_samples": AT_ONCE, "engine_arguments": arguments}
        self._train_step_s = train_step_s
        self._until = time.monotonic() + LIMIT_S

    def start(self) -> None:
        lead = self._write("lead.toml", LeadConfig, self._lead)
        given = ("--host", "127.0.0.1", "--port", "0", "--config", lead, "--run-dir", str(self._run_dir))
        self._nodes.start("learner", str(self._train_step_s), "0", "lead", *given, module="tests.slow_steps")
        self.url = url_of(self._nodes, self._run_dir / "node.json")
        join = self._write("join.toml", JoinConfig, self._join)
        for number in range(SAMPLERS):
            state = str(self._directory / f"sampler-{number}")
            told = ("--lan", "--bootstrap", self.url, "--config", join, "--state-dir", state)
            self._nodes.start(f"sampler-{number}", "swarm", "join", *told, module="tests.scripted")

    def until(self, what: str, happened: Callable[[], bool]) -> None:
        while not happened():
            self._nodes.check()
            if time.monotonic() > self._until:
                raise RunFailed(f"not within {LIMIT_S:g} s: {what}")
            if self._stop.wait(POLL_S):
                raise RunFailed("another point failed, or the benchmark was stopped")

    def take(self, steps: int) -> None:
        self.until(f"{steps} steps", lambda: len(self.rows()) >= steps)

    def inputs(self) -> Figures:
        found: Figures = fetch_status(self.url)["capacity"]["inputs"]
        return found

    def is_measured(self) -> bool:
        found = self.inputs()["by_node"].values()
        return len(found) == SAMPLERS and all(one["rollouts_per_s"] and one["install_s"] is not None for one in found)

    def rows(self) -> list[Figures]:
        """One for each step."""
        return lines_of(self._run_dir / "metrics.jsonl")

    def _write(self, name: str, kind: type[BaseModel], settings: Figures) -> str:
        path = self._directory / name
        path.write_text(as_toml(kind, settings))
        return str(path)


# -- figures ---------------------------------------------------------------------------------------------------


def measured_of(rows: Sequence[Figures], inputs: Sequence[Figures], max_staleness: int) -> Measured:
    """Of the rows after the first, whose time is where the measurement begins, and of `inputs` meanwhile."""
    period_s = [after["time"] - before["time"] for before, after in pairwise(rows)]
    waited_s = [row["idle_share"] * period for row, period in zip(rows[1:], period_s, strict=True)]
    names = sorted(inputs[-1]["by_node"])

    def usual(name: str, figure: str) -> float:
        return statistics.median(float(one["by_node"][name][figure]) for one in inputs)

    def worker(name: str) -> Worker:
        said = {figure: inputs[-1]["by_node"][name][figure] for figure in ("samples_at_once", "lockstep")}
        return Worker(name=name, rollouts_per_s=usual(name, "rollouts_per_s"), **said)

    train_step_s = (sum(period_s) - sum(waited_s)) / len(period_s)
    return Measured(
        demand=demand_of(max_staleness, GROUPS, GROUP_SIZE, train_step_s, Lengths.of(inputs[-1]["lengths"])),
        workers=tuple(worker(name) for name in names),
        install_s=tuple(usual(name, "install_s") for name in names),
        idle_share=sum(waited_s) / sum(period_s),
        trainer_s=statistics.fmean(row["train_step_s"] for row in rows[1:]),
        live_prediction=statistics.median(row["predicted_idle_share"] for row in rows[1:]),
        steps=len(period_s),
    )


def found_of(point: Point, pace: Pace, measured: Measured) -> Figures:
    """One row. Shares of 1; `error_points` is predicted minus measured."""
    predicted = predict(measured.demand, measured.workers, measured.install_s)
    inputs = {"point": asdict(point), "pace": asdict(pace), "measured": asdict(measured)}
    error_points = 100 * (predicted.idle_share - measured.idle_share)
    return inputs | {"predicted": asdict(predicted), "load": os.getloadavg()[0], "error_points": error_points}


def summary(found: Sequence[Figures]) -> Figures:
    errors = [abs(one["error_points"]) for one in found]
    return {
        "real_mean_abs_error_points": statistics.fmean(errors),
        "real_max_abs_error_points": max(errors),
        "real_met": max(errors) <= POINT_POINTS,
        "real_points": found,
    }


def run() -> Figures:
    with tempfile.TemporaryDirectory(prefix="capacity-model-") as directory:
        whole = summary(_points(make_model(Path(directory))))
    said({name: value for name, value in whole.items() if name != "real_points"})
    return whole


def _points(model: str) -> list[Figures]:
    nbytes, stop = version_bytes(model), Event()
    said({"version_bytes": nbytes})

    def found(point: Point) -> Figures:
        pace = pace_of(point, nbytes)
        return said(found_of(point, pace, run_point(model, point, pace, stop)))

    with ThreadPoolExecutor(SWARMS) as pool:
        try:
            return list(pool.map(found, GRID))
        finally:
            # Else a fault of one point, or Ctrl-C, would wait for the others to come to their ends.
            stop.set()
            pool.shutdown(cancel_futures=True)
