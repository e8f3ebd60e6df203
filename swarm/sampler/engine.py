"""What an engine is: the calls that a worker makes, whichever library answers them.

Failures of single samples are values (`Sampled.fault`); only a broken engine raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from swarm.broadcast.manifest import Layout
from swarm.types import Finish, SamplingRules, Span, VersionId


class Start(msgspec.Struct, frozen=True, tag=True):
    """Build the model that `directory` configures and `layout` describes; no weights yet.

    `rehearse_tokens_per_s` above 0: an engine without a model takes as long as one in which each sample grows so fast,
    faster or slower by up to the share `rehearse_noise` from one batch to the next.
    """

    directory: str
    layout: Layout
    device: str
    rehearse_tokens_per_s: float = 0.0
    rehearse_noise: float = 0.0


class Started(msgspec.Struct, frozen=True):
    """What runs where. `device_name` is the maker's, if there is one."""

    engine: str
    device: str
    dtype: str
    device_name: str = ""


class Install(msgspec.Struct, frozen=True, tag=True):
    """Take the weights at `path` (layout order, memory-mapped) as `version`.

    `tensor_sums` are the chunk table's: the engine checks what it holds afterwards against them.
    """

    version: VersionId
    path: str
    tensor_sums: tuple[int, ...]


class Installed(msgspec.Struct, frozen=True):
    """The engine holds exactly the version that was asked for."""

    seconds: float


class Job(msgspec.Struct, frozen=True):
    """One sample to draw."""

    prompt_token_ids: tuple[int, ...]
    seed: int
    rules: SamplingRules
    time_limit_s: float


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Draw these samples with the installed version."""

    jobs: tuple[Job, ...]


class Sampled(msgspec.Struct, frozen=True):
    """One completion: int32 ids and float32 behaviour log-probs, little-endian; `fault` says why there is none."""

    token_ids: bytes
    logprobs: bytes
    spans: tuple[Span, ...]
    finish: Finish
    fault: str = ""


class Generated(msgspec.Struct, frozen=True):
    """Answers in the order of the jobs. `steps` tokens were drawn one after another in these seconds: those of the
    longest sample, whether it was finished or not, or of several where not all were drawn side by side."""

    samples: tuple[Sampled, ...]
    seconds: float
    steps: int


Command = Start | Install | Generate


class Engine(Protocol):
    """A model that generates. One call at a time; `progress` is called while a call goes on."""

    def start(self, command: Start) -> Started: ...

    def install(self, command: Install, progress: Callable[[], None]) -> Installed: ...

    def generate(self, command: Generate, progress: Callable[[], None]) -> Generated: ...
