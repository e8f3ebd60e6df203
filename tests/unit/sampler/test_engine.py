"""The transformers engine in this process: what it holds, what it draws, and what it says of its draws. The conformance
suite has the rest."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swarm.broadcast.store.changes import read_changes, write_changes
from swarm.broadcast.version.manifest import Layout, regions_of
from swarm.errors import EchoError, UserError
from swarm.sampler.engine import Generate, Job, NotInstalled, Sampled
from swarm.sampler.transformers import TransformersEngine
from swarm.sampler.weights import WrongWeights
from tests import conformance
from tests.builders import STOP, v
from tests.conformance import differing, logprobs, tokens
from tests.unit.models import Staged, adapted_model, logprobs_of, moe_model, published, stage, stage_model

SHORT, LONG = (1, 3, 13), (1, 3, 4, 5, 6, 13)
job = partial(conformance.job, prompt=SHORT, limit=6)


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Staged:
    return stage(tmp_path_factory.mktemp("learner"))


@pytest.fixture(scope="module")
def engine(staged: Staged) -> TransformersEngine:
    return installed(staged)


def silent() -> None: ...


def installed(staged: Staged) -> TransformersEngine:
    engine = TransformersEngine()
    engine.start(staged.start(), silent)
    engine.install(staged.install(), silent)
    return engine


def draw(engine: TransformersEngine, *jobs: Job) -> tuple[Sampled, ...]:
    return engine.generate(Generate(jobs=jobs), silent).samples


# -- weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["wrong sum", "change left out"])
def test_an_engine_that_holds_something_else_does_not_go_on(staged: Staged, tmp_path: Path, how: str) -> None:
    engine, other = installed(staged), stage(tmp_path / "other", seed=1)
    asked = msgspec.structs.replace(other.install(1), tensor_sums=(other.sums[0] ^ 1, *other.sums[1:]))
    if how == "change left out":
        changed = differing(staged.staging, other.staging, staged.layout, tmp_path / "changed")
        asked = msgspec.structs.replace(other.install(1), since=v(0), changed=str(changed))
        found = dict(read_changes(str(changed), len(regions_of(staged.layout))))
        last = max(found)
        places = found[last]
        assert places is not None
        write_changes(changed, len(regions_of(staged.layout)), {**found, last: places[:-1]})
    refused = engine.install(asked, silent)
    assert isinstance(refused, NotInstalled)
    assert refused.fault == "engine"
    assert re.fullmatch(r"after the install model\S+ differs from what the learner signed", refused.why)
    with pytest.raises(AssertionError):
        draw(engine, job(0))


@pytest.mark.parametrize("make", [moe_model, lambda drawn: adapted_model(drawn=drawn)], ids=["experts", "adapter"])
def test_what_is_taken_by_the_words_that_changed_is_what_was_published(
    tmp_path: Path, make: Callable[[int], Any]
) -> None:
    before, after = (stage_model(make(seed), tmp_path / str(seed)) for seed in (0, 1))
    engine = installed(before)
    for version, staged, other in ((1, after, before), (2, before, after)):
        changed = differing(other.staging, staged.staging, staged.layout, tmp_path / "changed")
        asked = msgspec.structs.replace(staged.install(version), since=v(version - 1), changed=str(changed))
        assert engine.install(asked, silent) == "changed words"
        held, wanted = engine._model.state_dict(), published(staged.model).state_dict()
        assert all(torch.equal(held[name], wanted[name]) for name in wanted)
        (sampled,) = draw(engine, job(version))
        expected = logprobs_of(published(staged.model), SHORT, tokens(sampled))
        assert logprobs(sampled) == pytest.approx(expected, abs=1e-4)


def test_the_engine_copies_the_weights_and_never_aliases_the_file(staged: Staged, tmp_path: Path) -> None:
    mapped = tmp_path / "weights.bin"
    mapped.write_bytes(staged.staging.read_bytes())
    engine = TransformersEngine()
    engine.start(staged.start(), silent)
    engine.install(msgspec.structs.replace(staged.install(), path=str(mapped)), silent)
    before = draw(engine, job(3))
    with mapped.open("r+b") as file:
        file.write(bytes(staged.layout.total_bytes))
    assert draw(engine, job(3)) == before
    model = engine._model
    assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr(), "tied"


def test_what_is_of_another_model_or_would_round_the_weights_is_refused_before_they_come(
    staged: Staged, tmp_path: Path
) -> None:
    tensors = staged.layout.tensors
    missing = Layout(tensors=tensors[1:], files=())
    reshaped = Layout(tensors=(msgspec.structs.replace(tensors[0], shape=(1, 2)), *tensors[1:]), files=())
    for other in (missing, reshaped):
        with pytest.raises(EchoError, match=r"model\.embed_tokens\.weight|lm_head\.weight"):
            TransformersEngine().start(msgspec.structs.replace(staged.start(), layout=other), silent)
    with pytest.raises(UserError, match="--precision bfloat16"):
        TransformersEngine().start(staged.start(dtype="float16"), silent)
    adapted = stage_model(adapted_model(), tmp_path)
    assert adapted.layout.adapter is not None
    wider = msgspec.structs.replace(adapted.layout, adapter=msgspec.structs.replace(adapted.layout.adapter, rank=5))
    with pytest.raises(WrongWeights, match="lora_A"):
        TransformersEngine().start(msgspec.structs.replace(adapted.start(), layout=wider), silent)


# -- draws ---------------------------------------------------------------------------------------------------


def test_what_prompts_have_in_common_is_computed_once(engine: TransformersEngine, staged: Staged) -> None:
    """Five prompts of three lengths begin alike, and each is drawn from four times."""
    prompts = [(1, 3, 4, *rest) for rest in ((), (5,), (6,), (5, 6, 7), (13, 5, 4))]
    jobs = [job(seed, prompt=prompt) for prompt in prompts for seed in range(4)]
    read: list[torch.Size] = []
    hook = engine._model.base_model.register_forward_pre_hook(
        lambda module, _, given: read.append(given["input_ids"].shape), with_kwargs=True
    )
    together = draw(engine, *jobs)
    drawn = [(one, tokens(sampled)) for one, sampled in zip(jobs, together, strict=True)]
    hook.remove()
    # The ten tokens of a tree of prompts, and then one of each leaf: answers that are alike so far, and go on.
    assert tuple(read[0]) == (1, 10)
    leaves = [len({(one.prompt_token_ids, *t[:count]) for one, t in drawn if len(t) > count}) for count in range(1, 6)]
    assert [tuple(shape) for shape in read[1:]] == [(count, 1) for count in leaves]
    assert leaves[0] < 20, "some begin alike"
    learner = published(staged.model)
    for asked, sampled in zip(jobs, together, strict=True):
        assert tokens(sampled) == tokens(draw(engine, asked)[0])
        expected = logprobs_of(learner, asked.prompt_token_ids, tokens(sampled), temperature=1.0)
        assert logprobs(sampled) == pytest.approx(expected, abs=1e-4)


def test_the_longest_are_drawn_first_and_all_within_the_time_of_the_call(
    staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = installed(staged)
    drawn: list[tuple[int, float]] = []
    generate_batch = engine._generate_batch

    def noting(jobs: list[Job], spent_s: float, progress: Callable[[], None]) -> tuple[Iterable[Sampled], int]:
        drawn.append((jobs[0].rules.max_new_tokens, spent_s))
        return generate_batch(jobs, spent_s, progress)

    monkeypatch.setattr(engine, "_generate_batch", noting)
    done = engine.generate(Generate(jobs=tuple(job(0, limit=limit, stops=()) for limit in (2, 6, 4))), silent)
    assert [limit for limit, _ in drawn] == [6, 4, 2]
    assert [spent_s for _, spent_s in drawn] == sorted({spent_s for _, spent_s in drawn})
    assert done.steps == 12
    (late,), _ = generate_batch([job(0, stops=(), time_limit_s=60.0)], 60.0, silent)
    assert (late.finish, len(late.token_ids) // 4) == ("handed", 1)


def test_without_stop_ids_it_draws_on_after_the_models_own_end(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By both ways of drawing: transformers' own would end, and fill up with other tokens than were drawn."""
    jobs = [job(seed, stops=(), limit=20) for seed in range(12)]
    grown = draw(engine, *jobs)
    monkeypatch.setattr("swarm.sampler.transformers.can_grow", lambda model: False)
    apart = draw(engine, *jobs)
    assert any(STOP in tokens(sampled)[:-1] for sampled in apart)
    for one, other in zip(grown, apart, strict=True):
        assert tokens(one) == tokens(other)
        assert other.finish == "length"
        assert logprobs(other) == pytest.approx(logprobs(one), abs=1e-4)


@pytest.mark.parametrize(("family", "apart"), [("recurrent_gemma", True), ("mamba", False)])
def test_prompts_of_other_lengths_share_a_batch_where_filling_does_no_harm(
    tmp_path: Path, family: str, apart: bool
) -> None:
    """A state that has read the filling is another one: by nats, in a model of that kind."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    config = AutoConfig.for_model(family, num_hidden_layers=3, vocab_size=16, **sizes)
    torch.manual_seed(0)
    build: Any = AutoModelForCausalLM
    model = build.from_config(config)
    for parameter in model.parameters():
        parameter.data.mul_(4.0 if parameter.dim() > 1 else 1.0)
    engine = installed(stage_model(model, tmp_path))
    jobs = [job(seed, prompt=prompt, stops=()) for seed, prompt in enumerate((SHORT, LONG, SHORT))]
    together = engine.generate(Generate(jobs=tuple(jobs)), silent)
    assert together.steps == (12 if apart else 6)
    for one, sampled in zip(jobs, together.samples, strict=True):
        (alone,) = draw(engine, one)
        assert alone.token_ids == sampled.token_ids
        assert array("f", alone.logprobs) == pytest.approx(array("f", sampled.logprobs), abs=1e-3)
