"""Stop strings: a completion ends with the token after which its text holds one of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

SPARE = 8  # Tokens decoded before the relevant ones: the first of a text may lose a space or half a character


class StopStrings:
    """Looks for `stops` in completions as they grow. The text covers all tokens, including special ones."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        # A token has at least one byte.
        self._window = SPARE + max(len(stop.encode()) for stop in stops)

    def reached(self, rows: Sequence[Sequence[int]]) -> list[bool]:
        """Return for each completion whether its last token completed a stop string."""
        tails = [list(row[-self._window :]) for row in rows]
        texts = self._tokenizer.decode_batch(tails, skip_special_tokens=False)
        return [any(stop in text for stop in self._stops) for text in texts]


@cache
def load_tokenizer(directory: str) -> Tokenizer:
    """Return the model's own tokenizer, which every learner publishes with it."""
    return Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
