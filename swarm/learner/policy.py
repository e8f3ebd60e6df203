"""The model as a policy: the log-probs that it gives the tokens of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from swarm.learner.batch import MicroBatch
from swarm.learner.messages import ComputeRules


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFigures:
    """Of every completion token of a micro-batch, in its order: [tokens]. No gradient flows through `entropy`."""

    logprobs: torch.Tensor
    entropy: torch.Tensor


class Policy:
    """`model` at the temperature of the rollouts."""

    def __init__(self, model: Any, rules: ComputeRules, *, temperature: float) -> None:
        self._model = model
        self._rules = rules
        self._temperature = temperature

    def read(self, part: MicroBatch) -> TokenFigures:
        """Log-probs and entropies of the completion tokens, float32."""
        logits = self._model(input_ids=part.token_ids, attention_mask=part.attention, use_cache=False).logits
        log_softmax = (logits.flatten(0, 1)[part.places].float() / self._temperature).log_softmax(-1)
        with torch.no_grad():
            entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        return TokenFigures(logprobs=log_softmax.gather(1, part.targets[:, None]).squeeze(1), entropy=entropy)
