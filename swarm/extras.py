"""What a light installation leaves out, and the line that says how to have it. Imports none of it."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from swarm import SOURCE
from swarm.errors import UserError

DRAWS = ("torch", "transformers", "safetensors")
LIBRARIES = {
    "sampler": DRAWS,
    "learner": DRAWS,
    "adapter": ("peft",),
    "agents": ("openai",),
    "quantized": ("bitsandbytes",),
    "gguf": ("gguf",),
    "vllm": ("vllm",),
    "mlx": ("mlx", "mlx_lm"),
    "tasks": ("datasets", "math_verify", "reasoning_gym"),
    "gymnasium": ("gymnasium",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
}
"""Modules by the extra of pyproject.toml that brings them; a module in several is asked for by the first."""


INSTALLS = {"NVIDIA": "vllm", "Mac": "mlx", "anything else": "sampler"}
"""The extra that lets a machine draw well."""


def installs() -> dict[str, str]:
    """Return what to type on each kind of machine that has no checkout."""
    return {kind: f"pipx install 'echo-node[{extra}]@git+{SOURCE}'" for kind, extra in INSTALLS.items()}


def how_to_have(extra: str) -> str:
    """Return what to type. It names no package index."""
    return f"pip install '.[{extra}]' in a checkout, or 'FILE.whl[{extra}]' of a wheel"


def missing(extra: str) -> list[str]:
    """Return the modules of `extra` that are not installed."""
    return [name for name in LIBRARIES[extra] if find_spec(name) is None]


def require(extra: str, who: str) -> None:
    """Raise UserError if `who` cannot work, because a module of `extra` is missing."""
    if absent := missing(extra):
        raise _lacks(extra, who, absent)


def lacking(module: str | None) -> UserError | None:
    """Return what to say of a module whose import failed, or None if no extra brings it."""
    found = next((extra for extra, names in LIBRARIES.items() if module in names), None)
    return _lacks(found, "this command", [str(module)]) if found else None


def _lacks(extra: str, who: str, absent: Iterable[str]) -> UserError:
    return UserError(
        f"{who} needs the extra `{extra}`, and {', '.join(absent)} is not installed: {how_to_have(extra)}; "
        "a checkout's bin/setup --dev brings all of them"
    )
