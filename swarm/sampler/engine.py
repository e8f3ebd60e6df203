"""What an engine is: the calls that a worker makes, whichever library answers them.

Failures are values: `Sampled.fault` of a sample, `NotInstalled` of an install. An engine that raises is broken and is
restarted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Protocol

import msgspec

from swarm.broadcast.version.manifest import Layout
from swarm.types import Finish, SamplingRules, Span, VersionId

Proof = Literal["sums", "sums and probe", "probe"]
"""How it was shown what an engine holds: by the chunk table's sums over its own parameters or, where it keeps its
weights in another form, by the log-probs of a probe."""

EngineKind = Literal["transformers", "vllm", "scripted"]  # The scripted one has no model: it is for rehearsals
EngineDtype = Literal["auto", "float32", "bfloat16", "float16"]


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner of the machine asks of its engine; `arguments` are the library's own, by its names.

    At most `places` samples are drawn side by side. An engine that is busy and draws no token for `hang_s` is broken.
    In an engine without a model each sample grows by `rehearse_tokens_per_s` (None: at once), varied by up to the share
    `rehearse_noise` from batch to batch.
    """

    device: str = "auto"
    dtype: EngineDtype = "auto"
    tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    gpu_memory_share: float = 0.85
    max_model_len: int | None = None
    arguments: dict[str, Any] = {}
    places: int = 1
    hang_s: float = 120.0
    rehearse_tokens_per_s: float | None = None
    rehearse_noise: float = 0.0


class Start(msgspec.Struct, frozen=True, tag=True):
    """Build the model that `directory` configures and `layout` describes; no weights yet."""

    directory: str
    layout: Layout
    options: EngineOptions


class Started(msgspec.Struct, frozen=True):
    """What runs where. `device_name` is the maker's, if there is one; `versions` those of the libraries.

    `places` samples fit side by side, of up to `context_tokens` with their prompts (0: nobody knows a limit), of a
    vocabulary of `vocab_size`. An engine in `lockstep` begins and ends them together, answers one `Generate` at a time
    and installs between two; others begin each sample by itself, and install beneath running ones.
    """

    engine: str
    device: str
    dtype: str
    device_name: str = ""
    versions: str = ""
    places: int = 1
    context_tokens: int = 0
    vocab_size: int = 1
    lockstep: bool = True


class Install(msgspec.Struct, frozen=True, tag=True):
    """Take the weights at `path` (layout order, memory-mapped) as `version`. The file is checked against `tensor_sums`,
    the chunk table's, before the engine sees it, and what the engine holds afterwards as well. The file does not change
    until the answer."""

    version: VersionId
    path: str
    tensor_sums: tuple[int, ...]


class Installed(msgspec.Struct, frozen=True, tag=True):
    """The engine holds exactly the version that was asked for, as `proof` shows.

    `seconds` are those of the whole call without the wait for a running batch; during `pause_s` of them no sample was
    drawn. `check_s` went into the file's sums, `reload_s` into the weights, `proof_s` into the proof.
    """

    seconds: float
    pause_s: float = 0.0
    check_s: float = 0.0
    reload_s: float = 0.0
    proof_s: float = 0.0
    proof: Proof = "sums"


class NotInstalled(msgspec.Struct, frozen=True, tag=True):
    """Why the engine does not hold the version. `fault` "file": the file is not what was signed, and the engine still
    holds what it held. "engine": the weights that it holds now could not be proven; it must be restarted."""

    fault: Literal["file", "engine"]
    why: str


class Job(msgspec.Struct, frozen=True):
    prompt_token_ids: tuple[int, ...]
    seed: int
    rules: SamplingRules
    time_limit_s: float


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Draw these samples with the installed version. `trial`: whatever it holds will do, for the speed alone."""

    jobs: tuple[Job, ...]
    trial: bool = False


class Sampled(msgspec.Struct, frozen=True):
    """One completion: int32 ids and float32 behaviour log-probs, little-endian; `fault` says why there is none.

    `spans` name the version of each token, in order and without gaps."""

    token_ids: bytes
    logprobs: bytes
    spans: tuple[Span, ...]
    finish: Finish
    fault: str = ""


class Generated(msgspec.Struct, frozen=True):
    """Answers in the order of the jobs. `steps` tokens were drawn one after another in `seconds`: those of the longest
    sample, finished or not; their sum over batches where not all were drawn side by side."""

    samples: tuple[Sampled, ...]
    seconds: float
    steps: int


ASSUMED_SAMPLE_TOKENS = 4096
"""Prompt and completion of a sample for which no limit was set: contexts of 40,000 tokens and more are seldom used, and
an engine that reserved them would draw one sample at a time."""

Command = Start | Install | Generate
Told = Callable[[], None]  # To be called whenever work goes on


class Engine(Protocol):
    """A model that generates, in a process of its own. `progress` is called while a call goes on."""

    async def start(self, command: Start, progress: Told) -> Started: ...

    async def install(self, command: Install, progress: Told) -> Installed | NotInstalled: ...

    async def generate(self, command: Generate, progress: Told) -> Generated: ...
