"""What an engine is: the calls that a worker makes, whichever library answers them.

Failures are values: `Sampled.fault` for a sample, `NotInstalled` for an install. An engine that raises is broken and is
restarted.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec

from swarm.broadcast.version.manifest import Layout
from swarm.types import Finish, Rounding, SamplingRules, Span, VersionId

Proof = Literal["sums", "some sums", "changed words", "sums and probe", "probe", "rounding", "bits", "bits and probe"]
"""How it was shown what an engine holds: by the chunk table's sums over its own parameters, or over those that changed
since a version that was proven, or by the log-probs of a probe if it keeps its weights in another form; if it rounds
them, by rounding the proven file once more; of an adapter, by comparing all bits with the proven file."""

EngineKind = Literal["transformers", "vllm", "mlx"]
EngineDtype = Literal["auto", "float32", "bfloat16", "float16"]


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine's owner asks of its engine; `arguments` are the library's own, by its names.

    A sample with its prompt has at most `sample_tokens`, as the run says; 0 is not known. At most `places` samples are
    drawn side by side (None: as many as fit). An engine that is busy and draws no token for `hang_s` is broken.
    """

    device: str = "auto"
    dtype: EngineDtype = "auto"
    precision: Rounding = "none"
    tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    gpu_memory_share: float = 0.85
    max_model_len: int | None = None
    sample_tokens: int = 0
    arguments: dict[str, Any] = {}
    places: int | None = None
    hang_s: float = 120.0


class Reckon(msgspec.Struct, frozen=True, tag=True):
    """Say whether the model that `layout` describes would fit here, in an engine of this kind."""

    kind: EngineKind
    layout: Layout
    options: EngineOptions


class Reckoned(msgspec.Struct, frozen=True):
    """How many samples fit side by side, in which dtype, a line for the machine's owner, and the tokens that a sample
    may have with its prompt (0: no known limit)."""

    places: int
    dtype: str
    said: str
    context_tokens: int = 0


class Start(msgspec.Struct, frozen=True, tag=True):
    """Build the model that `directory` configures and `layout` describes, without weights."""

    directory: str
    layout: Layout
    options: EngineOptions


class Started(msgspec.Struct, frozen=True):
    """What runs where. `device_name` is the maker's name, if there is one.

    `places` samples fit side by side, each of up to `context_tokens` with its prompt (0: no known limit). Its matrices
    are rounded to `precision`. A `lockstep` engine starts and ends them together, answers one `Generate` at a time, and
    installs between two; another engine starts each sample on its own and installs beneath running ones. `exposed` says
    what its process could do to this machine, for want of a sandbox.
    """

    engine: str
    device: str
    dtype: str
    device_name: str = ""
    places: int = 1
    context_tokens: int = 0
    lockstep: bool = True
    exposed: str = ""
    precision: Rounding = "none"

    @property
    def engine_class(self) -> str:
        """Engine, number format and kind of device, which say how exactly its draws can be replayed."""
        held_as = self.dtype if self.precision == "none" else self.precision
        return f"{self.engine}/{held_as}/{self.device.partition(':')[0]}"

    @property
    def device_class(self) -> str:
        """The maker's name of a GPU, else the engine; and the precision, if it rounds weights."""
        name = (self.device_name if self.device != "cpu" else "") or self.engine
        return name if self.precision == "none" else f"{name} {self.precision}"


class Install(msgspec.Struct, frozen=True, tag=True):
    """Take the weights at `path` (layout order, memory-mapped) as `version`. Unless they are `proven`, the file is
    checked against the chunk table's `tensor_sums` before the engine sees it; afterwards the engine's weights are in
    any case. The file does not change until the answer. If `changed` is given, it says which words differ from version
    `since` (broadcast/store/changes.py): an engine that holds that may take these alone."""

    version: VersionId
    path: str
    tensor_sums: tuple[int, ...]
    proven: bool = False
    since: VersionId | None = None
    changed: str = ""


class Installed(msgspec.Struct, frozen=True, tag=True):
    """The engine holds exactly the requested version, as `proof` shows.

    `seconds` is the whole call without the wait for a running batch; during `pause_s` of it no sample was drawn.
    """

    seconds: float
    pause_s: float = 0.0
    proof: Proof = "sums"


class NotInstalled(msgspec.Struct, frozen=True, tag=True):
    """Why the engine does not hold the version. `fault` "file": the file differs from what was signed, and the engine
    keeps its old weights. "engine": the engine's present weights could not be proven, and it must be restarted."""

    fault: Literal["file", "engine"]
    why: str


class Job(msgspec.Struct, frozen=True):
    prompt_token_ids: tuple[int, ...]
    seed: int
    rules: SamplingRules
    time_limit_s: float


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Draw these samples with the installed version."""

    jobs: tuple[Job, ...]


class Sampled(msgspec.Struct, frozen=True):
    """One completion: int32 ids and float32 behaviour log-probs, little-endian; `fault` says why there is none. `spans`
    name the version of each token, in order and without gaps. Of one that was given up, or ran out of time, there is as
    much as was drawn, "handed"."""

    token_ids: bytes
    logprobs: bytes
    spans: tuple[Span, ...]
    finish: Finish
    fault: str = ""


def drawn(token_ids: Sequence[int], logprobs: Sequence[float], spans: tuple[Span, ...], finish: Finish) -> Sampled:
    ids, floats = array("i", token_ids).tobytes(), array("f", logprobs).tobytes()
    return Sampled(token_ids=ids, logprobs=floats, spans=spans, finish=finish)


def failed(fault: str) -> Sampled:
    return Sampled(token_ids=b"", logprobs=b"", spans=(), finish="failed", fault=fault)


class Generated(msgspec.Struct, frozen=True):
    """Answers in the order of the jobs. `steps` is the length of the longest sample, finished or not, drawn in
    `seconds`; if not all were drawn side by side, it is summed over the batches."""

    samples: tuple[Sampled, ...]
    seconds: float
    steps: int


TIME_LIMIT = "time limit"  # Why a sample failed
ASSUMED_SAMPLE_TOKENS = 4096
"""Prompt and completion of a sample without a limit: contexts of 40,000 tokens and more are seldom used, and an engine
that reserved them would draw one sample at a time."""


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """End all samples under way with the tokens that they have, as "handed". The engine draws no more after that. It is
    its own answer."""


Command = Reckon | Start | Install | Generate | GiveUp
Told = Callable[[], None]  # Called whenever work goes on


class Engine(Protocol):
    """A model that generates, in its own process. `progress` is called while a call goes on."""

    async def start(self, command: Start, progress: Told) -> Started: ...

    async def install(self, command: Install, progress: Told) -> Installed | NotInstalled: ...

    async def generate(self, command: Generate, progress: Told) -> Generated: ...

    def give_up(self) -> None: ...
