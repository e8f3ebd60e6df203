"""What drafts are worth to the transformers engine: tokens a second with them over those without.

bin/python examples/smollm2.py
bin/python -m benchmarks.drafts --model DIR --json

A real model answers questions in words step by step, in up to 128 tokens, in batches of 1, 2 and a full one of 16, at
two temperatures, by turns with drafts and without; rates are of all answers of a seed together. `draws_equal` says
whether float32 gave the same tokens either way, with log-probs within 1e-4.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import Figures, listed, parser_of, said
from swarm.sampler.engine import Generate, Generated, Job
from swarm.sampler.transformers import TransformersEngine
from swarm.types import SamplingRules, VersionId
from swarm.wire import digest

QUESTIONS = Path(__file__).parents[1] / "examples" / "questions.jsonl"
ASKED = "Think step by step, then give the sum or the difference."
LONGEST = 128
FULL = 16


def engine_of(model: str, dtype: torch.dtype) -> TransformersEngine:
    engine = TransformersEngine()
    auto: Any = AutoModelForCausalLM
    engine._model = auto.from_pretrained(model, dtype=dtype).eval()
    engine._directory, engine._version = model, VersionId(incarnation=0, version=0)
    return engine


def jobs_of(tokenizer: Any, question: str, count: int, temperature: float, seed: int) -> tuple[Job, ...]:
    said_to_it = [{"role": "system", "content": ASKED}, {"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(said_to_it, tokenize=False, add_generation_prompt=True)
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    rules = SamplingRules(
        temperature=temperature, max_new_tokens=LONGEST, stop_token_ids=(int(tokenizer.eos_token_id),)
    )
    seeds = (int.from_bytes(digest(f"{seed} {question} {at}".encode())[:7], "little") for at in range(count))
    return tuple(Job(prompt_token_ids=ids, seed=one, rules=rules, time_limit_s=1e6) for one in seeds)


def drawn(engine: TransformersEngine, jobs: tuple[Job, ...], *, drafts: bool) -> Generated:
    engine._drafts = drafts
    return engine.generate(Generate(jobs=jobs), lambda: None)


def tokens_of(generated: Generated) -> int:
    return sum(len(one.token_ids) // 4 for one in generated.samples)


def are_equal(one: Generated, other: Generated) -> bool:
    for first, second in zip(one.samples, other.samples, strict=True):
        ours, theirs = (torch.frombuffer(bytearray(each.logprobs), dtype=torch.float32) for each in (first, second))
        if first.token_ids != second.token_ids or not torch.allclose(ours, theirs, atol=1e-4, rtol=0):
            return False
    return True


def run_once(
    engine: TransformersEngine, questions: list[str], tokenizer: Any, batch: int, temperature: float, seed: int
) -> Figures:
    seconds, tokens, equal = {True: 0.0, False: 0.0}, {True: 0, False: 0}, True
    for number, question in enumerate(questions):
        jobs = jobs_of(tokenizer, question, batch, temperature, seed)
        found: dict[bool, Generated] = {}
        for drafts in (True, False) if number % 2 else (False, True):
            found[drafts] = drawn(engine, jobs, drafts=drafts)
            seconds[drafts] += found[drafts].seconds
            tokens[drafts] += tokens_of(found[drafts])
        equal = equal and are_equal(found[True], found[False])
    rate = {drafts: tokens[drafts] / seconds[drafts] for drafts in (True, False)}
    return {
        "dtype": str(engine._model.dtype).removeprefix("torch."),
        "batch": batch,
        "temperature": temperature,
        "seed": seed,
        "tokens_per_s": round(rate[False], 1),
        "speedup": round(rate[True] / rate[False], 3),
        "equal": equal,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--batches", type=listed(int), default=(1, 2, FULL))
    parser.add_argument("--temperatures", type=listed(float), default=(0.6, 1.0))
    parser.add_argument("--seeds", type=listed(int), default=(0, 1, 2))
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    every = [json.loads(line)["prompt"] for line in QUESTIONS.read_text().splitlines()]
    engine, rows = engine_of(options.model, torch.bfloat16), list[Figures]()
    for batch in options.batches:
        # A full batch takes as long as several small ones.
        count = options.questions if batch < FULL else max(1, options.questions // 4)
        for temperature in options.temperatures:
            for seed in options.seeds:
                asked = every[seed * count : (seed + 1) * count]
                rows.append(said(run_once(engine, asked, tokenizer, batch, temperature, seed)))
    exact = engine_of(options.model, torch.float32)
    equal = said(run_once(exact, every[: max(1, options.questions // 4)], tokenizer, 2, 0.6, 0))["equal"]
    if options.json:
        medians = {
            f"speedup_batch_{batch}" if batch < FULL else "speedup_full": {
                temperature: statistics.median(
                    row["speedup"] for row in rows if (row["batch"], row["temperature"]) == (batch, temperature)
                )
                for temperature in options.temperatures
            }
            for batch in options.batches
        }
        said({**medians, "draws_equal": equal})
    return 0


if __name__ == "__main__":
    sys.exit(main())
