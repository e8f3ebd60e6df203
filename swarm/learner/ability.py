"""Compares a model before and after a run. `python -m swarm.learner.ability RUN_DIR FILE`.

Both models answer held-out questions of the run's task and a few of general knowledge, by greedy decoding. Both also
read a text: its mean negative log-likelihood (nll) shows how well they still model other text.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from swarm.learner.checkpoint.files import newest_whole
from swarm.learner.checkpoint.model_files import load_model
from swarm.settings import LeadConfig
from swarm.tasks import load_task, task_options

TEXT = Path(__file__).parents[2] / "ARCHITECTURE.md"
TEXT_TOKENS = 1000
ANSWERS = 5  # To questions of the task
ANSWER_TOKENS = 24  # To a question of general knowledge: a sentence
QUESTIONS = (
    *("What is the capital of France?", "What colour is the sky on a clear day?", "What is the opposite of hot?"),
    *("Tom has 3 apples and gets 4 more. How many apples does he have?", "Name three animals that live in the sea."),
)


@torch.no_grad()
def ability(directory: str, questions: Sequence[tuple[str, bool, int]]) -> tuple[float, list[str]]:
    """Return the nll of TEXT in nats a token, and the answers to `questions`: text, whether to ask it as a chat, and
    the maximum number of tokens of the answer."""
    model, tokenizer = load_model(directory, seed=0)
    model.float()  # bf16 is five times as slow on many CPUs
    read, most = [], [tokens for *_, tokens in questions]
    for text, is_chat, _ in questions:
        turn = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) if is_chat else text
        read.append(tokenizer(prompt, add_special_tokens=not is_chat).input_ids)
    width = max(map(len, read))
    given = torch.tensor([[0] * (width - len(ids)) + ids for ids in read])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in read])
    drawn = model.generate(given, attention_mask=mask, do_sample=False, max_new_tokens=max(most))[:, width:]
    answers = [
        tokenizer.decode(ids[:tokens], skip_special_tokens=True) for ids, tokens in zip(drawn, most, strict=True)
    ]
    ids = tokenizer(TEXT.read_text(), return_tensors="pt").input_ids[:, :TEXT_TOKENS]
    return float(model(ids, labels=ids).loss), answers


def compare(run_dir: Path, to: Path) -> None:
    """Write the nll of both models of a run that has ended, and `lines` for people, to the file `to`."""
    config = LeadConfig(**json.loads((run_dir / "config.json").read_text()))
    checkpoint = newest_whole(run_dir / "checkpoints")
    assert checkpoint is not None, "a run that has ended has a checkpoint"
    prompts = load_task(task_options(config)).held_out(ANSWERS)
    questions = [(prompt.text, config.chat is not False, config.max_new_tokens or ANSWER_TOKENS) for prompt in prompts]
    questions += [(question, True, ANSWER_TOKENS) for question in QUESTIONS]
    before, after = (ability(str(model), questions) for model in (config.model, checkpoint.path))
    expected = [f" ({prompt.answer})" for prompt in prompts] + [""] * len(QUESTIONS)
    lines = [
        f"{text.splitlines()[-1]}{right} before: {_shown(one, config.stop)}; after: {_shown(other, config.stop)}"
        for (text, *_), right, one, other in zip(questions, expected, before[1], after[1], strict=True)
    ]
    nll = f"mean nll of the first {TEXT_TOKENS:,} tokens of {TEXT.name}, nats a token"
    lines.append(f"{nll} before: {before[0]:.4f}; after: {after[0]:.4f}")
    found = {"nll_before": before[0], "nll_after": after[0], "lines": lines}
    to.write_text(json.dumps(found, indent=2) + "\n")


def _shown(answer: str, stops: Iterable[str]) -> str:
    for stop in stops:
        answer = answer.partition(stop)[0]
    return " ".join(answer.split())


if __name__ == "__main__":
    torch.set_num_threads(os.cpu_count() or 1)  # The run is over: nothing else wants a core
    compare(Path(sys.argv[1]), Path(sys.argv[2]))
