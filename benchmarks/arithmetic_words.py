"""Makes what examples/arithmetic.toml runs on: questions in English, and a small model that answers a few of them.

bin/python -m benchmarks.arithmetic_words    writes examples/questions.jsonl and the directory examples/arithmetic

The model is a random Qwen3 after a short supervised course on questions of the same kind, none of them in the file. The
course ends early, so that it fails at most of them. It is taught two ways to answer, evenly: the number alone, and the
calculation with the number at its end. On one thread of one machine both come out the same every time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from swarm.learner.messages import TrainerConfig
from swarm.learner.sft import Example, Tuner

EXAMPLES = Path(__file__).parents[1] / "examples"

QUESTIONS = 5_000

SPECIAL = ("<pad>", "<eos>", "<user>", "<assistant>")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)

VOCABULARY = 410
"""Bytes, and the words of the questions, whole."""

HIDDEN, LAYERS = 64, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """`steps` optimizer steps of `batch` lessons each. The learning rate rises over `warmup_steps` and falls in a
    straight line to 0."""

    steps: int
    batch: int
    learning_rate: float
    warmup_steps: int = 20


COURSE = Curriculum(steps=450, batch=64, learning_rate=4e-3, warmup_steps=50)
"""It ends while the model still fails at most questions."""

SAY_EVERY = 50
"""Steps."""

CONTEXT_TOKENS = 1024
"""A question has some 20 tokens, an answer at most ten; a question of the reader's own may have more."""

LARGEST = 20

NAMES = ("Ann", "Ben", "Eva", "Ida", "Jan", "Kim", "Leo", "Max", "Mia", "Tom", "Una", "Zoe")
THINGS = ("apples", "books", "cards", "coins", "eggs", "kites", "pens", "plums", "shells", "stamps")

SUMS = (
    "{name} has {a} {things} and gets {b} more. How many now?",
    "{name} has {a} {things}, {other} has {b}. How many together?",
    "There are {a} red and {b} green {things}. How many in all?",
    "{name} put {a} {things} in a box and then {b}. How many are in it?",
)
DIFFERENCES = (
    "{name} has {a} {things} and gives {b} away. How many are left?",
    "{name} had {a} {things} and lost {b}. How many remain?",
    "Of {a} {things} {name} sold {b}. How many are left?",
    "{name} has {a} {things}, {other} has {b} fewer. How many has {other}?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question with whole numbers of 1 to LARGEST, and its answer, which is never negative."""

    text: str
    left: int
    sign: str
    right: int

    @property
    def answer(self) -> int:
        return self.left + self.right if self.sign == "+" else self.left - self.right

    @property
    def working(self) -> str:
        """The answer with the calculation before it."""
        return f"{self.left}{self.sign}{self.right}={self.answer}"


def question(draw: Random) -> Question:
    """One drawn at random: sums and differences alike."""
    left, right = draw.randint(1, LARGEST), draw.randint(1, LARGEST)
    sign = draw.choice("+-")
    if sign == "-":
        left, right = max(left, right), min(left, right)
    name, other = draw.sample(NAMES, 2)
    template = draw.choice(SUMS if sign == "+" else DIFFERENCES)
    text = template.format(name=name, other=other, things=draw.choice(THINGS), a=left, b=right)
    return Question(text=text, left=left, sign=sign, right=right)


def questions(seed: str, count: int) -> list[Question]:
    """So many different ones."""
    draw, found = Random(seed), dict[str, Question]()
    while len(found) < count:
        one = question(draw)
        found.setdefault(one.text, one)
    return list(found.values())


def write_jsonl(found: Iterable[Question], path: Path) -> None:
    """As `jsonl:FILE` reads it."""
    rows = ({"prompt": one.text, "answer": str(one.answer)} for one in found)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def word_tokenizer() -> Any:
    """One token a word of the questions, one a digit; bytes for all else."""
    digits_and_words = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(digits_and_words)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([one.text for one in questions("words", 2_000)], trainer)
    untyped: Any = PreTrainedTokenizerFast
    tokenizer = untyped(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
        model_max_length=CONTEXT_TOKENS,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def asked(tokenizer: Any, text: str) -> str:
    """A question as the model reads it."""
    turns = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def small_model(seed: int) -> Any:
    """A random Qwen3 for the tokenizer, the same for the same seed."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // 32,
        num_key_value_heads=HIDDEN // 64,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=SPECIAL.index("<pad>"),
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<eos>"),
    )
    torch.manual_seed(seed)
    untyped: Any = Qwen3ForCausalLM
    return untyped(config)


def lesson(tokenizer: Any, seed: int, index: int, without: Collection[str]) -> Example:
    """A question with no text of `without`, and its answer: as often with its calculation as alone."""
    draw = Random(f"lesson {seed} {index}")
    while (one := question(draw)).text in without:
        pass
    said = one.working if draw.random() < 0.5 else str(one.answer)
    return Example(prompt=asked(tokenizer, one.text), completion=said)


def teach(directory: Path, lesson: Callable[[int], Example], course: Curriculum) -> None:
    """Train the model in a directory on lessons 0, 1, ..., and write it back in bf16."""
    tuner = Tuner(
        TrainerConfig(
            model=str(directory),
            task="copy",
            device="cpu",
            learning_rate=course.learning_rate,
            warmup_steps=course.warmup_steps,
            schedule="linear",
            steps=course.steps,
            minibatches=1,
            audit_share=0.0,
        )
    )
    for step in range(course.steps):
        places = range(step * course.batch, (step + 1) * course.batch)
        loss = tuner.learn([tuner.row(lesson(place), {}) for place in places])
        if (step + 1) % SAY_EVERY == 0:
            print(f"  step {step + 1}: {loss:.3f} nats a token", file=sys.stderr, flush=True)
    tuner.model.to(torch.bfloat16).save_pretrained(directory)


def make_base(directory: Path, without: Collection[str], course: Curriculum = COURSE, seed: int = 0) -> None:
    """Write a directory in Hugging Face format, in bf16, with the model after its course."""
    tokenizer, model = word_tokenizer(), small_model(seed)
    parameters = sum(int(p.numel()) for p in model.parameters())
    print(f"teaching a model of {parameters:,} parameters for {course.steps} steps of {course.batch} questions")
    held_back = frozenset(without)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    teach(directory, lambda index: lesson(tokenizer, seed, index, held_back), course)


def main() -> None:
    data = questions("data", QUESTIONS)
    write_jsonl(data, EXAMPLES / "questions.jsonl")
    make_base(EXAMPLES / "arithmetic", [one.text for one in data])


if __name__ == "__main__":
    main()
