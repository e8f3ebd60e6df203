"""The task of a simulated swarm: prompts and answers of a few tokens, for an engine that only takes time, and episodes
whose tokens name the sample and the turn, so that it is seen whose token is where."""

from __future__ import annotations

from array import array
from random import Random

from swarm.types import Observed, Prompt

VOCABULARY = 100
STOP_TOKEN = 2
MAX_NEW_TOKENS = 8


def prompt(index: int) -> Prompt:
    """The `index`-th prompt: three token ids that name it."""
    return Prompt(prompt_id=f"p{index}", text="", answer="", token_ids=(1, index % 97, index % 89))


def drawn(group_id: str, index: int, turn: int) -> bytes:
    """What any sampler draws as this turn of an episode."""
    number = Random(group_id).randrange(90)
    return array("i", [3 + number, 3 + index, 3 + turn, STOP_TOKEN]).tobytes()


def said(group_id: str, index: int, turn: int, most: int) -> Observed:
    """What the environment says to it. An episode has up to `most` turns."""
    done = turn + 1 == Random(f"{group_id}/{index}").randint(1, most)
    return Observed(token_ids=array("i", [50 + turn]).tobytes(), rewards=(1.0,), done=done, exact=done)


def stream(group_id: str, index: int, turns: int) -> bytes:
    """All of the first turns of an episode."""
    both = ((drawn(group_id, index, turn), said(group_id, index, turn, 1).token_ids) for turn in range(turns))
    return b"".join(part for pair in both for part in pair)
