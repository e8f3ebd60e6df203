"""Draws samples side by side with mlx-lm's BatchGenerator: they begin together and end one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from swarm.sampler.engine import Job, Sampled, Told, drawn
from swarm.sampler.mlx.draws import gumbel
from swarm.sampler.stopping import StopStrings, handed
from swarm.types import Finish, Span, VersionId

PREFILL_TOKENS = 16_384  # Of all prompts read in one step: as many as mlx-lm allows for its eight


class GrowingRow:
    """A sample as it grows. `asked` counts the tokens drawn; mlx-lm hands over the newest one a step later."""

    def __init__(self, job: Job, stops: StopStrings | None = None) -> None:
        self.job, self.stops = job, stops
        self.temperature = job.rules.temperature or 1.0  # Greedy draws have the log-probs of temperature 1
        self.asked = 0
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish: Finish = "failed"  # Until it ends

    def take(self, token: int, logprob: float) -> bool:
        """Return whether the sample ends with this token."""
        rules = self.job.rules
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in rules.stop_token_ids or (self.stops is not None and self.stops.reached([self.token_ids])[0]):
            self.finish = "stop"
        elif len(self.token_ids) >= rules.max_new_tokens:
            self.finish = "length"
        return self.finish != "failed"

    def sampled(self, version: VersionId) -> Sampled:
        spans = (Span(version=version, start=0, end=len(self.token_ids)),)
        if self.finish == "failed":
            return handed(self.token_ids, self.logprobs, spans, self.stops)
        return drawn(self.token_ids, self.logprobs, spans, self.finish)


class Float32Logits:
    """A model whose logits are float32: mlx-lm would compute log-probs in 16 bits and so round them again."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, tokens: Any, cache: Any = None) -> Any:
        return self._module(tokens, cache=cache).astype(mx.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Drawing:
    """Draws `rows`, at most `places` of them side by side, each token with its row's own seed (draws.py).

    mlx-lm calls the sampler of each row at most once in a step. The noise of a step is set up for all rows
    at once; it is lazy, so it is computed only if a row is drawn.
    """

    def __init__(
        self,
        module: Any,
        rows: Sequence[GrowingRow],
        places: int,
        vocab_size: int,
        is_given_up: Callable[[], bool],
    ) -> None:
        self._is_given_up = is_given_up
        places = min(len(rows), places)
        self._vocab_size = vocab_size
        self._noise: Any = None
        self._at: dict[GrowingRow, int] = {}
        self._generator = BatchGenerator(
            Float32Logits(module),
            completion_batch_size=places,
            prefill_batch_size=places,
            prefill_step_size=max(1, PREFILL_TOKENS // places),
            stream=mx.default_stream(mx.default_device()),
        )
        uids = self._generator.insert(
            [list(row.job.prompt_token_ids) for row in rows],
            [row.job.rules.max_new_tokens for row in rows],
            samplers=[partial(self._draw, row) for row in rows],
        )
        self._alive: dict[int, GrowingRow] = dict(zip(uids, rows, strict=True))

    def run(self, progress: Told) -> int:
        """Draw until each row has ended. Return the number of steps in which tokens came."""
        began, steps = time.monotonic(), 0
        try:
            while self._alive:
                self._drop_late(time.monotonic() - began)
                self._prepare_noise()
                reading, came = self._generator.next()
                progress()
                steps += bool(came)
                if self._alive and not reading and not came:
                    raise RuntimeError("mlx-lm returned nothing, with samples left")
                if came:
                    self._take(came)
        finally:
            self._generator.close()
        return steps

    def _drop_late(self, spent_s: float) -> None:
        end = self._is_given_up()
        if late := [uid for uid, row in self._alive.items() if end or spent_s >= row.job.time_limit_s]:
            self._generator.remove(late)
            self._alive = {uid: row for uid, row in self._alive.items() if uid not in late}

    def _prepare_noise(self) -> None:
        rows = list(self._alive.values())
        positions = [len(row.job.prompt_token_ids) - 1 + row.asked for row in rows]
        self._noise = gumbel([row.job.seed for row in rows], positions, self._vocab_size) if rows else None
        self._at = {row: place for place, row in enumerate(rows)}

    def _draw(self, row: GrowingRow, logprobs: Any) -> Any:
        """Return the row's next token; `logprobs` [1, vocabulary] are those at temperature 1."""
        row.asked += 1
        scaled = logprobs / row.temperature
        if row.job.rules.temperature:
            scaled = scaled + self._noise[self._at[row]]
        return mx.argmax(scaled, axis=-1)

    def _take(self, came: Sequence[Any]) -> None:
        """Hand a step's tokens to their rows, and let go of the rows that have ended."""
        rows = [self._alive[one.uid] for one in came]
        scaled = mx.stack([one.logprobs for one in came]) / mx.array([[row.temperature] for row in rows])
        chosen = mx.take_along_axis(scaled, mx.array([[one.token] for one in came]), axis=-1)
        logprobs = (chosen - mx.logsumexp(scaled, axis=-1, keepdims=True)).squeeze(-1).tolist()
        ended = [one for one, row, value in zip(came, rows, logprobs, strict=True) if row.take(one.token, value)]
        for one in ended:
            del self._alive[one.uid]
        # mlx-lm has already removed the rows at their limit.
        self._generator.remove([one.uid for one in ended if one.finish_reason is None])
