"""Log-probs of the policy: in chunks, packed and padded, on several architectures; none of it may change a figure."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu

from swarm.errors import UserError
from swarm.learner import policy as policy_module
from swarm.learner.batch import Row, micro_batches
from swarm.learner.messages import ComputeRules
from swarm.learner.policy import Policy, arrange
from tests.unit.models import logprobs_of
from tests.unit.rows import CPU, random_rows, small_model

TEMPERATURE = 0.7
AT_ONCE = ComputeRules()


def read_all(policy: Policy, rows: list[Row], rules: ComputeRules) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for part in micro_batches(rows, rules, CPU):
        found |= part.by_row(policy.read(part).logprobs)
    return [found[number] for number in range(len(rows))]


def gradient(model: Any, policy: Policy, rows: list[Row], rules: ComputeRules = AT_ONCE) -> torch.Tensor:
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
    policy = Policy(model, ComputeRules(), temperature=TEMPERATURE)
    rules, said = policy.settle(ComputeRules(tokens_per_micro_batch=40), CPU)
    found = read_all(policy, rows, rules)
    model.eval()
    for row, logprobs in zip(rows, found, strict=True):
        tokens = row.token_ids.tolist()
        alone = logprobs_of(model, tokens[: row.prompt_tokens], tokens[row.prompt_tokens :], temperature=TEMPERATURE)
        assert logprobs.tolist() == pytest.approx(alone, abs=2e-5)
    assert policy.module.in_chunks is (name not in ("capped", "scaled"))
    assert any("computed whole" in line for line in said) is not policy.module.in_chunks
    assert rules.packing is False


@pytest.mark.parametrize("name", ["qwen3", "llama", "window"])
def test_packed_rows_give_the_log_probs_and_the_gradient_of_padded_ones(name: str) -> None:
    model, rows = small_model(name).train(), random_rows(12)
    policy = Policy(model, ComputeRules(), temperature=TEMPERATURE)
    padded = ComputeRules(tokens_per_micro_batch=60)
    packed, _ = policy.settle(ComputeRules(tokens_per_micro_batch=60, packing=True), CPU)
    assert all(part.positions is not None for part in micro_batches(rows, packed, CPU))
    for some, others in zip(read_all(policy, rows, padded), read_all(policy, rows, packed), strict=True):
        torch.testing.assert_close(some, others, atol=2e-5, rtol=0)
    some, others = (gradient(model, policy, rows, rules) for rules in (padded, packed))
    assert float((some - others).norm()) < 1e-5 * float(some.norm())


def test_packing_is_refused_where_rows_would_see_one_another() -> None:
    policy = Policy(small_model("alibi"), ComputeRules(), temperature=1.0)
    with pytest.raises(UserError, match="packed rows apart"):
        policy.settle(ComputeRules(packing=True), CPU)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_chunks_change_neither_a_log_prob_nor_an_entropy_nor_the_gradient(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model, rows = small_model(name).train(), random_rows(8)
    policy = Policy(model, ComputeRules(), temperature=TEMPERATURE)
    (part,) = micro_batches(rows, ComputeRules(), CPU)
    policy.module.in_chunks = False
    whole, expected = policy.read(part), gradient(model, policy, rows)
    policy.module.in_chunks = True
    monkeypatch.setattr(policy_module, "CHUNK_BYTES", 4 * 14 * 5)
    chunked = policy.read(part)
    torch.testing.assert_close(chunked.logprobs, whole.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(chunked.entropy, whole.entropy, atol=1e-5, rtol=0)
    assert not chunked.entropy.requires_grad
    assert float((gradient(model, policy, rows) - expected).norm()) < 1e-5 * float(expected.norm())


def test_a_chunk_at_most_is_there_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What autograd keeps between the passes has no more rows of the vocabulary's width than the weights have."""
    model, rows = small_model("qwen3").train(), random_rows(30)
    policy = Policy(model, ComputeRules(), temperature=TEMPERATURE)
    (part,) = micro_batches(rows, ComputeRules(), CPU)

    def widest() -> int:
        kept = [0]

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() == 2 and tensor.shape[1] == 14:
                kept.append(len(tensor))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            policy.read(part)
        return max(kept)

    assert widest() == len(part.targets) > 100
    monkeypatch.setattr(policy_module, "CHUNK_BYTES", 4 * 14 * 5)
    assert widest() == 0


def test_the_gradient_and_the_entropy_are_those_of_float64() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn((5, 11), generator=draw).requires_grad_()
    targets, pull = torch.randint(11, (5,), generator=draw), torch.randn(5, generator=draw)
    policy = Policy(small_model("qwen3"), ComputeRules(), temperature=TEMPERATURE)
    logprobs, entropy = policy.module._figures(logits, targets)
    (found,) = torch.autograd.grad(logprobs, logits, pull)
    plain = logits.detach().double().requires_grad_()
    table = (plain / TEMPERATURE).log_softmax(-1)
    (expected,) = torch.autograd.grad(table[torch.arange(5), targets], plain, pull.double())
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), -(table.exp() * table).sum(-1).detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("pulls", [(1.0, 0.0), (0.0, 1.0), (1.0, -0.3)])
def test_an_entropy_that_pulls_has_the_gradient_of_float64(pulls: tuple[float, float]) -> None:
    """Alone, beside the log-probs', and where only these pull."""
    draw = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn((5, 11), generator=draw)).requires_grad_()
    targets, weights = torch.randint(11, (5,), generator=draw), torch.randn(5, generator=draw)
    policy = Policy(small_model("qwen3"), ComputeRules(), temperature=TEMPERATURE)
    policy.module.entropy_pulls = True
    logprobs, entropy = policy.module._figures(logits, targets)
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


def test_the_gradient_of_an_entropy_keeps_no_more_logits_than_a_chunk_has(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = small_model("qwen3").train(), random_rows(30)
    policy = Policy(model, ComputeRules(), temperature=TEMPERATURE)
    policy.module.entropy_pulls = True
    (part,) = micro_batches(rows, ComputeRules(), CPU)
    policy.read(part).entropy.sum().backward()  # type: ignore[no-untyped-call]
    whole = gradient_of(model)
    model.zero_grad(set_to_none=True)
    monkeypatch.setattr(policy_module, "CHUNK_BYTES", 4 * 14 * 5)
    kept = [0]

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(len(tensor) if tensor.dim() == 2 and tensor.shape[1] == 14 else 0)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        entropy = policy.read(part).entropy
    assert max(kept) == 0
    entropy.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(gradient_of(model), whole, atol=1e-5, rtol=1e-4)
    assert float(whole.norm()) > 0


def test_activation_checkpointing_changes_no_gradient() -> None:
    model, rows = small_model("qwen3").train(), random_rows(6)
    policy = Policy(model, ComputeRules(), temperature=1.0)
    expected = gradient(model, policy, rows)
    runs = [0]
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    arrange(model, ComputeRules(activation_checkpointing=True))
    torch.testing.assert_close(gradient(model, policy, rows), expected, atol=1e-6, rtol=1e-5)
    assert sum(runs) == 2


@pytest.mark.parametrize("half", [False, True])
def test_what_checkpointing_keeps_can_lie_on_the_host(half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same gradient, bit for bit; of a layer its input alone goes there, and no weight."""
    model, rows = small_model("qwen3").train(), random_rows(6)
    rules = ComputeRules(precision="bfloat16" if half else "float32", activation_offload=True)
    policy = Policy(model, rules, temperature=1.0)
    arrange(model, rules)
    expected = gradient(model, policy, rows)
    moved: list[torch.Size] = []

    class Counted(save_on_cpu):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.to_host, self.pack_hook = self.pack_hook, self.counted

        def counted(self, tensor: torch.Tensor) -> Any:
            moved.append(tensor.shape)
            return self.to_host(tensor)

    monkeypatch.setattr(policy_module, "save_on_cpu", Counted)
    policy.module.offloads = True
    assert torch.equal(gradient(model, policy, rows), expected)
    inputs = [shape for shape in moved if len(shape) == 3 and shape[-1] == model.config.hidden_size]
    layers = model.config.num_hidden_layers
    assert layers <= len(inputs) <= layers + 4  # And what the last norm keeps
    matrices = {p.shape for p in model.parameters() if p.dim() == 2}
    assert not matrices & set(moved)


def test_bf16_with_checkpointing_keeps_no_copy_of_all_weights() -> None:
    model, rows = small_model("qwen3").train(), random_rows(6)
    policy = Policy(model, ComputeRules(precision="bfloat16"), temperature=1.0)
    seen: list[bool] = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_cache_enabled()))
    expected = gradient(model, policy, rows)
    arrange(model, ComputeRules(activation_checkpointing=True))
    torch.testing.assert_close(gradient(model, policy, rows), expected, atol=1e-2, rtol=1e-2)
    assert seen == [True, False, False]


def test_bf16_computes_from_float32_weights_and_is_near() -> None:
    model, rows = small_model("qwen3").train(), random_rows(6)
    exact = read_all(Policy(model, ComputeRules(precision="auto"), temperature=1.0), rows, ComputeRules())
    half = Policy(model, ComputeRules(precision="bfloat16"), temperature=1.0)
    found = read_all(half, rows, ComputeRules())
    assert all(one.dtype == torch.float32 for one in found)
    difference = max(float((one - other).detach().abs().max()) for one, other in zip(found, exact, strict=True))
    assert 0 < difference < 0.1
    assert gradient(model, half, rows).dtype == torch.float32


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_model_gives_the_same_figures_and_keeps_its_names() -> None:
    model, rows = small_model("qwen3").train(), random_rows(6)
    policy = Policy(model, ComputeRules(), temperature=1.0)
    names, expected = list(model.state_dict()), gradient(model, policy, rows)
    arrange(model, ComputeRules(compile=True))
    torch.testing.assert_close(gradient(model, policy, rows), expected, atol=1e-5, rtol=1e-4)
    assert list(model.state_dict()) == names
