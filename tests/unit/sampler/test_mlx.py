"""The mlx engine in this process, on a CPU: what it computes against the learner's model, what it holds, what it
refuses. The conformance suite has the rest."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

pytest.importorskip("mlx_lm", reason="mlx-lm has no build for this system: bin/setup went on without it")

from swarm.broadcast.version.manifest import trained_spans
from swarm.errors import UserError
from swarm.learner.tiny import tiny_model
from swarm.models import draws as learner_draws
from swarm.models.memory import weights_bytes
from swarm.sampler.engine import Generate, Installed, NotInstalled
from swarm.sampler.mlx.draws import gumbel
from swarm.sampler.mlx.engine import MlxEngine
from swarm.sampler.mlx.model import Rounded
from swarm.sampler.room import shape_of_layout
from swarm.sampler.transformers import Threaded, TransformersEngine
from swarm.types import Rounding
from tests.builders import v
from tests.conformance import PROMPT, job, logprobs, tokens
from tests.unit import rows
from tests.unit.models import Staged, adapted_model, logprobs_of, moe_model, published, stage, stage_model

AUTO: Any = AutoModelForCausalLM
SHAPE: dict[str, Any] = {
    **{**rows.SHAPE, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"max_position_embeddings": 64, "initializer_range": 0.2},
}


def silent() -> None: ...


def configured(config: Any, directory: Path) -> Staged:
    torch.manual_seed(1)
    return stage_model(AUTO.from_config(config), directory)


def started(staged: Staged, **options: Any) -> MlxEngine:
    engine = MlxEngine()
    engine.start(staged.start(places=8, **options), silent)
    return engine


def installed(staged: Staged, **options: Any) -> MlxEngine:
    engine = started(staged, **options)
    done = engine.install(staged.install(), silent)
    assert isinstance(done, Installed), done
    return engine


def nbytes_of(engine: MlxEngine) -> int:
    from mlx.utils import tree_flatten

    return sum(array.nbytes for _, array in tree_flatten(engine._model.module.parameters()))


def hold_rounded(model: Any, how: Rounded) -> None:
    """Put in place of each matrix that is rounded the float32 numbers that it then stands for."""
    import mlx.core as mx

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and ".lora_" not in name:
                packed, scales, offsets = how.round(mx.array(parameter.numpy()))
                scales, offsets = scales.astype(mx.float32), offsets.astype(mx.float32)
                held = mx.dequantize(packed, scales, offsets, group_size=how.group_size, bits=how.bits)
                parameter.copy_(torch.tensor(held.tolist()))


def error_against(model: Any, engine: MlxEngine, temperature: float = 1.3) -> float:
    """The largest difference of a log-prob from the model's own."""
    jobs = tuple(job(seed, prompt=PROMPT[: 2 + seed % 3], temperature=temperature, stops=()) for seed in range(6))
    drawn = engine.generate(Generate(jobs=jobs), silent).samples
    return max(
        abs(one - other)
        for asked, sampled in zip(jobs, drawn, strict=True)
        for one, other in zip(
            logprobs(sampled),
            logprobs_of(model, asked.prompt_token_ids, tokens(sampled), temperature=temperature),
            strict=True,
        )
    )


def test_the_noise_is_the_learner_s() -> None:
    seeds, positions = [0, 1, 2**62 + 5, 2**63 - 1], [0, 5, 100_000, 3]
    ours = torch.tensor(gumbel(seeds, positions, 5_000).tolist())
    assert (ours - learner_draws.gumbel(torch.tensor(seeds), torch.tensor(positions), 5_000)).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["tiny", "untied", "rope of its own", "experts"])
def test_the_learner_finds_its_log_probs_at_equal_version(kind: str, tmp_path: Path) -> None:
    """Files of transformers 5 leave out defaults and have other names for some settings than mlx-lm."""
    match kind:
        case "tiny":
            staged = stage(tmp_path)
        case "untied":
            staged = configured(Qwen2Config(**SHAPE, tie_word_embeddings=False), tmp_path)
        case "rope of its own":
            scaled = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0}
            scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
            staged = configured(LlamaConfig(**SHAPE, rope_parameters=scaled), tmp_path)
        case _:
            staged = stage_model(moe_model(3), tmp_path)
    assert error_against(published(staged.model), installed(staged)) < 1e-4


def test_greedy_draws_have_the_log_probs_of_temperature_1(tmp_path: Path) -> None:
    staged = stage(tmp_path)
    (sampled,) = installed(staged).generate(Generate(jobs=(job(0, temperature=0.0, stops=()),)), silent).samples
    model = published(staged.model)
    assert logprobs(sampled) == pytest.approx(logprobs_of(model, PROMPT, tokens(sampled)), abs=1e-4)
    with torch.no_grad():
        best = model(torch.tensor([[*PROMPT, *tokens(sampled)]])).logits[0, len(PROMPT) - 1 : -1].argmax(-1)
    assert tokens(sampled) == best.tolist()


def test_it_draws_what_transformers_draws_and_more_than_it_has_places_for(tmp_path: Path) -> None:
    staged = stage(tmp_path)
    other = TransformersEngine()
    other.start(staged.start(places=8), silent)
    other.install(staged.install(), silent)
    jobs = tuple(job(seed, prompt=PROMPT[: 1 + seed % 4], limit=4 + seed % 7) for seed in range(20))
    ours, theirs = (one.generate(Generate(jobs=jobs), silent) for one in (installed(staged), other))
    assert [tokens(one) for one in ours.samples] == [tokens(one) for one in theirs.samples]
    assert [one.finish for one in ours.samples] == [one.finish for one in theirs.samples]


# -- proofs --------------------------------------------------------------------------------------------------


def proofs(engine: MlxEngine, staged: Staged) -> list[str]:
    done = [engine.install(staged.install(version), silent) for version in range(2)]
    return [one.proof if isinstance(one, Installed) else str(one) for one in done]


def test_sums_prove_what_it_holds(tmp_path: Path) -> None:
    staged = stage(tmp_path)
    assert proofs(started(staged), staged) == ["sums", "sums"]
    assert proofs(started(staged, precision="int8"), staged) == ["rounding", "rounding"]
    # mlx-lm stacks the experts, so they have no sums.
    experts = stage_model(moe_model(3), tmp_path / "experts")
    assert proofs(started(experts), experts) == ["some sums", "some sums"]
    assert proofs(started(experts, precision="int8"), experts) == ["some sums", "some sums"]


@pytest.mark.parametrize("precision", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", ["model.embed_tokens", "model.layers.1.mlp.up_proj", "model.norm"])
def test_a_tensor_that_was_not_taken_is_found(
    precision: Rounding, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = stage(tmp_path / "old"), stage(tmp_path / "new", seed=5)
    with torch.no_grad():
        new.model.model.norm.weight += 0.5
    new = stage_model(new.model, tmp_path / "newer")
    engine = installed(old, precision=precision)
    module = engine._model.module
    load = type(module).load_weights

    def forgetting(self: Any, weights: list[tuple[str, Any]], strict: bool = True) -> Any:
        return load(self, [one for one in weights if not one[0].startswith(f"{name}.")], strict=strict)

    monkeypatch.setattr(type(module), "load_weights", forgetting)
    done = engine.install(new.install(1), silent)
    assert done == NotInstalled("engine", f"after the install {name}.weight differs from what the learner signed")


# -- rounded weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "bits"), [("int8", 8), ("int4", 4)])
def test_it_draws_from_the_rounded_model_and_says_so(precision: Rounding, bits: int, tmp_path: Path) -> None:
    """Its log-probs are those of a model whose matrices are rounded, embeddings included, and no others."""
    staged = configured(LlamaConfig(**SHAPE), tmp_path)
    engine = MlxEngine()
    assert engine.start(staged.start(precision=precision), silent).precision == precision
    engine.install(staged.install(), silent)
    model = published(staged.model)
    exact = error_against(model, engine)
    hold_rounded(model, Rounded(64, bits))
    assert error_against(model, engine) < 1e-4 < exact
    assert nbytes_of(engine) < nbytes_of(started(staged)) * (bits + 1.2) / 32


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "fp8"}, "int8 or int4, not to fp8"),
        ({"dtype": "float16"}, "could never be proven"),
        ({"device": "cuda:0"}, "or a cpu, not on cuda:0"),
        ({"device": "mps"}, r"Apple's GPU \(mps, not here\)"),
    ],
)
def test_what_it_cannot_do_is_said_at_the_start(options: dict[str, str], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        started(stage(tmp_path), **options)


def test_a_model_that_mlx_lm_does_not_have_is_refused(tmp_path: Path) -> None:
    from transformers import BloomConfig

    config = BloomConfig(vocab_size=14, hidden_size=64, n_layer=2, n_head=2)
    with pytest.raises(UserError, match=r"mlx-lm cannot build .* take --engine transformers"):
        started(configured(config, tmp_path))


def test_a_model_of_which_nothing_can_be_rounded_is_refused(tmp_path: Path) -> None:
    staged = configured(LlamaConfig(**{**SHAPE, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}), tmp_path)
    with pytest.raises(UserError, match=r"no matrix of this model .* leave out --precision"):
        started(staged, precision="int8")


def test_a_model_too_large_for_what_is_free_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.sampler.room.free_host_bytes", lambda: 760_000)
    with pytest.raises(UserError, match="--precision int4") as refused:
        started(stage(tmp_path), max_model_len=64)
    assert "--engine vllm" not in str(refused.value)
    assert "fp8" not in str(refused.value)
    assert started(stage(tmp_path / "again"), precision="int8", max_model_len=64)._started.places >= 4


# -- adapters ------------------------------------------------------------------------------------------------


def adapted(tmp_path: Path, count: int = 2) -> list[Staged]:
    return [stage_model(adapted_model(drawn=drawn), tmp_path / str(drawn)) for drawn in range(count)]


def test_it_draws_with_an_adapter_as_the_learner_does_and_takes_the_next_one(tmp_path: Path) -> None:
    first, second = adapted(tmp_path)
    engine = installed(first)
    assert error_against(published(first.model), engine) < 1e-4
    for version, staged in enumerate((second, first), start=1):
        done = engine.install(staged.install(version), silent)
        assert isinstance(done, Installed)
        assert done.proof == "sums"
        assert error_against(published(staged.model), engine) < 1e-4
        assert error_against(published(tiny_model(0)), engine) > 1e-2


def test_experts_are_stacked_once_beside_an_adapter(tmp_path: Path) -> None:
    first, second = (
        stage_model(adapted_model(drawn=drawn, base=moe_model(3)), tmp_path / str(drawn)) for drawn in (0, 1)
    )
    engine = started(first)
    for version, (staged, proof) in enumerate(((first, "some sums"), (second, "sums"))):
        done = engine.install(staged.install(version), silent)
        assert isinstance(done, Installed)
        assert done.proof == proof
        assert error_against(published(staged.model), engine) < 1e-4


async def test_what_is_frozen_is_read_and_proven_once_and_a_torn_adapter_is_refused(tmp_path: Path) -> None:
    """Later versions come from a file whose base is not even looked at; their adapter is proven as ever."""
    first, second = adapted(tmp_path)
    engine = Threaded(MlxEngine())
    await engine.start(first.start(places=8), silent)
    assert isinstance(await engine.install(first.install(), silent), Installed)
    (adapter,) = trained_spans(first.layout.tensors)
    content = second.staging.read_bytes()
    second.staging.write_bytes(bytes(adapter.start) + content[adapter.start :])
    assert isinstance(await engine.install(second.install(1), silent), Installed)
    second.staging.write_bytes(bytes(adapter.start) + content[adapter.start : -1] + b"?")
    refused = await engine.install(second.install(2), silent)
    assert isinstance(refused, NotInstalled)
    assert refused.fault == "file"
    # A file that was whole when it was checked. From here on nothing is held, and the base is read again.
    proven = msgspec.structs.replace(second.install(2), proven=True)
    for name in ("lora_B", "embed_tokens"):
        refused = await engine.install(proven, silent)
        assert isinstance(refused, NotInstalled)
        assert name in refused.why
    assert isinstance(await engine.install(first.install(3), silent), Installed)
    assert error_against(published(first.model), cast(MlxEngine, engine._engine)) < 1e-4


async def test_an_adapter_that_comes_while_a_batch_is_drawn_waits_for_its_end(tmp_path: Path) -> None:
    first, second = adapted(tmp_path)
    engine = Threaded(MlxEngine())
    await engine.start(first.start(places=8), silent)
    await engine.install(first.install(), silent)
    has_begun, may_go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def step() -> None:
        loop.call_soon_threadsafe(has_begun.set)
        assert may_go_on.wait(30)

    asked = job(1, stops=())
    drawing = asyncio.create_task(engine.generate(Generate(jobs=(asked,)), step))
    await has_begun.wait()
    installing = asyncio.create_task(engine.install(second.install(1), silent))
    await asyncio.sleep(0)
    may_go_on.set()
    before, done = (await drawing).samples[0], await installing
    assert isinstance(done, Installed)
    after = (await engine.generate(Generate(jobs=(asked,)), silent)).samples[0]
    for version, (staged, sampled) in enumerate(((first, before), (second, after))):
        assert [span.version for span in sampled.spans] == [v(version)]
        expected = logprobs_of(published(staged.model), PROMPT, tokens(sampled))
        assert logprobs(sampled) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_the_base_is_rounded_and_the_adapter_is_not(precision: Rounding, tmp_path: Path) -> None:
    first, second = adapted(tmp_path)
    engine = installed(first, precision=precision)
    done = engine.install(second.install(1), silent)
    assert isinstance(done, Installed)
    model = published(second.model)
    exact = error_against(model, engine)
    hold_rounded(model, Rounded(64, {"int8": 8, "int4": 4}[precision]))
    assert error_against(model, engine) < 1e-4 < exact


def test_room_is_reckoned_with_the_adapter_as_it_is_held(tmp_path: Path) -> None:
    (staged,) = adapted(tmp_path, 1)
    for precision in ("none", "int8"):
        engine = started(staged, precision=precision)
        reckoned = weights_bytes(shape_of_layout(staged.layout), "float32", precision)
        assert nbytes_of(engine) == pytest.approx(reckoned, rel=0.1)
