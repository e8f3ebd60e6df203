"""What an engine should answer to a probe: its log-probs, recomputed from the weights in the file.

Sums over an engine's parameters show which numbers it holds, but neither their order nor numbers that it keeps in
another form. So the log-probs of a fixed sequence are compared with those that transformers computes in float32 from
the memory-mapped file, one layer at a time.

In float32 the two agree to about 1e-5. A difference of 1e-4 may be a tensor that was not taken or a permutation, but
changes in the last bits of a few numbers stay below it. In 16 bits the engine's own rounding moves a log-prob by about
2**-8 of the logits, so the mean over the sequence is compared. It reveals weights of another run, stale embeddings and
mixed-up layers, but not a version that is one step too old. The sums reveal that, if the engine keeps its parameters as
they came.

An engine that rounds its matrices is compared with what they stand for. If it rounds their inputs too, so does the
reference; yet a number that lies between two steps may fall to either side, by the last bits of what came before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch

from swarm.broadcast.version.manifest import Layout, stream_name
from swarm.sampler.room import is_rounded
from swarm.sampler.vllm.rounding import ROUNDS_INPUTS, computed_with, rounded_inputs
from swarm.sampler.weights import build_model, mapped_tensors
from swarm.types import Rounding

PROBE_TOKENS = 32  # Enough for every layer to mix positions; a prefill of one block
FLOAT32_ERROR = 1e-4
BFLOAT16_ERROR = 0.02
FLOAT32_SHARE = 2.0**-20
INPUTS_ERROR = 0.2  # Where inputs are rounded too: in a small model one step of one number weighs much
INPUTS_SHARE = 2.0**-6
BFLOAT16_SHARE = 2.0**-7  # Of a position's largest logit: what rounding may add if logits are large
THREADS = 2  # The reference is computed while the engine draws, which needs the other cores more


def probe_tokens(vocabulary: int, limit: int) -> tuple[int, ...]:
    """Return the fixed sequence for a model of `vocabulary` tokens that takes sequences of at most `limit` tokens."""
    return tuple(Random(0).choices(range(vocabulary), k=min(PROBE_TOKENS, limit)))


class Expected:
    """The reference's `logprobs` of all tokens but the first, and the largest logit in magnitude at each position.
    `coarse`: the engine rounds what its matrices are multiplied with."""

    def __init__(self, logprobs: list[float], largest: list[float], *, coarse: bool = False) -> None:
        self._coarse = coarse
        self.logprobs = logprobs
        self._largest = largest

    def difference(self, held: list[float], dtype: str) -> str | None:
        """Return why an engine of `dtype` ("float32" or a 16-bit one) that computes `held` has other weights, or None
        if the probe shows no difference."""
        if len(held) != len(self.logprobs):
            return f"{len(held)} log-probs instead of {len(self.logprobs)}"
        errors = [abs(one - other) for one, other in zip(held, self.logprobs, strict=True)]
        # Compared so that a NaN fails, and summed, because the maximum of several values may hide a NaN.
        mean = sum(errors) / len(errors)
        if self._coarse:
            bound = max(INPUTS_ERROR, INPUTS_SHARE * sum(self._largest) / len(self._largest))
            fits = mean <= bound
        elif dtype == "float32":
            bound = max(FLOAT32_ERROR, FLOAT32_SHARE * max(self._largest))
            fits = mean <= bound and max(errors) <= bound
        else:
            bound = max(BFLOAT16_ERROR, BFLOAT16_SHARE * sum(self._largest) / len(self._largest))
            fits = mean <= bound
        if fits:
            return None
        return (
            f"the probe's log-probs are off by {mean:.2g} in the mean and {max(errors):.2g} at most, over {bound:.2g}"
        )


class Reference:
    """The model of `directory` without weights, as `build_model` makes it. Matrices are rounded to `precision` as vLLM
    does it (vllm/rounding.py)."""

    def __init__(self, directory: str, layout: Layout, precision: Rounding = "none") -> None:
        with _shapes_alone():
            model = build_model(directory, layout, torch.float32)
        self.config: Any = model.config
        self._layout = layout
        self._model = model.eval()
        self._weights: dict[str, torch.Tensor] = {}
        self._precision: Rounding = precision
        self._rounded = rounded = {spec.name for spec in layout.tensors if precision != "none" and is_rounded(spec)}
        for path, module in model.named_modules():
            if module._parameters or _persistent(module):
                module.register_forward_pre_hook(self._filler(path))
                module.register_forward_hook(lambda module, *_: self._empty(module))
            if f"{path}.weight" in rounded:
                module.register_forward_pre_hook(self._round_inputs)

    @torch.no_grad()
    def expect(self, path: str, token_ids: tuple[int, ...]) -> Expected:
        """Return the log-probs of `token_ids` with the weights in the file at `path`. Blocking."""
        torch.set_num_threads(THREADS)
        self._weights = {
            name: tensor for spec, tensor in mapped_tensors(path, self._layout) for name in (spec.name, *spec.aliases)
        }
        try:
            logits = self._model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, :-1]
        finally:
            self._weights = {}
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[1:, None]).squeeze(1)
        coarse = self._precision in ROUNDS_INPUTS
        return Expected(chosen.tolist(), logits.abs().amax(-1).tolist(), coarse=coarse)

    def _filler(self, path: str) -> Any:
        def fill(module: torch.nn.Module, _: Any) -> None:
            # Some modules use their children's weights without calling them.
            for below, one in module.named_modules(prefix=path):
                for name in [*one._parameters, *_persistent(one)]:
                    full = stream_name(f"{below}.{name}" if below else name)
                    if full not in self._weights:
                        continue
                    source = self._weights[full]
                    source = computed_with(source, self._precision) if full in self._rounded else source
                    if name in one._parameters:
                        one._parameters[name] = torch.nn.Parameter(source.float(), requires_grad=False)
                    else:
                        one._buffers[name] = source.clone()

        return fill

    def _round_inputs(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return rounded_inputs(inputs[0], self._precision), *inputs[1:]

    def _empty(self, module: torch.nn.Module) -> None:
        for one in module.modules():
            for name, parameter in one._parameters.items():
                if parameter is not None:
                    one._parameters[name] = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)


@contextmanager
def _shapes_alone() -> Iterator[None]:
    """Have new modules keep no parameters, which in float32 may not fit beside an engine, but their buffers."""
    register = torch.nn.Module.register_parameter

    def without(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        register(
            module, name, None if parameter is None else torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        )

    torch.nn.Module.register_parameter = without  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def _persistent(module: torch.nn.Module) -> list[str]:
    return [name for name in module._buffers if name not in module._non_persistent_buffers_set]
