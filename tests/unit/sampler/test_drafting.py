"""Drafts: what is tried, that it changes no token, and when a completion goes on without."""

from __future__ import annotations

import time
from array import array
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from swarm.sampler import drafting
from swarm.sampler.drafting import DRAFT_TOKENS, Ngrams
from swarm.sampler.engine import Generate, Job, Sampled
from swarm.sampler.transformers import TransformersEngine
from swarm.types import SamplingRules
from tests.builders import STOP
from tests.unit.models import Staged, stage


def silent() -> None: ...


def test_a_draft_is_what_followed_the_longest_same_words_most_recently() -> None:
    text = [1, 2, 3, 4, 9, 2, 3, 5, 6, 7, 8]
    ngrams = Ngrams([text])
    assert ngrams.draft([7, 1, 2, 3]) == [4, 9, 2, 3], "of three words there is one place"
    assert ngrams.draft([0, 2, 3]) == [5, 6, 7, 8], "of two the later one"
    assert ngrams.draft([0, 8]) == [], "nothing follows the end"
    text.append(1)
    ngrams.note(text, len(text) - 1)
    assert ngrams.draft([0, 8]) == [1]
    assert ngrams.draft([0, 0]) == []


class Noted:
    """An engine, and how many tokens of each completion its model read in each pass."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.staged: Staged = stage(directory)
        self.engine = TransformersEngine()
        self.engine.start(self.staged.start(places=8), silent)
        self.engine.install(self.staged.install(), silent)
        self.widths: list[tuple[int, int]] = []
        model = self.engine._model
        forward = model.forward

        def noted(*given: Any, **named: Any) -> Any:
            self.widths.append(tuple(named["input_ids"].shape))
            return forward(*given, **named)

        monkeypatch.setattr(model, "forward", noted)

    def draw(self, *jobs: Job, drafts: bool) -> tuple[Sampled, ...]:
        self.engine._drafts = drafts
        self.widths.clear()
        return self.engine.generate(Generate(jobs=jobs), silent).samples


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Noted:
    return Noted(tmp_path, monkeypatch)


def job(
    seed: int,
    *,
    temperature: float = 0.4,
    limit: int = 60,
    stop: tuple[str, ...] = (),
    stops: tuple[int, ...] = (STOP,),
) -> Job:
    rules = SamplingRules(temperature=temperature, max_new_tokens=limit, stop_token_ids=stops, stop=stop)
    return Job(prompt_token_ids=(1, 3, 4, 5, 3, 4), seed=seed, rules=rules, time_limit_s=60.0)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("stop", [(), ("01", "77")])
def test_every_token_is_the_same_with_drafts_and_there_are_fewer_passes(
    noted: Noted, count: int, stop: tuple[str, ...]
) -> None:
    """Of a model with few words drafts are often right. Lines grow by different numbers of tokens in a pass."""
    with_drafts = without = 0
    for first in range(0, 40, count):
        jobs = [job(seed, stop=stop) for seed in range(first, first + count)]
        plain = noted.draw(*jobs, drafts=False)
        without += len(noted.widths)
        drafted = noted.draw(*jobs, drafts=True)
        with_drafts += len(noted.widths)
        for one, other in zip(plain, drafted, strict=True):
            assert (one.token_ids, one.finish, one.spans) == (other.token_ids, other.finish, other.spans)
            ours, theirs = (array("f", each.logprobs).tolist() for each in (one, other))
            assert ours == pytest.approx(theirs, abs=1e-4)
    assert with_drafts < without


def test_a_completion_whose_drafts_are_wrong_goes_on_without(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ngrams, "draft", lambda self, text: [0] * DRAFT_TOKENS)
    noted.draw(job(0, limit=100, stops=()), drafts=True)
    assert [width for _, width in noted.widths].count(1 + DRAFT_TOKENS) == drafting.TRIED


def test_time_is_up_for_drafted_completions_too(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = noted.draw(job(1, stops=()), drafts=True)
    began = time.monotonic()
    clock = iter([began] * 6)
    monkeypatch.setattr(drafting.time, "monotonic", lambda: next(clock, began + 61.0))  # type: ignore[attr-defined]
    (part,) = noted.draw(job(1, stops=()), drafts=True)
    assert (whole.finish, part.finish) == ("length", "handed")
    assert whole.token_ids.startswith(part.token_ids)
    assert len(part.token_ids) > 4


@pytest.mark.parametrize(
    ("dtype", "is_small", "wanted"),
    [("float32", False, False), ("bfloat16", True, False), ("bfloat16", False, True)],
)
def test_small_models_and_float32_are_drawn_without(
    tmp_path: Path, dtype: Any, is_small: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_small:
        monkeypatch.setattr("swarm.sampler.transformers.SMALL_MODEL_PARAMETERS", 1)
    command, engine = stage(tmp_path).start(places=1), TransformersEngine()
    engine.start(replace(command, options=replace(command.options, dtype=dtype)), silent)
    assert engine._drafts is wanted
