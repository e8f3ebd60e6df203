"""How full engines stay while turns travel and environments answer, with real processes and a link that delays.

bin/python -m benchmarks.episodes --json
bin/python -m benchmarks.episodes --turns 64 --json     what a turn of a long episode costs alone (episodes_turns.py)

A learner and two samplers as `lead` and `join` start them; each sampler's engine has 16 places and no model
(tests/scripted_engine.py, `continuous`), and draws turns of 1 to 8 tokens, all as likely, in 0.5 s on average. All that
they say to the learner goes through a TCP proxy that holds it back by half of the round trip in each direction. An
episode has exactly eight turns. Beside it, in the same call: the same without the delay, and samples of one turn that
take as long as the eight together. Each case is a line of JSON: median, least and most of its runs.

A place is idle while its engine draws no turn in it, by the engine's own clock. A turn is away from when it is drawn
until the next one of its episode is there. CPU is the learner's own process, without its trainer and environments.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.delayed_link import delayed
from benchmarks.episodes_environment import TURNS
from benchmarks.episodes_turns import measure_turns
from benchmarks.learning_swarm import POLL_S, Nodes, RunFailed, nodes_in, url_of
from swarm.settings import LeadConfig
from swarm.settings_file import as_toml
from tests.integration.processes import free_port

SAMPLERS, PLACES = 2, 16

MAX_TOKENS = 8
"""Of a turn. The engine draws every length from 1 on with the same chance."""

TURN_S = 0.5
"""Mean time of a turn in a place."""

GROUPS, GROUP_SIZE, MAX_STALENESS = 8, 8, 4

WARM_UP_STEPS = 2
"""After these every sampler has given more than the answers of a newcomer, and has a rate."""

LIMIT_S = 240.0
"""Until the warm-up is over."""

TARGET = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One turn: when its lease came, when its answer was there, and for how long it had a place in the engine."""

    group: str
    index: int
    turn: int
    came_s: float
    ended_s: float
    drawn_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What is measured: a stretch of time, all places of all engines, and the CPU seconds of the learner's processes
    in it, the trainer's and rewards' apart."""

    began_s: float
    ended_s: float
    places: int
    learner_cpu_s: float
    environment_cpu_s: float
    trainer_cpu_s: float

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`turns` of an episode, which take the same time together whatever their number; `round_trip_s` of the link."""

    name: str
    turns: int
    round_trip_s: float

    @property
    def max_tokens(self) -> int:
        return MAX_TOKENS * TURNS // self.turns

    @property
    def longest_s(self) -> float:
        return self.max_tokens / TOKENS_PER_S

    @property
    def environment(self) -> str:
        return f"python:benchmarks.episodes_environment:{'OneTurn' if self.turns == 1 else 'EightTurns'}"


TOKENS_PER_S = (1 + MAX_TOKENS) / 2 / TURN_S
CASES = (
    Case(name="8 turns, 100 ms", turns=TURNS, round_trip_s=0.1),
    Case(name="8 turns, no delay", turns=TURNS, round_trip_s=0.0),
    Case(name="1 turn, 100 ms", turns=1, round_trip_s=0.1),
)


def measure(case: Case, seconds: float) -> dict[str, Any]:
    """Return the figures of one swarm. RunFailed if it does not come so far; its processes end in any case."""
    port = free_port()
    with (
        tempfile.TemporaryDirectory(prefix="episodes-") as path,
        delayed(port, case.round_trip_s / 2) as proxy,
        nodes_in(Path(path)) as nodes,
    ):
        directory = Path(path)
        lead_settings(directory / "lead.toml", case)
        settings = ("--config", str(directory / "lead.toml"), "--run-dir", str(directory / "run"))
        listen = ("--host", "127.0.0.1", "--port", str(port), "--advertise", f"127.0.0.1:{proxy}")
        learner = nodes.start("learner", "0.2", "0", "lead", *listen, *settings, module="tests.slow_steps")
        url_of(nodes, directory / "run" / "node.json")
        logs = [_join(nodes, directory, number, proxy) for number in range(SAMPLERS)]
        _until_warm(nodes, directory / "run" / "metrics.jsonl")
        window = _watch(nodes, learner.pid, seconds)
        _wait(nodes, case.longest_s + 2 * case.round_trip_s + 1.0)  # What is drawn at the window's end is written then.
        turns = [
            Drawn(**json.loads(line)) for log in logs for line in log.read_text().splitlines(True) if line[-1:] == "\n"
        ]
    return figures_of(turns, window)


def lead_settings(path: Path, case: Case) -> None:
    """Write the learner's settings, under which it is not what samplers wait for."""
    settings = {
        "task": case.environment,
        "max_new_tokens": case.max_tokens,
        "max_episode_tokens": 10 * MAX_TOKENS + 2 * TURNS,  # The tiny model has room for 128
        "max_staleness": MAX_STALENESS,
        "groups_per_step": GROUPS,
        "group_size": GROUP_SIZE,
        "rewards": {"random": 1.0},  # What is drawn means nothing.
        "audit_share": 0.0,
        "learning_rate": 1e-5,  # The model stays near what the engines claim
        "activate": "all",
        "beat_s": 2.0,
        "steps": 1_000_000,
        "eval_prompts": 1,
        "eval_every_steps": 1_000_000,
        "checkpoint_every_steps": 1_000_000,
    }
    path.write_text(as_toml(LeadConfig, settings))


def _join(nodes: Nodes, directory: Path, number: int, proxy: int) -> Path:
    log, settings = directory / f"turns-{number}.jsonl", directory / "join.toml"
    settings.write_text(
        f'[engine]\nengine = "vllm"\nbatch_samples = {PLACES}\n'
        f"engine_arguments = {{ continuous = true, tokens_per_s = {TOKENS_PER_S} }}\n"
    )
    told = ("--lan", "--bootstrap", f"127.0.0.1:{proxy}", "--config", str(settings))
    state = ("--state-dir", str(directory / f"sampler-{number}"))
    given = ("benchmarks.episodes_sampler", str(log), "join", *told, *state)
    nodes.start(f"sampler-{number}", *given, module="tests.scripted")
    return log


def _until_warm(nodes: Nodes, metrics: Path) -> None:
    until = time.monotonic() + LIMIT_S
    while not metrics.exists() or metrics.read_text().count("\n") < WARM_UP_STEPS:
        if time.monotonic() > until:
            raise RunFailed(f"no {WARM_UP_STEPS} steps within {LIMIT_S:g} s")
        _wait(nodes, POLL_S)


def _watch(nodes: Nodes, learner: int, seconds: float) -> Window:
    began_s, before = time.monotonic(), cpu_s(learner)
    _wait(nodes, seconds)
    ended_s, spent = time.monotonic(), cpu_s(learner)
    spent.subtract(before)
    return Window(
        began_s=began_s,
        ended_s=ended_s,
        places=SAMPLERS * PLACES,
        learner_cpu_s=spent["learner"],
        environment_cpu_s=spent["environment"],
        trainer_cpu_s=spent["trainer"],
    )


def cpu_s(learner: int) -> Counter[str]:
    """Return the CPU seconds so far of the learner's process, its environments and the rest."""
    root = psutil.Process(learner)
    spent: Counter[str] = Counter()
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            name = "learner" if process is root else _role(" ".join(process.cmdline()))
            times = process.cpu_times()
            spent[name] += times.user + times.system
    return spent


def _role(command: str) -> str:
    return "environment" if "reward_child" in command else "trainer"


def _wait(nodes: Nodes, seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        nodes.check()
        time.sleep(min(POLL_S, left_s))


# -- figures -----------------------------------------------------------------------------------------------------


def idle_share(turns: Sequence[Drawn], window: Window) -> float:
    """Return the share of the places' time in which no turn was drawn in them."""
    busy_s = sum(
        max(0.0, min(one.ended_s, window.ended_s) - max(one.ended_s - one.drawn_s, window.began_s)) for one in turns
    )
    return 1 - busy_s / (window.places * window.seconds)


def away_s(turns: Sequence[Drawn], window: Window) -> list[float]:
    """Return for each turn after an episode's first that came in the window, how long ago the one before was drawn. One
    that came to another node for a second time, after the first was lost, is left out."""
    ended = {(one.group, one.index, one.turn): one.ended_s for one in turns}
    came = [one for one in turns if one.turn and window.began_s <= one.came_s < window.ended_s]
    before = [(one, ended.get((one.group, one.index, one.turn - 1))) for one in came]
    return [one.came_s - then for one, then in before if then is not None and then <= one.came_s]


def figures_of(turns: Sequence[Drawn], window: Window) -> dict[str, Any]:
    """Return one run's figures. Shares of 1, seconds, CPU seconds a turn; None where there is nothing to say."""
    ended = [one for one in turns if window.began_s <= one.ended_s < window.ended_s]
    if not ended:
        raise ValueError("no turn ended in the window")
    away = sorted(away_s(turns, window))
    count = len(ended)
    return {
        "idle_share": idle_share(turns, window),
        "turns_per_s": count / window.seconds,
        "queued_s": statistics.median(one.ended_s - one.drawn_s - one.came_s for one in ended),
        "turn_s": statistics.fmean(one.drawn_s for one in ended),
        "away_median_s": statistics.median(away) if away else None,
        "away_95_s": away[int(0.95 * len(away))] if away else None,
        "learner_cpu_s": window.learner_cpu_s / count,
        "environment_cpu_s": window.environment_cpu_s / count,
        "trainer_cpu_s": window.trainer_cpu_s / count,
        "window": asdict(window),
    }


def spread(runs: Sequence[dict[str, Any]], name: str) -> tuple[float, float, float] | None:
    """Return median, least and most of a figure over repeats."""
    found = [run[name] for run in runs if run[name] is not None]
    return (statistics.median(found), min(found), max(found)) if found else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3, help="runs of each case")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long each is measured")
    parser.add_argument("--json", action="store_true", help="all runs as the last line too")
    parser.add_argument("--turns", type=int, help="measure the line and the loop with so many turns an episode instead")
    options = parser.parse_args(arguments)
    if options.turns is not None:
        print(json.dumps(measure_turns(options.turns)))
        return 0
    runs: dict[Case, list[dict[str, Any]]] = {case: [] for case in CASES}
    for _ in range(options.repeat):
        for case, found in runs.items():
            found.append({"load": os.getloadavg()[0], **measure(case, options.seconds)})
    names = [name for name in runs[CASES[0]][0] if name not in ("load", "window")]
    for case, found in runs.items():
        print(json.dumps({"case": case.name, **{name: spread(found, name) for name in names}}))
    idle = spread(runs[CASES[0]], "idle_share")
    met = idle is not None and idle[0] <= TARGET
    if options.json:
        print(json.dumps({"met": met, "cases": {case.name: found for case, found in runs.items()}}))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
