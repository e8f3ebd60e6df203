"""A run on data: questions of arithmetic in English, a small model of bytes, and half an hour on a CPU.

python -m benchmarks.arithmetic --minutes 30 --json
python -m benchmarks.arithmetic --minutes 5 --directory runs/arithmetic --control

There is no download: the questions are generated, and the base is a random Qwen3 after a short supervised course on
questions of the same kind, none of them among the data. The course ends early, so that the base answers some questions
and fails at most. It is taught two ways to answer, evenly: the number alone, and the calculation with the number at its
end, which is easier to get right. What follows is therefore ELICITATION AND SHARPENING from the base's own warm start:
which of its ways pays, and more certainty in it. It is no sign of a skill that the base did not have.

What runs is what a researcher would run: `echo-node lead --model DIR --task jsonl:FILE` with numeric reward and
--samplers `join` processes on loopback, asked to end after --minutes from the first held-out round.

The curve: pass@1 of 400 held-out questions, two samples each at the temperature of training, a round every --eval-every
steps. Target: the last round is above the first by a two-proportion z test at 1 % (one-sided). With --control the
reward is random and the target is that it is not. Exit status 1 if the target is missed.

--directory keeps base, data, run and logs; a base that is there already is used again.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.arithmetic_figures import HEAD, Point, line_of, read_curve, summary
from benchmarks.arithmetic_words import make_base, questions, write_jsonl
from benchmarks.learning_swarm import Nodes, RunFailed, nodes_in, url_of
from swarm.errors import UserError

QUESTIONS = 9_000
HELD_OUT_SHARE = 0.05
"""By digest: about 450."""

EVAL_PROMPTS = 400
"""An accuracy of one half is then known to 0.05."""

EVAL_SAMPLES = 2
"""Of each; more than one are drawn at the temperature of training, not greedily."""

LEARNING_RATE = 3e-4
"""As suits the tiny model after its warm start."""

GROUPS, GROUP_SIZE = 32, 8
MAX_NEW_TOKENS = 12
"""The longest calculation has nine bytes."""

EVAL_EVERY = 50
"""A round is some 25 steps under way, because training goes first: one of eight samples may be held-out."""
ENDLESS = 1_000_000

START_S = 300.0
"""Until the first held-out round is done."""

POLL_S = 1.0

FAILED, BAD_INPUT = 1, 2
"""Exit statuses."""


def lead_settings(directory: Path, *, random_reward: bool, eval_every: int, seed: int) -> str:
    """The learner's configuration file."""
    values = {
        "model": str(directory / "base"),
        "task": f"jsonl:{directory / 'questions.jsonl'}",
        "reward": "random" if random_reward else "task",
        "held_out_share": HELD_OUT_SHARE,
        "learning_rate": LEARNING_RATE,
        "groups_per_step": GROUPS,
        "group_size": GROUP_SIZE,
        "max_new_tokens": MAX_NEW_TOKENS,
        "eval_every_steps": eval_every,
        "eval_prompts": EVAL_PROMPTS,
        "eval_samples": EVAL_SAMPLES,
        "checkpoint_every_steps": 100,
        "steps": ENDLESS,
        "beat_s": 1.0,
        "seed": seed,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    return "\n".join([*lines, "[rewards]", "numeric = 1.0", ""])


def prepare(directory: Path, seed: int) -> dict[str, Any]:
    """Data and base under `directory`; what is said of them."""
    directory.mkdir(parents=True, exist_ok=True)
    data = questions(f"data {seed}", QUESTIONS)
    write_jsonl(data, directory / "questions.jsonl")
    began = time.monotonic()
    parameters = make_base(directory / "base", seed, without=[one.text for one in data], say=_say)
    return {"parameters": parameters, "warm_start_s": round(time.monotonic() - began, 1), "questions": len(data)}


def run(directory: Path, options: argparse.Namespace) -> list[Point]:
    """Lead the swarm for its time, telling every held-out round. RunFailed if a process fails."""
    run_dir = directory / ("control" if options.control else "run")
    settings = directory / f"{run_dir.name}.toml"
    settings.write_text(
        lead_settings(directory, random_reward=options.control, eval_every=options.eval_every, seed=options.seed)
    )
    with nodes_in(directory) as nodes:
        nodes.start("learner", "lead", "--lan", "--port", "0", "--config", str(settings), "--run-dir", str(run_dir))
        url = url_of(nodes, run_dir / "node.json")
        for number in range(options.samplers):
            state = str(directory / f"state-{run_dir.name}-{number}")
            nodes.start(f"sampler-{number}", "join", "--lan", "--bootstrap", url, "--state-dir", state)
        _watch(nodes, run_dir, options.minutes * 60)
    return read_curve(run_dir)


def _watch(nodes: Nodes, run_dir: Path, seconds: float) -> None:
    """Until the time is up, which runs from the first held-out round."""
    _say(HEAD)
    told, until = 0, time.monotonic() + START_S
    while time.monotonic() < until:
        nodes.check()
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", action="store_true", help="a random reward, which must not teach")
    parser.add_argument("--directory", type=Path, help="where everything is kept; default: nowhere")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _work(directory: Path, options: argparse.Namespace) -> bool:
    described = prepare(directory, options.seed)
    points = run(directory, options)
    found = summary(points)
    met = _verdict(found, control=options.control)
    if options.json:
        settings = {"control": options.control, "samplers": options.samplers, "seed": options.seed}
        _say(json.dumps({**described, **settings, **found, "met": met}))
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
