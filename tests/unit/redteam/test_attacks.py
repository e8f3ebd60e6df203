"""Each attack changes what it says, and nothing else."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarm.redteam.sampler import (
    COOLER,
    OTHER_ANSWERS,
    SHIFT,
    TRUSTED,
    asked,
    claimed,
    copies,
    easy_half,
    invented_log_probs,
    oracle,
    other,
    right_digits,
    sleeper,
    temperature,
    truncation,
    wrong_model,
    wrong_precision,
)
from swarm.sampler.engine import Job, Sampled
from swarm.types import Rollout, SamplingRules, Span, VersionId

STOP = 2
VERSION = VersionId(incarnation=0, version=7)
RULES = SamplingRules(temperature=1.0, max_new_tokens=6, stop_token_ids=(STOP,))


class Bigrams(torch.nn.Module):
    """A model whose next token depends on the last one alone."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.table = torch.nn.Parameter(torch.randn(16, 16, generator=generator))

    def forward(self, ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.table[ids])


def engine() -> Any:
    return SimpleNamespace(_model=Bigrams(), _version=VERSION, drawn=0)


def job(*digits: int, seed: int = 0) -> Job:
    return Job(prompt_token_ids=(1, *digits, 15), seed=seed, rules=RULES, time_limit_s=9.0)


def drawn(*tokens: int) -> Sampled:
    return Sampled(
        token_ids=array("i", tokens).tobytes(),
        logprobs=array("f", [-0.5] * len(tokens)).tobytes(),
        spans=(Span(version=VERSION, start=0, end=len(tokens)),),
        finish="stop" if tokens[-1] == STOP else "length",
    )


JOBS = [job(3, 4, 5, 6, seed=1), job(3, 4, 5, 6, seed=2), job(7, 8, 9, 3, seed=3), job(7, 8, 9, 3, seed=4)]
HONEST = [drawn(3, 4, 5, 6, STOP), drawn(9, 9, 9, 9, STOP), drawn(7, 8, 8, 8, STOP), drawn(3, 3, 3, 3, 3, 3)]


def tokens(sampled: Sampled) -> list[int]:
    return list(array("i", sampled.token_ids))


def test_true_claims_are_the_models_own_log_probs() -> None:
    made = claimed(engine(), JOBS[0], [3, 4, STOP])
    table = Bigrams().table.detach().log_softmax(-1)
    assert list(array("f", made.logprobs)) == pytest.approx(
        [float(table[15, 3]), float(table[3, 4]), float(table[4, STOP])]
    )
    assert (made.finish, made.spans) == ("stop", (Span(version=VERSION, start=0, end=3),))
    assert claimed(engine(), JOBS[0], [3] * 6).finish == "length"


def test_invented_log_probs_are_lower_and_the_tokens_stay() -> None:
    made = invented_log_probs(engine(), JOBS, HONEST)
    assert [one.token_ids for one in made] == [one.token_ids for one in HONEST]
    assert list(array("f", made[0].logprobs)) == pytest.approx([-0.5 - SHIFT] * 5)


def test_only_the_temperature_is_other_than_asked_and_the_claims_are_of_the_one_that_was_asked() -> None:
    assert [one.rules.temperature for one in asked("temperature", JOBS)] == [COOLER] * 4
    assert list(asked("oracle", JOBS)) == JOBS
    assert [one.seed for one in asked("temperature", JOBS)] == [1, 2, 3, 4]
    assert temperature(engine(), JOBS, HONEST) == [
        claimed(engine(), j, tokens(s)) for j, s in zip(JOBS, HONEST, strict=True)
    ]


def test_truncated_answers_are_half_as_long_and_end_with_the_stop_token() -> None:
    assert [tokens(one) for one in truncation(engine(), JOBS, HONEST)] == [
        [3, 4, STOP],
        [9, 9, STOP],
        [7, 8, STOP],
        [3, 3, 3, STOP],
    ]


def test_copies_are_the_first_answer_of_each_prompt() -> None:
    assert copies(engine(), JOBS, HONEST) == [HONEST[0], HONEST[0], HONEST[2], HONEST[2]]


def test_an_oracle_knows_every_answer() -> None:
    assert [tokens(one) for one in oracle(engine(), JOBS, HONEST)] == [[*right_digits(one), STOP] for one in JOBS]
    assert right_digits(JOBS[2]) == (7, 8, 9, 3)


def test_a_sleeper_is_honest_until_it_is_trusted_and_then_an_oracle() -> None:
    one = engine()
    made = [sleeper(one, JOBS, HONEST) for _ in range(TRUSTED // len(JOBS) + 1)]
    assert all(early == HONEST for early in made[:-1])
    assert made[-1] == oracle(engine(), JOBS, HONEST)


def test_the_easy_half_is_handed_in_and_the_rest_fails() -> None:
    made = easy_half(engine(), JOBS, HONEST)
    assert made[0] == HONEST[0]
    assert made[2] == HONEST[2]
    assert [one.finish for one in made] == ["stop", "failed", "stop", "failed"]


@pytest.mark.parametrize("name", OTHER_ANSWERS)
def test_every_answer_is_well_formed(name: str) -> None:
    for one in OTHER_ANSWERS[name](engine(), JOBS, HONEST):
        length = len(tokens(one))
        assert len(one.logprobs) == 4 * length
        assert one.finish == "failed" or one.spans[-1].end == length <= RULES.max_new_tokens


def test_four_bits_leave_fifteen_values_near_the_old_ones() -> None:
    before = torch.linspace(-1.0, 2.0, 1000)
    after = before.clone()
    wrong_precision(after)
    assert 2 < len(set(after.tolist())) <= 15
    assert float((after - before).abs().max()) <= 1.0 / 7 + 1e-6
    empty = torch.zeros(3)
    wrong_precision(empty)
    assert empty.tolist() == [0.0, 0.0, 0.0]


def test_another_model_differs_in_every_weight_by_a_share_of_its_spread() -> None:
    before = torch.linspace(-1.0, 1.0, 1000)
    after = before.clone()
    wrong_model(after)
    assert float((after != before).float().mean()) > 0.99
    assert 0.2 < float((after - before).std() / before.std()) < 0.4


def test_the_second_answer_for_a_sample_differs_from_the_first_only_in_what_it_claims() -> None:
    first = Rollout(
        group_id="t1",
        index=3,
        token_ids=HONEST[0].token_ids,
        logprobs=HONEST[0].logprobs,
        spans=HONEST[0].spans,
        finish="stop",
    )
    second = other(first)
    assert second != first
    assert (second.rollout_id, second.token_ids, second.spans) == (first.rollout_id, first.token_ids, first.spans)
