"""A policy that says what a test wants, behind the real endpoint."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from swarm.inference.server import Endpoint
from swarm.tasks.turns import TurnText
from swarm.types import Finish, Rollout, SamplingRules

STOP = 0
RULES = SamplingRules(temperature=0.7, max_new_tokens=8, stop_token_ids=(STOP,))


def letters() -> Tokenizer:
    """A tokenizer of characters, whose first one stops."""
    found = {letter: number for number, letter in enumerate("$abcdefghijklmnopqrstuvwxyz ?!\n\x1b0123456789=")}
    tokenizer = Tokenizer(models.WordLevel(found, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return tokenizer


def drawn(text: str, *, finish: Finish = "stop", index: int = 0) -> Rollout:
    ids = array("i", letters().encode(text).ids)
    logprobs = array("f", [-0.25 * (n + 1) for n in range(len(ids))])
    return Rollout("g", index, ids.tobytes(), logprobs.tobytes(), (), finish)


class ScriptedPolicy:
    """Gives `answers` in order, or raises them, and remembers what was asked."""

    def __init__(self, *answers: Rollout | Exception) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[int, ...]] = []
        self.rules: list[SamplingRules] = []

    async def ask(self, token_ids: Sequence[int], rules: SamplingRules) -> Rollout:
        self.rules.append(rules)
        self.asked.append(tuple(token_ids))
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def endpoint(policy: ScriptedPolicy, judge: str | None = None) -> Endpoint:
    tokenizer = letters()
    text = TurnText(tokenizer, None, (STOP,))
    return Endpoint(policy.ask, text, RULES, context=64, model="org/model", judge=judge)
