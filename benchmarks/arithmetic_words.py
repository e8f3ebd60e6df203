"""What the arithmetic benchmark is made of: questions in English, a tokenizer of bytes, and a small random model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<pad>", "<eos>", "<user>", "<assistant>")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)

CONTEXT_TOKENS = 256
"""A question has some 70 bytes, an answer at most ten."""

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
    """A question with whole numbers of 1 to `largest`, and its answer, which is never negative."""

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


def question(draw: Random, largest: int) -> Question:
    """One drawn at random: sums and differences alike."""
    left, right = draw.randint(1, largest), draw.randint(1, largest)
    sign = draw.choice("+-")
    if sign == "-":
        left, right = max(left, right), min(left, right)
    name, other = draw.sample(NAMES, 2)
    template = draw.choice(SUMS if sign == "+" else DIFFERENCES)
    text = template.format(name=name, other=other, things=draw.choice(THINGS), a=left, b=right)
    return Question(text=text, left=left, sign=sign, right=right)


def questions(seed: str, count: int, largest: int, but: Iterable[str] = ()) -> list[Question]:
    """So many different ones, none with a text of `but`."""
    draw, seen, found = Random(seed), set(but), list[Question]()
    while len(found) < count:
        one = question(draw, largest)
        if one.text not in seen:
            seen.add(one.text)
            found.append(one)
    return found


def write_jsonl(found: Iterable[Question], path: Path) -> None:
    """As `jsonl:FILE` reads it: an id, the prompt and the answer."""
    rows = ({"id": f"q{at:06}", "prompt": one.text, "answer": str(one.answer)} for at, one in enumerate(found))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def byte_tokenizer() -> Any:
    """A fast tokenizer without merges: one token a byte of UTF-8, after the special ones; with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate((*SPECIAL, *alphabet))}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
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
    return str(tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True))


def small_model(seed: int, *, hidden: int, layers: int) -> Any:
    """A random Qwen3 for bytes, the same for the same seed."""
    config = Qwen3Config(
        vocab_size=len(SPECIAL) + 256,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=SPECIAL.index("<pad>"),
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<eos>"),
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)
