"""Each attack changes what it says, and nothing else."""

from __future__ import annotations

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarm.sampler.engine import Generate, Generated, Job, Sampled
from swarm.types import SamplingRules, Span, VersionId
from tests.redteam.sampler import ENGINES, NOTED, TRUSTED, claimed, engine_of, expected
from tests.redteam.wire import BEYOND

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


def engine(**more: Any) -> Any:
    return SimpleNamespace(_model=Bigrams(), _version=VERSION, drawn=0, **more)


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


def tokens(one: Sampled) -> list[int]:
    return list(array("i", one.token_ids))


def logprobs(one: Sampled) -> list[float]:
    return list(array("f", one.logprobs))


def made(attack: str, of: Any = None, jobs: list[Job] = JOBS, honest: list[Sampled] = HONEST) -> list[Sampled]:
    answers = ENGINES[attack].answers
    assert answers is not None
    return answers(of or engine(), jobs, honest)


def test_true_claims_are_the_models_own_log_probs() -> None:
    true = claimed(engine(), JOBS[0], [3, 4, STOP])
    table = Bigrams().table.detach().log_softmax(-1)
    assert logprobs(true) == pytest.approx([float(table[15, 3]), float(table[3, 4]), float(table[4, STOP])])
    assert (true.finish, true.spans) == ("stop", (Span(version=VERSION, start=0, end=3),))
    assert claimed(engine(), JOBS[0], [3] * 6).finish == "length"


@pytest.mark.parametrize(
    ("attack", "claims"),
    [
        ("invented-log-probs", [-2.7] * 6),
        ("rounded-shift", [-0.77] * 6),
        ("sign-by-position", [-0.2] * 3 + [-0.8] * 3),
        ("sign-by-reward", [-0.8] * 6),
    ],
)
def test_log_probs_are_other_ones_and_the_tokens_stay(attack: str, claims: list[float]) -> None:
    assert [one.token_ids for one in made(attack)] == [one.token_ids for one in HONEST]
    assert logprobs(made(attack)[3]) == pytest.approx(claims)


def test_log_probs_differ_in_sign_by_reward_and_are_never_above_0() -> None:
    # Right tokens: 5, 1, 3 and 1 of 5.
    assert [logprobs(one)[0] for one in made("sign-by-reward")] == pytest.approx([-0.2, -0.8, -0.2, -0.8])
    one = claimed(engine(), JOBS[0], [3])
    sure = [Sampled(one.token_ids, array("f", [-0.1]).tobytes(), one.spans, "stop")]
    assert logprobs(made("sign-by-position", jobs=JOBS[:1], honest=sure)[0]) == [0.0]


ANSWERS = {
    "truncation": [[3, 4, STOP], [9, 9, STOP], [7, 8, STOP], [3, 3, 3, STOP]],
    "copies": [tokens(HONEST[at]) for at in (0, 0, 2, 2)],
    "oracle": [[3, 4, 5, 6, STOP], [3, 4, 5, 6, STOP], [7, 8, 9, 3, STOP], [7, 8, 9, 3, STOP]],
    "one-token": [[3, 4, 5, 6, STOP], [3, 9, 9, 9, STOP], [7, 8, 9, 8, STOP], [7, 3, 3, 3, 3, 3]],
    "easy-half": [tokens(HONEST[0]), [], tokens(HONEST[2]), []],
    "only-right": [tokens(HONEST[0]), [], [], []],
    "raising-answers": [[15] * 4 + [STOP]] * 4,
    "hanging-answers": [[15] * 5 + [STOP]] * 4,
}


@pytest.mark.parametrize("attack", ANSWERS)
def test_answers_are_not_what_was_drawn_or_are_said_to_have_failed(attack: str) -> None:
    found = made(attack)
    assert [tokens(one) for one in found] == ANSWERS[attack]
    assert [one.finish == "failed" for one in found] == [not answer for answer in ANSWERS[attack]]


def test_a_sleeper_is_honest_until_it_is_trusted_and_then_an_oracle() -> None:
    one = engine()
    all_of_it = [made("sleeper", one) for _ in range(TRUSTED // len(JOBS) + 1)]
    assert all(early == HONEST for early in all_of_it[:-1])
    assert all_of_it[-1] == made("oracle")


def test_a_pair_hands_in_what_the_other_drew_for_a_prompt(tmp_path: Path) -> None:
    first, second = (engine(_directory=tmp_path / name / "model", noted=[]) for name in ("a", "b"))
    for one in (first, second):
        Path(one._directory).mkdir(parents=True)
    assert made("stolen-answers", first, JOBS[:1], HONEST[:1]) == HONEST[:1]
    stolen = made("stolen-answers", second, JOBS[1:3], HONEST[1:3])
    assert [tokens(one) for one in stolen] == [tokens(HONEST[0]), tokens(HONEST[2])]
    assert (tmp_path / "b" / NOTED).read_text() == "0.5"


def choosing(attack: str, directory: Path) -> Any:
    """An engine that keeps three versions, and a lease that takes the last two."""
    one: Any = engine_of(attack)._engine  # type: ignore[attr-defined]
    one._model, one._directory = torch.nn.Linear(1, 1), str(directory / "model")
    one.kept = {VersionId(incarnation=0, version=v): [p.data + v for p in one._model.parameters()] for v in (5, 6, 7)}
    one.draw = lambda jobs: [rest_of(job, one._version.version) for job in jobs]
    return one


def rest_of(job: Job, version: int) -> Sampled:
    """Version 6 draws the digits 3, 4, 9, 9 and version 7 draws 9, 9, 5, 6, whatever stood before."""
    done = len(job.prompt_token_ids) - 6
    row = {6: [3, 4, 9, 9, STOP], 7: [9, 9, 5, 6, STOP]}[version][done:]
    return drawn(*row)


@pytest.mark.parametrize(
    ("attack", "best", "choices"),
    [("best-of-versions", {(3, 4, 9, 9, STOP), (9, 9, 5, 6, STOP)}, 2.0), ("spliced-spans", {(3, 4, 5, 6, STOP)}, 5.0)],
)
def test_the_best_of_versions_is_given(attack: str, best: set[tuple[int, ...]], choices: float, tmp_path: Path) -> None:
    rules = SamplingRules(temperature=1.0, max_new_tokens=6, stop_token_ids=(STOP, BEYOND + 6))
    asked = [Job(prompt_token_ids=(1, 3, 4, 5, 6, 15), seed=1, rules=rules, time_limit_s=9.0)]
    one = choosing(attack, tmp_path)
    (found,) = made(attack, one, asked, [drawn(9, 9, 9, 9, STOP)])
    assert tuple(tokens(found)) in best
    assert [span.version.version for span in found.spans] in ([6], [7], [6, 7])
    assert float((tmp_path / NOTED).read_text()) == choices
    assert one._version == VERSION


def test_an_engine_deviates_where_it_says_and_from_where_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = SamplingRules(temperature=0.0, max_new_tokens=6, stop_token_ids=(STOP,))
    jobs = (JOBS[0], Job(prompt_token_ids=JOBS[0].prompt_token_ids, seed=0, rules=greedy, time_limit_s=9.0))
    honest = Generated(samples=(HONEST[1], HONEST[1]), seconds=0.0, steps=5)
    monkeypatch.setattr("swarm.sampler.transformers.TransformersEngine.generate", lambda *_: honest)
    found = {}
    for attack, version in (("oracle", 3), ("held-out-oracle", 3), ("late-oracle", 29), ("late-oracle", 30)):
        one: Any = engine_of(attack)._engine  # type: ignore[attr-defined]
        one._model, one._version = Bigrams(), VersionId(incarnation=0, version=version)
        samples = one.generate(Generate(jobs=jobs), lambda: None).samples
        found[attack, version] = [tokens(sample) == expected(jobs[0]) for sample in samples]
    assert [*found.values()] == [[True, False], [False, True], [False, False], [True, False]]
