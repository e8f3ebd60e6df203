"""Sokoban in a swarm: a model of arithmetic's size, half an hour of two cores, held-out boards before and after.

bin/python -m benchmarks.sokoban --to DIRECTORY

The model is a random Qwen3 of 174,336 parameters after a short supervised course of good moves, on other boards than
those held out. Its last part mixes in any moves, so that the model knows better than it plays, and fails at most
boards. Then it plays boards of 4x4 cells with one box, six turns of up to four moves, and nobody shows it a move any
more: the reward is the environment's, for the box on its goal alone. `lead` and two `join` processes run on loopback,
first with this reward, then with a random one, from the same model and for as many steps. Held-out boards are played as
training plays them, at temperature 1, each twice.

What improves is what the course has begun: this is no sign of a skill that the model never had. A line of JSON a run:
held_out             (version, share of held-out plays that were solved)
turns_per_rollout    in the first and in the last step
breaches             what `verify` found; of a run that is whole, nothing
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Regex, pre_tokenizers

from benchmarks.arithmetic_words import Curriculum, byte_tokenizer, small_model, teach
from benchmarks.learning_swarm import run
from examples.environments.puzzles import SOKOBAN, Sokoban
from swarm.cli.runs import verify_directory
from swarm.learner.sft import Example
from swarm.settings import LeadConfig
from swarm.tasks.questions import is_held_out
from swarm.types import Prompt
from tests.unit.environments.players import sokoban_solver

TASK = "python:examples.environments.puzzles:Sokoban:size=4,boxes=1"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)

BOARDS, TURNS = 2_000, 6
"""Boards of the course; turns of an episode, and of its course, in each of which up to four moves are made."""

ALONE = Curriculum(steps=500, batch=128, learning_rate=4e-3, warmup_steps=50)
GAMES = Curriculum(steps=100, batch=32, learning_rate=3e-3, warmup_steps=20)
SLIPS = Curriculum(steps=60, batch=32, learning_rate=1e-3, warmup_steps=10)
"""First boards alone: in whole games with slips from the start, nothing was learned of them in 600 steps of 32. In the
last part half of the words are drawn, so that the model, which knows better, still fails at most boards."""

SAMPLERS, STEPS = 2, 400
STEP_LIMIT_S = 30.0
"""A run that takes longer for a step has hung."""

SETTINGS = {
    "task": TASK,
    "max_turns": TURNS,
    "max_new_tokens": 5,  # Up to four moves and the end
    "groups_per_step": 16,
    "group_size": 8,
    "learning_rate": 5e-4,
    "credit": "turn",
    "turn_discount": 0.8,
    "max_staleness": 2,
    "eval_every_steps": 50,
    "eval_prompts": 200,
    "eval_samples": 2,
    "beat_s": 1.0,
}


def boards() -> Iterator[tuple[Sokoban, str]]:
    """Games whose boards are not held out, and what their players read first."""
    for seed in count():
        environment = Sokoban()
        messages = tuple(environment.reset(seed))
        if not is_held_out(Prompt(prompt_id="-", text="", answer="", messages=messages)):
            yield environment, messages[0][1]


def tokenizer() -> Any:
    """One token a word of the rules, one a cell or a move."""
    words = pre_tokenizers.Split(Regex(r" ?[a-z]+|[\s\S]"), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return byte_tokenizer([words, as_bytes], [SOKOBAN + " That cannot be done."] * 2, CHAT_TEMPLATE)


def word(draw: Random, shown: str, *, is_good: bool) -> str:
    """One or two moves: those of a shortest way, or any, as where there is no way any more."""
    length = draw.choice((1, 2))
    return (sokoban_solver(shown)[:length] if is_good else "") or "".join(draw.choices("LRUD", k=length))


def lesson(chat_of: Any, pool: Sequence[tuple[Sokoban, str]], index: int, *, is_alone: bool, slips: float) -> Example:
    """A board after some turns, alone or with all that was said before, and good moves, or by `slips` any. Half
    of the turns before it were good ones."""
    draw = Random(f"lesson {index}")
    start, told = pool[draw.randrange(len(pool))]
    environment, shown = deepcopy(start), told[len(SOKOBAN) :]
    chat = [{"role": "user", "content": told}]
    for _ in range(draw.randrange(TURNS)):
        said = word(draw, shown, is_good=draw.random() < 0.5)
        step = environment.step(said)
        if step.done:
            break
        shown = step.messages[0][1]
        chat += [{"role": "assistant", "content": said}, {"role": "user", "content": shown}]
    asked = [{"role": "user", "content": shown}] if is_alone else chat
    return Example(prompt=chat_of(asked), completion=word(draw, shown, is_good=draw.random() >= slips))


def make_base(directory: Path) -> None:
    """Write a directory in Hugging Face format, in bf16, with the model after its course."""
    words, model = tokenizer(), small_model(0)
    pool = list(islice(boards(), BOARDS))

    def chat_of(chat: list[dict[str, str]]) -> str:
        return str(words.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))

    words.save_pretrained(directory)
    model.save_pretrained(directory)
    for course, is_alone, slips in ((ALONE, True, 0.0), (GAMES, False, 0.0), (SLIPS, False, 0.5)):
        part = partial(lesson, chat_of, pool, is_alone=is_alone, slips=slips)
        teach(directory, part, course)


def played(base: Path, reward: str, steps: int, directory: Path) -> dict[str, Any]:
    """Have a swarm play for so many steps, and return what held-out boards and the journal say."""
    directory.mkdir(parents=True)
    rewards = {} if reward == "task" else {reward: 1.0}
    config = LeadConfig.model_validate({**SETTINGS, "model": str(base), "rewards": rewards, "steps": steps})
    run(config, SAMPLERS, directory, step_limit_s=STEP_LIMIT_S)
    summary = json.loads((directory / "run" / "summary.json").read_text())
    lines = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    report, _, _ = verify_directory(directory / "run")
    return {
        "reward": reward,
        "steps": steps,
        "minutes": round((lines[-1]["time"] - lines[0]["time"]) / 60, 1),
        "held_out": [(one["version"], round(one["exact_match"], 3)) for one in summary["held_out"]],
        "turns_per_rollout": [round(lines[at]["episode/turns/mean"], 2) for at in (0, -1)],
        "breaches": report.breaches,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--to", type=Path, required=True, help="an empty directory, for the model and the runs")
    options.add_argument("--steps", type=int, default=STEPS, help="learner steps of each run")
    options.add_argument("--rewards", default="task,random", help="the runs, one after the other")
    chosen = options.parse_args()
    base = chosen.to / "base"
    if not base.exists():
        make_base(base)
    for reward in chosen.rewards.split(","):
        print(json.dumps(played(base, reward, chosen.steps, chosen.to / reward)), flush=True)


if __name__ == "__main__":
    main()
