"""How far examples/arithmetic.toml comes in a given time, and whether a random reward teaches it anything.

bin/python -m benchmarks.arithmetic --minutes 30 --json
bin/python -m benchmarks.arithmetic --minutes 5 --directory runs/arithmetic-control --control
bin/python -m benchmarks.arithmetic --steps 600 --adapter 8 --json

What runs is the example as it is shipped, without its target: `lead` with the example's settings and --samplers `join`
processes on loopback, asked to end after --minutes from the first held-out round, or ended by --steps before that.
With --adapter the base is frozen, and the learning rate ten times the example's unless --learning-rate says it. What it
shows is ELICITATION AND SHARPENING of what the base has from its warm start (benchmarks/arithmetic_words.py); it is no
sign of a skill that the base did not have.

The curve: pass@1 of the held-out questions, two samples each at the temperature of training, a round every --eval-every
steps. Target: the last round is above the first by a two-proportion z test at 1 % (one-sided). With --control the
reward is random and the target is that it is not. Exit status 1 if the target is missed.

--directory keeps settings, run and logs.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.arithmetic_figures import HEAD, Point, line_of, read_curve, summary
from benchmarks.arithmetic_words import EXAMPLES
from benchmarks.learning_swarm import Nodes, RunFailed, nodes_in, url_of
from swarm.errors import UserError
from swarm.settings import LeadConfig
from swarm.settings_file import as_toml, read_settings

EVAL_EVERY = 50
"""A round is some steps under way, because training goes first: one of eight samples may be held-out."""

ENDLESS = 1_000_000

START_S = 300.0
"""Until the first held-out round is done."""

POLL_S = 1.0

FAILED, BAD_INPUT = 1, 2
"""Exit statuses."""


def lead_settings(
    *,
    random_reward: bool,
    eval_every: int,
    seed: int,
    steps: int = ENDLESS,
    adapter: int | None = None,
    learning_rate: float | None = None,
) -> str:
    """The learner's configuration file: the example's, from wherever it is run."""
    values = read_settings(LeadConfig, EXAMPLES / "arithmetic.toml")
    del values["target"]
    values |= {
        "model": str(EXAMPLES / "arithmetic"),
        "task": f"jsonl:{EXAMPLES / 'questions.jsonl'}",
        "rewards": {**values["rewards"], **({"random": 1.0} if random_reward else {})},
        "eval_every_steps": eval_every,
        "steps": steps,
        "beat_s": 1.0,
        "seed": seed,
    }
    if adapter:
        values |= {"adapter": adapter, "learning_rate": round(10 * values["learning_rate"], 9)}
    if learning_rate:
        values["learning_rate"] = learning_rate
    return as_toml(LeadConfig, values)


def run(directory: Path, options: argparse.Namespace) -> list[Point]:
    """Lead the swarm for its time, telling every held-out round. RunFailed if a process fails."""
    directory.mkdir(parents=True, exist_ok=True)
    run_dir = directory / ("control" if options.control else "run")
    settings = directory / f"{run_dir.name}.toml"
    given = {name: getattr(options, name) for name in ("eval_every", "seed", "steps", "adapter", "learning_rate")}
    settings.write_text(lead_settings(random_reward=options.control, **given))
    with nodes_in(directory) as nodes:
        flags = ("--host", "127.0.0.1", "--port", "0", "--config", str(settings), "--run-dir", str(run_dir))
        learner = nodes.start("learner", "lead", *flags)
        url = url_of(nodes, run_dir / "node.json")
        for number in range(options.samplers):
            state = str(directory / f"state-{run_dir.name}-{number}")
            nodes.start(f"sampler-{number}", "join", "--lan", "--bootstrap", url, "--state-dir", state)
        _watch(nodes, learner, run_dir, options.minutes * 60)
    return read_curve(run_dir)


def _watch(nodes: Nodes, learner: subprocess.Popen[bytes], run_dir: Path, seconds: float) -> None:
    """Until the time is up, which runs from the first held-out round, or the last step has been evaluated."""
    _say(HEAD)
    told, until, is_over = 0, time.monotonic() + START_S, False
    while time.monotonic() < until and not is_over:
        nodes.check()
        is_over = learner.poll() is not None
        points = read_curve(run_dir)
        if points and not told:
            until = time.monotonic() + seconds
        for point in points[told:]:
            _say(line_of(point))
        told = len(points)
        time.sleep(POLL_S)
    if not told:
        raise RunFailed(f"no held-out round was done in {START_S:.0f} s; the logs are beside {run_dir}")


def _verdict(found: dict[str, Any], *, control: bool) -> bool:
    """Say whether the target was met."""
    met = found["risen"] != control
    wanted = "a random reward does not raise it" if control else "it rises"
    _say(
        f"held-out {found['first']:.3f} -> {found['last']:.3f} in {found['minutes']:.1f} minutes and {found['steps']} "
        f"steps, z = {found['z']:.1f}: target ({wanted}) {'met' if met else 'MISSED'}"
    )
    return bool(met)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="default: 30")
    parser.add_argument(
        "--samplers", type=int, default=1, help="default: 1, with the learner as many as two cores take"
    )
    parser.add_argument("--eval-every", type=int, default=EVAL_EVERY, help=f"steps; default: {EVAL_EVERY}")
    parser.add_argument("--steps", type=int, default=ENDLESS, help="learner steps at most")
    parser.add_argument("--adapter", type=int, help="rank: train an adapter instead of the model")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", action="store_true", help="a random reward, which must not teach")
    parser.add_argument("--directory", type=Path, help="where everything is kept; default: nowhere")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _work(directory: Path, options: argparse.Namespace) -> bool:
    points = run(directory, options)
    found = summary(points)
    met = _verdict(found, control=options.control)
    if options.json:
        settings = {
            name: getattr(options, name) for name in ("control", "samplers", "seed", "adapter", "learning_rate")
        }
        _say(json.dumps({**settings, **found, "met": met}))
    return met


def _say(line: str) -> None:
    print(line, flush=True)


def _fail(message: str, status: int) -> NoReturn:
    print(f"benchmarks.arithmetic: {message}", file=sys.stderr)
    sys.exit(status)


def main() -> None:
    options = _options()
    if options.minutes <= 0 or options.samplers < 1 or options.eval_every < 1:
        _fail("--minutes is above 0, --samplers and --eval-every are 1 at least", BAD_INPUT)
    # Asked to end, it first ends what it started.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        if options.directory is not None:
            met = _work(options.directory.resolve(), options)
        else:
            with tempfile.TemporaryDirectory(prefix="arithmetic-") as directory:
                met = _work(Path(directory), options)
    except UserError as error:
        _fail(str(error), BAD_INPUT)
    except RunFailed as error:
        _fail(str(error), FAILED)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    sys.exit(0 if met else FAILED)


if __name__ == "__main__":
    main()
