"""Stop strings: a completion ends with the token after which its text holds one of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from msgspec.structs import replace
from tokenizers import Tokenizer

from swarm.sampler.engine import TIME_LIMIT, Sampled, drawn, failed
from swarm.types import Span

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

    def settled(self, row: Sequence[int]) -> int:
        """Return after how many tokens of an unfinished completion no stop string can have begun, or have come with
        the last token: who goes on from there looks at its own tokens only."""
        begun = tuple(stop[:length] for stop in self._stops for length in range(1, len(stop) + 1))
        for count in range(len(row), 0, -1):
            text = self._tokenizer.decode(list(row[max(0, count - self._window) : count]), skip_special_tokens=False)
            if not text.endswith((*begun, "\ufffd")):
                return count
        return 0


def handed(
    token_ids: Sequence[int], logprobs: Sequence[float], spans: Sequence[Span], stops: StopStrings | None
) -> Sampled:
    """Return what was drawn of a completion that did not come to its end, for others to go on with."""
    kept = stops.settled(token_ids) if stops is not None else len(token_ids)
    if not kept:
        return failed(TIME_LIMIT)
    cut = tuple(replace(span, end=min(span.end, kept)) for span in spans if span.start < kept)
    return drawn(token_ids[:kept], logprobs[:kept], cut, "handed")


@cache
def load_tokenizer(directory: str) -> Tokenizer:
    """Return the model's own tokenizer, which every learner publishes with it."""
    return Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
