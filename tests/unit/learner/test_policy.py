"""Log-probs of the policy: in chunks, packed and padded, on several architectures; none of it may change a figure."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from swarm.errors import UserError
from swarm.learner import policy as policy_module
from swarm.learner.batch import Row, micro_batches
from swarm.learner.messages import TrainerConfig
from swarm.learner.policy import Draws, Policy, arrange
from tests.unit.models import logprobs_of
from tests.unit.rows import CPU, grouped_rows, random_rows, row, small_model

TEMPERATURE = 0.7
AT_ONCE, HALF = TrainerConfig(), TrainerConfig(precision="bfloat16")


def read_all(policy: Policy, rows: list[Row], rules: TrainerConfig) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for part in micro_batches(rows, rules, CPU):
        found |= part.by_row(policy.read(part).logprobs)
    return [found[number] for number in range(len(rows))]


def gradient(model: Any, policy: Policy, rows: list[Row], rules: TrainerConfig = AT_ONCE) -> torch.Tensor:
    """Of a sum in which every token has a weight of its own."""
    model.zero_grad(set_to_none=True)
    found = enumerate(read_all(policy, rows, rules))
    loss = sum((logprobs * torch.linspace(-1, 1 + number, len(logprobs))).sum() for number, logprobs in found)
    loss.backward()  # type: ignore[union-attr]
    return gradient_of(model)


def gradient_of(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", ["qwen3", "llama", "window", "capped", "scaled", "dropout", "functional", "alibi"])
def test_log_probs_are_those_of_each_row_alone(name: str) -> None:
    model, rows = small_model(name).train(), random_rows(6)
    policy = Policy(model, TrainerConfig(), temperature=TEMPERATURE)
    rules, said = policy.settle(TrainerConfig.model_construct(tokens_per_micro_batch=40), CPU)
    found = read_all(policy, rows, rules)
    model.eval()
    for one, logprobs in zip(rows, found, strict=True):
        tokens = one.token_ids.tolist()
        alone = logprobs_of(model, tokens[: one.prompt_tokens], tokens[one.prompt_tokens :], temperature=TEMPERATURE)
        assert logprobs.tolist() == pytest.approx(alone, abs=2e-5)
    assert policy.module.in_chunks is (name not in ("capped", "scaled"))
    assert any("for all tokens at once" in line for line in said) is not policy.module.in_chunks
    assert rules.packing is False


@pytest.mark.parametrize("name", ["qwen3", "window"])
def test_packed_rows_give_the_log_probs_and_the_gradient_of_padded_ones(name: str) -> None:
    model, rows = small_model(name).train(), random_rows(12)
    policy = Policy(model, TrainerConfig(), temperature=TEMPERATURE)
    padded = TrainerConfig.model_construct(tokens_per_micro_batch=60)
    packed, _ = policy.settle(TrainerConfig.model_construct(tokens_per_micro_batch=60, packing=True), CPU)
    assert all(part.positions is not None for part in micro_batches(rows, packed, CPU))
    for some, others in zip(read_all(policy, rows, padded), read_all(policy, rows, packed), strict=True):
        torch.testing.assert_close(some, others, atol=2e-5, rtol=0)
    some, others = (gradient(model, policy, rows, rules) for rules in (padded, packed))
    assert float((some - others).norm()) < 1e-5 * float(some.norm())


@pytest.mark.parametrize("name", ["qwen3", "llama", "scaled", "dropout", "window", "capped", "alibi"])
def test_rows_that_share_their_prompt_give_the_log_probs_and_the_gradient_of_rows_alone(name: str) -> None:
    model, rows = small_model(name).train(), grouped_rows(3, 8)
    policy = Policy(model, TrainerConfig(), temperature=TEMPERATURE)
    rules, _ = policy.settle(TrainerConfig.model_construct(tokens_per_micro_batch=120), CPU)
    # A window, or positions that no mask moves: these see another prompt than the one they follow.
    assert bool(rules.shares_beyond) is (name not in ("window", "capped", "alibi"))
    alone = TrainerConfig.model_construct(tokens_per_micro_batch=120)
    shared, apart = (sum(p.token_ids.numel() for p in micro_batches(rows, one, CPU)) for one in (rules, alone))
    assert (shared < 0.6 * apart) is bool(rules.shares_beyond)
    found, expected = (torch.cat(read_all(policy, rows, one)) for one in (rules, alone))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.mean(), expected.mean(), atol=1e-6, rtol=0)
    some, others = (gradient(model, policy, rows, one) for one in (rules, alone))
    assert float((some - others).norm()) < 1e-5 * float(others.norm())


def test_rows_are_alone_if_the_user_says_so_and_packing_is_refused_where_they_would_see_one_another() -> None:
    rules, _ = Policy(small_model("llama"), TrainerConfig(), temperature=1.0).settle(TrainerConfig(packing=False), CPU)
    assert rules.shares_beyond == 0
    with pytest.raises(UserError, match="packed rows apart"):
        Policy(small_model("alibi"), TrainerConfig(), temperature=1.0).settle(TrainerConfig(packing=True), CPU)


def test_long_completions_do_not_share_a_short_prompt() -> None:
    """A line of W tokens costs W x (beyond + W): here two rows together cost more than apart."""
    rules = TrainerConfig(shares_beyond=10)
    long = [row([1, 2], range(first, first + 31)) for first in range(4)]
    assert [part.numbers for part in micro_batches(long, rules, CPU) for _ in part.token_ids] == [(0, 1, 2, 3)] * 4
    (part,) = micro_batches([row([1, *range(9)], [last, 2]) for last in range(3, 7)], rules, CPU)
    assert part.token_ids.tolist() == [[1, *range(9), 3, 4, 5, 6]]


class Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls of `operation` whose first argument, or result, has this shape."""

    def __init__(self, found: Callable[[Any, tuple[Any, ...], Any], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self._found = 0, found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += self._found(func, args, result)
        return result


@pytest.mark.parametrize("entropy_pulls", [False, True])
def test_a_chunk_at_most_is_there_at_a_time(entropy_pulls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pass makes a tensor of the vocabulary's width with more rows than a chunk has."""
    model, rows = small_model("qwen3").train(), random_rows(30)
    policy = Policy(model, TrainerConfig(), temperature=TEMPERATURE)
    policy.module.entropy_pulls = entropy_pulls
    (part,) = micro_batches(rows, TrainerConfig(), CPU)
    made: set[int] = set()

    def note(func: Any, args: tuple[Any, ...], result: Any) -> bool:
        if isinstance(result, torch.Tensor) and result.dim() == 2 and result.shape[1] == 14:
            made.add(len(result))
        return False

    def widest() -> int:
        made.clear()
        with Ops(note):
            read = policy.read(part)
            torch.autograd.backward((read.logprobs + read.entropy).sum())
        return max(made - {64})  # The transposed weight

    assert widest() == len(part.targets) > 100
    monkeypatch.setattr(policy_module, "CHUNK_BYTES", 4 * 14 * 5)
    assert widest() == 5


def test_the_head_is_cast_once_for_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = small_model("qwen3").train(), random_rows(8)
    policy = Policy(model, TrainerConfig(precision="bfloat16"), temperature=TEMPERATURE)
    (part,) = micro_batches(rows, TrainerConfig(), CPU)
    monkeypatch.setattr(policy_module, "CHUNK_BYTES", 4 * 14 * 5)
    with Ops(lambda f, given, _: f is torch.ops.aten._to_copy.default and given[0].shape == (14, 64)) as casts:
        torch.autograd.backward(policy.read(part).logprobs.sum())
    assert casts.count == 1


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_the_gradient_of_the_head_is_added_up_in_float32(size: int) -> None:
    """All tokens pull alike, so that a sum in bf16 would stand still. The bound is the rounding of one product."""
    draw = torch.Generator().manual_seed(0)
    hidden = (1 + torch.rand((400, 8), generator=draw)).bfloat16().requires_grad_()
    weight = torch.randn((11, 8), generator=draw).requires_grad_()
    bias, targets = torch.randn(11, generator=draw).requires_grad_(), torch.full((400,), 3)
    apply: Any = policy_module._InChunks.apply
    logprobs, _ = apply(hidden, weight, bias, targets, size, TEMPERATURE, False)
    *found, of_hidden = torch.autograd.grad(logprobs.sum(), (weight, bias, hidden))
    plain = [one.detach().bfloat16().double().requires_grad_() for one in (weight, bias)]
    wide = hidden.detach().double().requires_grad_()
    logits = (wide @ plain[0].t() + plain[1]) / TEMPERATURE
    *expected, own = torch.autograd.grad(logits.log_softmax(-1)[:, 3].sum(), (*plain, wide))
    assert float((of_hidden - own).norm()) < 2**-6 * float(own.norm())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert float((one - other).norm()) < 2**-9 * float(other.norm())


def test_micro_batches_in_bf16_add_up_to_the_gradient_of_one() -> None:
    """And are no further than it from that of float64: each adds its own rounding, and none is lost in a sum."""
    model, rows = small_model("qwen3").train(), random_rows(40)
    wide = copy.deepcopy(model).double()
    exact = gradient(wide, Policy(wide, TrainerConfig(), temperature=1.0), rows)
    half = Policy(model, TrainerConfig(precision="bfloat16"), temperature=1.0)
    many = TrainerConfig.model_construct(tokens_per_micro_batch=30)
    assert len(micro_batches(rows, many, CPU)) > 15
    one, several = (gradient(model, half, rows, rules) for rules in (TrainerConfig(), many))
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    apart = [float((found - exact).norm() / exact.norm()) for found in (one, several)]
    assert apart[0] < 0.03
    assert apart[1] < 1.2 * apart[0]


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_in_bf16_log_probs_are_those_of_a_sampler_with_bf16_weights(name: str) -> None:
    """To the last bit, where the weights of norms are numbers of bf16: all between the layers is bf16 as it is there.
    Autocast alone would leave it float32."""
    model, rows = small_model(name).train(), random_rows(8)
    (part,) = micro_batches(rows, TrainerConfig(), CPU)
    seen: set[torch.dtype] = set()
    model.model.layers[1].register_forward_pre_hook(lambda _, given: seen.add(given[0].dtype))
    found = Policy(model, TrainerConfig(precision="bfloat16"), temperature=1.0).read(part).logprobs.detach()
    assert seen == {torch.bfloat16}
    sampler = small_model(name).eval()
    for parameter in sampler.parameters():
        parameter.data = parameter.data.bfloat16()
    with torch.no_grad():
        logits = sampler(input_ids=part.token_ids, use_cache=False).logits.flatten(0, 1)[part.places]
    expected = logits.float().log_softmax(-1).gather(1, part.targets[:, None]).squeeze(1)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_a_replay_is_float32_whatever_steps_are_computed_in() -> None:
    model, rows = small_model("qwen3"), random_rows(4)
    (part,) = micro_batches(rows, TrainerConfig(), CPU)
    draws = Draws(seeds=torch.arange(len(part.targets)), positions=torch.arange(len(part.targets)))
    some, others = (
        Policy(model, TrainerConfig(precision=precision), temperature=1.0).replay(part, draws)
        for precision in ("float32", "bfloat16")
    )
    assert all(torch.equal(*pair) for pair in zip(some, others, strict=True))


def flash_in_torch(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **given: Any
) -> tuple[torch.Tensor, None]:
    """What flash attention does with packed rows, and that it takes no float32: each from a position 0 to the next
    alone. query: [1, heads, tokens, width]."""
    if query.dtype == torch.float32 or mask is not None:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    ends = [*torch.nonzero(given["position_ids"][0] == 0).flatten().tolist()[1:], query.shape[2]]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    parts = zip(*(torch.split(one, sizes, dim=2) for one in (query, key, value)), strict=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    found = [attend(q, k, v, is_causal=True, scale=given["scaling"], enable_gqa=True) for q, k, v in parts]
    return torch.cat(found, dim=2).transpose(1, 2), None


def mixing(module: Any, query: torch.Tensor, key: Any, value: Any, mask: Any, **given: Any) -> tuple[Any, None]:
    given["position_ids"] = torch.arange(query.shape[2])[None]
    return flash_in_torch(module, query, key, value, mask, **given)


def narrow(*given: Any, **more: Any) -> tuple[Any, None]:
    raise RuntimeError("FlashAttention forward only supports head dimension at most 256")


@pytest.fixture
def flash(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", lambda *given, **more: None)
    AttentionInterface.register("flash_in_torch", request.param)
    AttentionMaskInterface.register("flash_in_torch", flash_attention_mask)
    monkeypatch.setattr(policy_module, "flash_kernel", lambda device: "flash_in_torch")


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("flash", [flash_in_torch], indirect=True)
def test_flash_attention_is_taken_where_it_is_there_and_rows_are_packed() -> None:
    """The package itself runs on a GPU alone; the stand-in keeps its contract."""
    model, rows = small_model("qwen3").train(), random_rows(12)
    padded = Policy(model, TrainerConfig(precision="bfloat16"), temperature=1.0)
    expected, at_first = read_all(padded, rows, TrainerConfig()), model.config._attn_implementation
    policy = Policy(model, TrainerConfig(precision="bfloat16"), temperature=1.0)
    assert policy.settle(TrainerConfig(packing=False), CPU)[0].packing is False
    assert not policy.is_flash
    rules, _ = policy.settle(TrainerConfig.model_construct(tokens_per_micro_batch=60), CPU)
    assert (rules.packing, "flash" in model.config._attn_implementation) == (True, True)
    for some, others in zip(read_all(policy, rows, rules), expected, strict=True):
        torch.testing.assert_close(some, others, atol=0.1, rtol=0)
    # A replay is float32, which the kernel cannot.
    (part,) = micro_batches(rows, TrainerConfig(), CPU)
    draws = Draws(seeds=torch.arange(len(part.targets)), positions=torch.arange(len(part.targets)))
    replayed, _ = policy.replay(part, draws)
    assert "flash" in model.config._attn_implementation
    model.set_attn_implementation(at_first)
    assert torch.equal(replayed, padded.replay(part, draws)[0])


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize(
    ("flash", "rules"),
    [(mixing, HALF), (narrow, HALF), (flash_in_torch, TrainerConfig(precision="float32"))],
    indirect=["flash"],
)
def test_flash_attention_that_a_model_cannot_have_is_left_alone(rules: TrainerConfig) -> None:
    policy = Policy(small_model("qwen3"), rules, temperature=1.0)
    assert policy.settle(TrainerConfig(), CPU)[0].packing is False
    assert not policy.is_flash


@pytest.mark.parametrize(
    ("pulls", "entropy_pulls"), [((1.0, 0.0), False), ((1.0, 0.0), True), ((0.0, 1.0), True), ((1.0, -0.3), True)]
)
def test_log_probs_and_entropy_have_the_gradient_of_float64(pulls: tuple[float, float], entropy_pulls: bool) -> None:
    """Alone, beside one another, and where only one of them pulls."""
    draw = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn((5, 11), generator=draw)).requires_grad_()
    targets, weights = torch.randint(11, (5,), generator=draw), torch.randn(5, generator=draw)
    apply: Any = policy_module._InChunks.apply
    logprobs, entropy = apply(logits, None, None, targets, 2, TEMPERATURE, entropy_pulls)
    assert entropy.requires_grad is entropy_pulls
    of_logprobs, of_entropy = pulls
    (found,) = torch.autograd.grad((weights * (of_logprobs * logprobs + of_entropy * entropy)).sum(), logits)
    plain = logits.detach().double().requires_grad_()
    chances = (plain / TEMPERATURE).softmax(-1)
    expected_entropy = -(chances * chances.log()).sum(-1)
    chosen = chances[torch.arange(5), targets].log()
    loss = (weights.double() * (of_logprobs * chosen + of_entropy * expected_entropy)).sum()
    (expected,) = torch.autograd.grad(loss, plain)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_activation_checkpointing_changes_no_gradient_and_keeps_no_copy_of_all_weights(
    precision: Literal["float32", "bfloat16"], tolerance: float
) -> None:
    model, rows = small_model("qwen3").train(), random_rows(6)
    policy = Policy(model, TrainerConfig(precision=precision), temperature=1.0)
    seen: list[bool] = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_cache_enabled()))
    expected = gradient(model, policy, rows)
    arrange(model, TrainerConfig(activation_checkpointing=True))
    torch.testing.assert_close(gradient(model, policy, rows), expected, atol=tolerance, rtol=tolerance)
    assert seen == [True, False, False], "the layer is computed twice, without the cache of autocast"
