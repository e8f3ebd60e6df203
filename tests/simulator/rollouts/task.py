"""The task of a simulated swarm: prompts and answers of a few tokens, for an engine that only takes time."""

from __future__ import annotations

from swarm.types import Prompt

VOCABULARY = 100
STOP_TOKEN = 2
MAX_NEW_TOKENS = 8


def prompt(index: int) -> Prompt:
    """The `index`-th prompt: three token ids that name it."""
    return Prompt(prompt_id=f"p{index}", text="", answer="", token_ids=(1, index % 97, index % 89))
