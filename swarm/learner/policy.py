"""The model as a policy: the log-probs that it gives the tokens of a micro-batch.

A causal model returns logits for every position, [tokens, vocabulary] in float32: with 150,000 words they take far more
memory than the rest of a forward pass. Here only the last hidden states of completion tokens go through the model's
head, in chunks. The backward pass computes all chunks but one again, so only one chunk's logits are in memory at a
time. `Policy.settle` compares the result with the model's own logits before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call
from torch.nn.functional import linear
from transformers.utils.import_utils import is_flash_attn_2_available

from swarm.errors import UserError
from swarm.learner.batch import MicroBatch, Row, micro_batches
from swarm.learner.messages import TrainerConfig
from swarm.models.device import has_full_attention, stated
from swarm.models.draws import GREEDY, gumbel
from swarm.models.lines import MASKED_ATTENTION

CHUNK_BYTES = 256 << 20  # Of float32 logits at a time: 440 tokens of 152,000 words, enough to keep a GPU busy
PROBE_TOKENS = (5, 9, 2)  # Lengths of the rows with which a model is tested: two odd, and none a multiple of another
PROBE_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Largest difference of two log-probs that count as equal, by the type of the pass: from 16 on, bf16 logits are 0.125
apart. A scaled logit, or rows that see one another, make a larger difference."""

WHOLE_LOGITS = (
    "this model changes its logits after its output layer, so they are computed for all tokens at once; "
    "lower --tokens-per-micro-batch if memory runs out"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFigures:
    """Figures of the completion tokens of a micro-batch, in its order: [tokens]. `entropy` has a gradient only if
    PolicyModel.entropy_pulls is set."""

    logprobs: torch.Tensor
    entropy: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """The seeds and positions that determine the noise of each completion token, int64 [tokens] (draws.py)."""

    seeds: torch.Tensor
    positions: torch.Tensor


class PolicyModel(torch.nn.Module):
    """`model`, a causal language model, with log-probs instead of logits.

    All weights, also the head's, are used within this module's own forward, so that FSDP can shard it as its root.
    Weights are saved and published under the names in `model`.
    """

    def __init__(self, model: Any, *, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        backbone, head = model.base_model, model.get_output_embeddings()
        # A test with small logits would not show a soft cap.
        capped = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        # A head of another class, or one with an adapter, is left to the model.
        self.in_chunks = type(head) is torch.nn.Linear and backbone is not model and not capped
        """Whether the head is applied here, in chunks, instead of by the model."""
        self.entropy_pulls = False
        """Whether entropies have a gradient."""
        self.weights_in_half = False
        """Whether every pass uses bf16 weights, as FSDP gathers them."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor | None,
        attention: torch.Tensor | None,
        places: torch.Tensor,
        targets: torch.Tensor,
        draws: Draws | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of `targets` at the flat indices `places` of `token_ids`, and entropies there: [tokens], float32.
        With `draws`, margins of the targets instead of entropies."""
        given: dict[str, Any] = {"input_ids": token_ids, "use_cache": False}
        if positions is not None:
            given["position_ids"] = positions
        if attention is not None:
            given["attention_mask"] = attention
        if self.in_chunks:
            found, head = self.model.base_model(**given).last_hidden_state, self.model.get_output_embeddings()
        else:
            found, head = self.model(**given).logits, None
        found = found.flatten(0, 1)[places]
        size = max(1, CHUNK_BYTES // (4 * self.model.config.get_text_config().vocab_size))
        if draws is not None:
            return self._replayed(found, head, targets, draws, size)
        if head is not None and torch.is_autocast_enabled(found.device.type):
            found = found.to(torch.get_autocast_dtype(found.device.type))
        weight, bias = (None, None) if head is None else (head.weight, head.bias)
        figures: tuple[torch.Tensor, torch.Tensor] = _InChunks.apply(
            found, weight, bias, targets, size, self.temperature, self.entropy_pulls
        )
        return figures

    def _replayed(
        self, found: torch.Tensor, head: Any, targets: torch.Tensor, draws: Draws, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chunks = zip(*(one.split(size) for one in (found, targets, draws.seeds, draws.positions)), strict=True)
        parts = [
            self._margins(part if head is None else head(part), chosen, Draws(seeds=seeds, positions=positions))
            for part, chosen, seeds, positions in chunks
        ]
        logprobs, margins = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(margins)

    def _margins(self, logits: torch.Tensor, targets: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.log_softmax(logits.float() / self.temperature, -1)
        logprobs = found.gather(1, targets[:, None])
        noise = gumbel(draws.seeds, draws.positions, found.shape[1])
        noise[draws.seeds == GREEDY] = 0.0
        noised = found.add_(noise)
        return logprobs.squeeze(1), noised.max(-1).values - noised.gather(1, targets[:, None]).squeeze(1)


class Policy:
    """`model` at the temperature of the rollouts and without dropout, as they were sampled. `module` is the part that
    FSDP may shard."""

    def __init__(self, model: Any, config: TrainerConfig, *, temperature: float) -> None:
        self.module = PolicyModel(model, temperature=temperature)
        self._precision = config.precision
        _without_dropout(model)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) or _is_norm(module):
                module.register_forward_hook(_in_half)

    def read(self, part: MicroBatch, weights: dict[str, torch.Tensor] | None = None) -> TokenFigures:
        """Log-probs and entropies of completion tokens, float32; `weights`, by the module's names, replace its own."""
        logprobs, entropy = self._pass(part, is_half(self._precision, part.token_ids.device.type), weights)
        return TokenFigures(logprobs=logprobs, entropy=entropy)

    def _pass(
        self, part: MicroBatch, half: bool, weights: dict[str, torch.Tensor] | None = None, draws: Draws | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = (part.token_ids, part.positions, part.attention, part.places, part.targets, draws)
        # With activation checkpointing a pass uses each weight once, so autocast must not keep a bf16 copy of it.
        cached = not getattr(self.module.model, "is_gradient_checkpointing", False)
        autocast = torch.autocast(part.token_ids.device.type, torch.bfloat16, enabled=half, cache_enabled=cached)
        with autocast, self._attention(half=half):
            found: tuple[torch.Tensor, torch.Tensor] = (
                functional_call(self.module, weights, given) if weights else self.module(*given)
            )
        return found

    @contextmanager
    def _attention(self, *, half: bool) -> Iterator[None]:
        """Use another kernel for float32, which flash attention does not support."""
        model, kernel = self.module.model, self.module.model.config._attn_implementation
        if half or not self.is_flash:
            yield
            return
        model.set_attn_implementation("sdpa")
        try:
            yield
        finally:
            model.set_attn_implementation(kernel)

    @torch.no_grad()
    def replay(
        self, part: MicroBatch, draws: Draws, weights: dict[str, torch.Tensor] | None = None, half: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and margins of completion tokens with these weights, or with its own; in float32 unless `half`, or
        there are only bf16 weights. A margin is how far, in nats, the token is from being the best under its noise; 0
        for the token that these weights and this arithmetic draw."""
        return self._pass(part, half or self.module.weights_in_half, weights, draws)

    @torch.no_grad()
    def settle(self, config: TrainerConfig, device: torch.device) -> tuple[TrainerConfig, tuple[str, ...]]:
        """Test on a few tokens which ways to compute a step work with this model. Return the configuration with
        `packing` and `shares_beyond` set, and lines for people. Every rank calls it. UserError if the user asked for
        packed rows and the model lets them see one another."""
        rows = _probe_rows(self.module.model.config.get_text_config().vocab_size)
        apart = self._all(rows, TrainerConfig(), device)
        if self.module.in_chunks:
            self.module.in_chunks = False
            whole = self._all(rows, TrainerConfig(), device)
            self.module.in_chunks = self._are_equal(apart, whole)
            apart = whole
        if config.packing is not False and is_half(self._precision, device.type):
            self._take_flash(rows, apart, device)
        # Other kernels need a mask of all pairs of tokens in a line, and compute all of them.
        packing = config.packing if config.packing is not None else self.is_flash
        if packing and not self._keeps_apart(rows, apart, device):
            if config.packing:
                raise UserError("this model does not keep packed rows apart: leave packing out, then rows are padded")
            packing = False
        is_alone = packing or config.packing is False
        shares_beyond = 0 if is_alone else self._shares_beyond(rows, apart, device)
        settled = config.model_copy(update={"packing": packing, "shares_beyond": shares_beyond})
        return settled, () if self.module.in_chunks else (WHOLE_LOGITS,)

    @property
    def is_flash(self) -> bool:
        """Whether the attention kernel separates packed rows by itself, as flash attention does."""
        return "flash" in (self.module.model.config._attn_implementation or "")

    def _take_flash(self, rows: list[Row], apart: torch.Tensor, device: torch.device) -> None:
        """Change to flash attention if it is installed and gives packed rows the log-probs `apart`. Not every model
        supports it, and it does not support every width of heads."""
        kernel, model = flash_kernel(device), self.module.model
        before = model.config._attn_implementation
        if kernel is None or self.is_flash:
            return
        with suppress(ValueError, ImportError, RuntimeError):
            model.set_attn_implementation(kernel)
            if self._keeps_apart(rows, apart, device):
                return
        model.set_attn_implementation(before)

    def _shares_beyond(self, rows: list[Row], apart: torch.Tensor, device: torch.device) -> int:
        """TrainerConfig.shares_beyond, if rows that share a prompt have the same log-probs `apart` as alone; else 0."""
        model = self.module.model
        beyond: int = MASKED_ATTENTION * (stated(model.config.get_text_config(), "hidden_size") or 0)
        if not self.is_flash and has_full_attention(model):
            with suppress(ValueError, RuntimeError, TypeError):
                if self._are_equal(apart, self._all(rows, TrainerConfig(shares_beyond=beyond), device)):
                    return beyond
        return 0

    def _keeps_apart(self, rows: list[Row], apart: torch.Tensor, device: torch.device) -> bool:
        packed = self._all(rows, TrainerConfig(packing=True), device, half=self.is_flash)
        return self._are_equal(apart, packed, half=self.is_flash)

    def _are_equal(self, some: torch.Tensor, others: torch.Tensor, *, half: bool = False) -> bool:
        half = half or self.module.weights_in_half
        return float((some - others).abs().max()) <= PROBE_ERROR[torch.bfloat16 if half else torch.float32]

    def _all(self, rows: list[Row], config: TrainerConfig, device: torch.device, *, half: bool = False) -> torch.Tensor:
        """Log-probs of all rows, [tokens], in their order; in float32 unless `half`, or there are only bf16 weights."""
        (part,) = micro_batches(rows, config, device)
        found = part.by_row(self._pass(part, half or self.module.weights_in_half)[0])
        return torch.cat([found[number] for number in range(len(rows))])


class _InChunks(torch.autograd.Function):
    """Log-probs of targets and entropies, [tokens], float32, for the logits linear(hidden, weight, bias) / temperature,
    or hidden / temperature without a weight. Only `size` rows of the log-softmax are in memory at a time. Computed in
    the dtype of `hidden`, to which the weight is cast once a pass; the weight's gradient is added up over chunks in
    float32. Entropies have a gradient if `entropy_pulls`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        size: int,
        temperature: float,
        entropy_pulls: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden: [tokens, width], weight: [vocabulary, width], bias: [vocabulary], targets: [tokens]."""
        weight, bias = (None if one is None else one.to(hidden.dtype) for one in (weight, bias))
        ctx.size, ctx.temperature = size, temperature
        logprobs, entropies = [], []
        for part, chosen in zip(hidden.split(size), targets.split(size), strict=True):
            # Free the one before, so that there are never two. The backward pass begins with the last one.
            ctx.last = None
            ctx.last = _log_softmax(part, weight, bias, temperature)
            logprobs.append(ctx.last.gather(1, chosen[:, None]).squeeze(1))
            entropies.append(_entropy(ctx.last))
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        if not entropy_pulls:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        pull, of_entropy = gradients
        if pull is None and of_entropy is None:
            return (None,) * 7
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        _, learns_weight, learns_bias, *_ = ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if learns_weight else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if learns_bias else None
        for at in range(0, len(hidden), ctx.size)[::-1]:
            rows = slice(at, at + ctx.size)
            found = _log_softmax(hidden[rows], weight, bias, ctx.temperature) if ctx.last is None else ctx.last
            ctx.last = None
            of_chosen, of_spread = (None if one is None else one[rows] / ctx.temperature for one in (pull, of_entropy))
            of_logits = _pulled(found, targets[rows], of_chosen, of_spread, entropy[rows]).to(hidden.dtype)
            if weight is None:
                of_hidden[rows] = of_logits
            else:
                torch.mm(of_logits, weight, out=of_hidden[rows])
            if of_weight is not None:
                _add_product(of_weight, of_logits.t(), hidden[rows])
            if of_bias is not None:
                of_bias += of_logits.sum(0, dtype=torch.float32)
            del found, of_logits
        return of_hidden, of_weight, of_bias, None, None, None, None


def _log_softmax(
    hidden: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    """The log-softmax of a few tokens' logits, [tokens, vocabulary], float32."""
    logits = hidden if weight is None else linear(hidden, weight, bias)
    if temperature != 1:
        logits = logits.float() / temperature
    return torch.log_softmax(logits, -1, dtype=torch.float32)


@torch.no_grad()
def _entropy(log_softmax: torch.Tensor) -> torch.Tensor:
    """The entropies, [tokens]. In place, to avoid a third tensor of this size, which vecdot would make."""
    return -log_softmax.exp().mul_(log_softmax).sum(-1)


def _pulled(
    log_softmax: torch.Tensor,
    targets: torch.Tensor,
    pull: torch.Tensor | None,
    of_entropy: torch.Tensor | None,
    entropy: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient of log_softmax[target] times `pull` plus that of the entropy times `of_entropy`, written over
    `log_softmax`."""
    if of_entropy is None or entropy is None:
        assert pull is not None
        found = log_softmax.exp_().mul_(-pull[:, None])
        return found.scatter_add_(1, targets[:, None], pull[:, None])
    pull = torch.zeros_like(of_entropy) if pull is None else pull
    slopes = (log_softmax + entropy[:, None]).mul_(-of_entropy[:, None]).sub_(pull[:, None])
    return log_softmax.exp_().mul_(slopes).scatter_add_(1, targets[:, None], pull[:, None])


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, in float32, without rounding the product first."""
    if total.is_cuda and left.dtype != total.dtype and torch.cuda.get_device_capability(total.device) >= (8, 0):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())


def arrange(model: Any, config: TrainerConfig) -> None:
    """Set up `model` as `config` says, without renaming weights. UserError if the model does not support it."""
    if config.activation_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise UserError(f"{type(model).__name__} has no activation checkpointing: leave the option out")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def flash_kernel(device: torch.device) -> str | None:
    """transformers' name of flash attention, if it is installed and works on this device, from Ampere on."""
    is_there = device.type == "cuda" and is_flash_attn_2_available()
    return "flash_attention_2" if is_there and torch.cuda.get_device_capability(device) >= (8, 0) else None


def is_half(precision: str, device: str) -> bool:
    """Whether passes are computed in bf16, from float32 weights. For a large model on a CPU, `auto` was replaced
    before."""
    return precision == "bfloat16" or (precision == "auto" and device == "cuda")


def layers_of(model: Any) -> torch.nn.ModuleList:
    """The layers that a decoder repeats: its longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len, default=torch.nn.ModuleList())


def _is_norm(module: torch.nn.Module) -> bool:
    shapes = {parameter.dim() for parameter in module.parameters(recurse=False)}
    return shapes == {1} and not any(module.children())


def _in_half(module: torch.nn.Module, given: Any, found: Any) -> Any:
    """Cast the output of an embedding or a norm to autocast's type. Autocast alone would leave it, and so the residual
    stream, in float32; with FSDP, and at samplers with bf16 weights, all of it is bf16."""
    if not isinstance(found, torch.Tensor) or not torch.is_autocast_enabled(found.device.type):
        return found
    return found.to(torch.get_autocast_dtype(found.device.type))


def _without_dropout(model: Any) -> None:
    """Switch off dropout and the noise on the routers of some mixtures of experts. Rollouts were sampled without them,
    so with them the log-probs would be another policy's. A model keeps the rate in a Dropout module or in an
    attribute."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)


def _probe_rows(vocab_size: int) -> list[Row]:
    """A few rows with the same prompt, drawn from the whole vocabulary; the same for every rank and run."""
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(vocab_size, (3,), generator=draw)
    return [
        Row(
            token_ids=torch.cat([prompt, torch.randint(vocab_size, (tokens,), generator=draw)]),
            prompt_tokens=len(prompt),
            behaviour=torch.zeros(tokens),
        )
        for tokens in PROBE_TOKENS
    ]
