"""Chat templates as models have them, and tokenizers of bytes that know their control tokens."""

from __future__ import annotations

from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from swarm.tasks.chat import ChatTemplate
from swarm.tasks.turns import TurnText

TEMPLATES = Path(__file__).parent / "data" / "chat_templates"
CHATML = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
CONTROLS = {
    "chatml": CHATML,
    "qwen2_5": CHATML,
    "qwen3": CHATML,
    "phi3_5": ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|endoftext|>"),
    "deepseek_r1_distill": ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>"),  # noqa: RUF001
    "llama3_1": ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"),
    "lfm2": CHATML,
    "glm4moe": ("<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "<|endoftext|>", "[gMASK]", "<sop>"),
}
"""The control tokens of each template, the one that ends a turn first."""

MERGES = (("l", "e"), ("f", "t"), ("le", "ft"), ("o", "u"))


@cache
def tokenizer_of(controls: tuple[str, ...], *, drifts: bool = False) -> Tokenizer:
    """Every byte is a token, and so is each of `controls`. If it `drifts`, it writes some words with fewer tokens."""
    merges = MERGES if drifts else ()
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    made = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in controls])
    return made


@cache
def template_of(name: str, **arguments: Any) -> ChatTemplate:
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    tokens = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<|endoftext|>"}  # noqa: RUF001
    return ChatTemplate(source, tokens=tokens, began=datetime(2026, 7, 24, 9, 30), arguments=arguments)


def end_of(name: str, *, drifts: bool = False) -> int:
    """The token that ends a turn."""
    found = tokenizer_of(CONTROLS[name], drifts=drifts).token_to_id(CONTROLS[name][0])
    assert found is not None
    return found


@cache
def turn_text(name: str, *, system_prompt: str | None = None, drifts: bool = False, **arguments: Any) -> TurnText:
    tokenizer = tokenizer_of(CONTROLS[name], drifts=drifts)
    return TurnText(tokenizer, template_of(name, **arguments), [end_of(name, drifts=drifts)], system_prompt)
