"""Everything a user may set, as pydantic models, and how settings are read from a TOML file and from flags.

Every field is a key of the file. A field with a `Flag` is also a command-line option (cli/options.py), and RESUMED
says that it may be changed. So a new setting is one line here. An error in a file names the file, the key and the line.
"""

from __future__ import annotations

import os
import re
import tomllib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from swarm.errors import UserError
from swarm.types import (
    MAX_TURNS,
    BasePrecision,
    Freshness,
    Normalisation,
    ObjectiveName,
    OptimizerStates,
    Rounding,
    Schedule,
)

if TYPE_CHECKING:
    from swarm.sampler.engine import EngineKind, EngineOptions

DEFAULT_PORT = 7700

TINY, TINY_WARM = "tiny", "tiny-warm"
EMBEDDED = {TINY: 1e-3, TINY_WARM: 3e-4}
"""Models that are built in place instead of loaded, with a suitable learning rate for each"""

TASKS = (
    "--task jsonl:FILE (your own questions and answers), --task hf:DATASET (those of the Hugging Face hub), --task "
    "gym:leg_counting (questions without end)"
)
"""Examples for who named a model and no task"""

SECTIONS = "What most people set", "Swarm", "Learning", "Engine", "Limits", "Memory and disk", "Money"  # As in --help
MOST, SWARM, LEARNING, ENGINE, LIMITS, MEMORY, MONEY = SECTIONS


@dataclass(frozen=True, slots=True)
class Flag:
    """Makes a setting a command-line option. `default` describes the default if the field's own value does not."""

    section: str
    help: str
    default: str = ""


RESUMED = object()
"""Marks a setting that may be changed when the run is resumed. One without this mark is fixed: recorded batches depend
on it, and training on them with another value would be another run. lead/dials.py has what changes while it runs."""


def _as_weights(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return value
    return {name: weight if equals else 1.0 for name, equals, weight in (str(one).partition("=") for one in value)}


Whole = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Tokens = Annotated[int, Field(ge=1, le=131_072)]  # Tokens of a prompt or a completion
Bound = Annotated[int, Field(ge=0, le=1024)]  # Largest staleness in learner steps: older rollouts teach nothing
Threads = Annotated[int, Field(ge=1, le=256)]
Nickname = Annotated[str, Field(max_length=32)]
LogFormat = Literal["text", "json"]
LOG_FORMAT = "json: each line that the node says is one object."
NICKNAME = "What others see beside this node's id."
CODING_THREADS = "Threads that encode and decode weights."
Mbit = Annotated[float, Field(gt=0, le=1e6)]  # Line rate in Mbit/s; None is no cap
Price = Annotated[float, Field(ge=0, le=1e6)]  # Per hour or per 1e9 bytes, in the swarm's one currency; 0 is free


def dashboard_address(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT, such as 127.0.0.1:0 or [::1]:8080. Raise ValueError if it is none."""
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not (host and port.isascii() and port.isdigit() and int(port) < 65_536):
        raise ValueError("give HOST:PORT, such as 127.0.0.1:0, or off")
    return host, int(port)


def _check_page(given: Any) -> str:
    # Once public_page was true or false: a run of then goes on without, or is told what to give.
    if (text := str(given or "off")) != "off":
        dashboard_address(text)
    return text


PageAddress = Annotated[str, BeforeValidator(_check_page)]
Option = bool | int | float | str

Rewards = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[float, Field(ge=-1e6, le=1e6)]],
    BeforeValidator(_as_weights),
    Field(max_length=16),
]  # Weights of rewards by name. A flag gives them as NAME=WEIGHT, or as NAME for a weight of 1.

Bootstrap = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value), Field(max_length=32)
]  # First members to contact: host, host:port, URL or join line. A single one may be written without brackets.


class LeadConfig(BaseModel):
    """One run of a learner."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    model: Annotated[str, Flag(MOST, "Directory, Hugging Face id, tiny or tiny-warm.")] = TINY
    task: Annotated[str, Flag(MOST, "What to learn; `echo-node tasks` lists it.", "copy for an embedded model")] = (
        "copy"
    )
    reward: Annotated[Literal["task", "random"], Flag(LEARNING, "random is a control that must not learn.")] = "task"
    host: Annotated[str, Flag(SWARM, "Address to listen on; 127.0.0.1 keeps others out."), RESUMED] = "0.0.0.0"
    port: Annotated[int, Field(ge=0, le=65_535), Flag(MOST, "0 takes any free one."), RESUMED] = DEFAULT_PORT
    advertise: Annotated[str | None, Flag(SWARM, "host[:port] that others dial.", "--host"), RESUMED] = None
    tls: Annotated[bool | None, Flag(SWARM, "Encrypt.", "unless on loopback"), RESUMED] = None
    lan: Annotated[bool | None, Flag(SWARM, "Allow private addresses.", "only on one machine"), RESUMED] = None
    bootstrap: Annotated[Bootstrap, Flag(SWARM, "A member of a swarm that exists already."), RESUMED] = ()
    round_s: Annotated[float, Field(ge=0.05, le=60)] = 2.0
    nickname: Annotated[Nickname, Flag(SWARM, NICKNAME), RESUMED] = ""
    max_upload: Annotated[Mbit | None, Flag(SWARM, "Most upload that weights may use, in Mbit/s."), RESUMED] = None
    max_download: Annotated[Mbit | None, Flag(SWARM, "Most download that weights may use, in Mbit/s."), RESUMED] = None
    coding_threads: Annotated[Threads | None, Flag(SWARM, CODING_THREADS, "what the cores can spare"), RESUMED] = None
    dashboard: Annotated[
        PageAddress,
        Flag(SWARM, "HOST:PORT of the live page, or off. Port 0 takes any free one; other hosts need the token."),
        RESUMED,
    ] = "127.0.0.1:0"
    public_page: Annotated[
        PageAddress, Flag(SWARM, "HOST:PORT of a page for volunteers, plain HTTP, or off."), RESUMED
    ] = "off"
    run_dir: Annotated[Path | None, Flag(MOST, "Where the run is kept.", "runs/TASK-DATE-TIME"), RESUMED] = None
    state_dir: Annotated[
        Path | None,
        Flag(SWARM, "Holds the swarm's key; keep it to lead the same swarm in another run.", "in the run directory"),
        RESUMED,
    ] = None
    seed: Annotated[int, Field(ge=0, lt=2**63), Flag(MOST, "Seed of prompts, samples and batches.")] = 0
    device: Annotated[str, Flag(MEMORY, "auto, cpu, cuda, cuda:1, ..."), RESUMED] = "auto"
    max_staleness: Annotated[Bound, Flag(MOST, "S: 0 is on-policy, 1 and more overlap."), RESUMED] = 2
    freshness: Annotated[
        Freshness,
        Flag(LEARNING, "adaptive keeps rollouts as young as the fleet allows, off opens them as early as S allows."),
        RESUMED,
    ] = "adaptive"
    publish_every_steps: Annotated[Whole, Flag(LEARNING, "K, at most S + 1."), RESUMED] = 1
    hold_s: Annotated[
        float,
        Field(ge=0),
        Flag(LEARNING, "Longest wait for samples that would otherwise become stale; inf drops none."),
        RESUMED,
    ] = 0.0
    steps: Annotated[Whole, Flag(MOST, "Learner steps."), RESUMED] = 200
    target: Annotated[
        Share | None, Flag(MOST, "Stop once the last version reaches this held-out exact match."), RESUMED
    ] = None

    groups_per_step: Annotated[int, Field(ge=1, le=65_536), Flag(LEARNING, "Prompts in a learner step.")] = 32
    group_size: Annotated[int, Field(ge=2, le=1024), Flag(LEARNING, "Rollouts of each prompt.")] = 16
    temperature: Annotated[float, Field(gt=0, le=10), Flag(LEARNING, "Sampling temperature.")] = 1.0
    max_new_tokens: Annotated[Tokens | None, Flag(MOST, "Longest completion.", "the task's")] = None
    learning_rate: Annotated[
        float | None,
        Field(gt=0, le=1),
        Flag(MOST, "Peak of the learning rate.", "1e-6; tiny 1e-3, tiny-warm 3e-4; tenfold for an adapter"),
    ] = None
    adapter: Annotated[
        int | None, Field(ge=1, le=1024), Flag(LEARNING, "Rank: train an adapter (LoRA); the model is frozen.", "none")
    ] = None
    adapter_alpha: Annotated[float | None, Field(ge=1e-6, le=1e6)] = None
    adapter_targets: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=300)], ...], Field(max_length=64)
    ] = ()
    base_precision: Annotated[
        BasePrecision, Flag(LEARNING, "Of the model beside an adapter: bf16, or nf4 (4 bits, QLoRA).")
    ] = "bf16"
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    schedule: Annotated[
        Schedule,
        Flag(LEARNING, "How the learning rate changes over --steps, after its warm-up."),
    ] = "constant"
    learning_rate_floor: Annotated[float, Field(ge=0, le=1)] = 0.1
    minibatches: Annotated[int, Field(ge=1, le=64)] = 2
    objective: Annotated[ObjectiveName, Flag(LEARNING, "Explained in docs/learner.md.")] = "grpo"
    clip_low: Annotated[float | None, Field(gt=0, lt=1)] = None
    clip_high: Annotated[float | None, Field(gt=0, le=9)] = None
    ratio_cap: Annotated[float, Field(gt=1, le=100)] = 10.0
    loss_normalisation: Annotated[
        Normalisation | None, Flag(LEARNING, "What the loss is divided by.", "tokens; gspo rollouts")
    ] = None
    weight_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    advantage_normalisation: Literal["group", "none"] = "group"
    kl_weight: Annotated[float, Field(ge=0, le=10)] = 0.0
    entropy_weight: Annotated[float, Field(ge=0, le=1)] = 0.0
    dynamic_sampling: Annotated[bool, RESUMED] = False
    overlong: Literal["keep", "mask", "punish"] = "keep"
    overlong_margin: Tokens | None = None
    max_turns: Annotated[
        int | None, Field(ge=1, le=MAX_TURNS), Flag(LEARNING, "Most turns of an episode.", "the environment's")
    ] = None
    max_episode_tokens: Annotated[
        Tokens | None, Flag(LEARNING, "Most tokens of an episode after its prompt.", "the environment's")
    ] = None
    placement: Annotated[
        Literal["learner", "sampler"],
        Flag(LEARNING, "Where environments answer: sampler is for those of this package that hide nothing."),
        RESUMED,
    ] = "learner"
    credit: Annotated[
        Literal["episode", "turn"],
        Flag(LEARNING, "What a turn is judged by: its episode, or what follows it."),
    ] = "episode"
    turn_discount: Annotated[float, Field(ge=0, le=1)] = 1.0

    tokens_per_micro_batch: Annotated[
        int | None, Field(ge=16, le=1 << 24), Flag(MEMORY, "Most tokens in one forward pass.", "chosen"), RESUMED
    ] = None
    packing: bool | None = None
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    activation_checkpointing: bool | None = None
    optimizer_states: Annotated[OptimizerStates, RESUMED] = "float32"
    compile: bool = False
    trainer_ranks: Annotated[int, Field(ge=1, le=1024), Flag(MEMORY, "GPUs that share the training."), RESUMED] = 1
    trainer_machines: Annotated[int, Field(ge=1, le=1024), RESUMED] = 1
    trainer_meeting: Annotated[str | None, Field(pattern=r"^[^\s:]+:[0-9]{1,5}$"), RESUMED] = None
    audit_share: Annotated[
        float,
        Field(ge=0, le=1),
        Flag(LEARNING, "Share of rollouts that are drawn again to see who lies; newcomers' all. 0 believes everybody."),
        RESUMED,
    ] = 0.05
    accept_precisions: Annotated[tuple[Rounding, ...], Field(max_length=4), RESUMED] = ()
    alarm_mismatch_kl: Annotated[float, Field(gt=0, le=100), RESUMED] = 0.5
    alarm_entropy: Annotated[float, Field(ge=0, le=1), RESUMED] = 0.1
    alarm_gradient_spike: Annotated[float, Field(gt=1, le=1e9), RESUMED] = 10.0

    rewards: Annotated[
        Rewards, Flag(LEARNING, "NAME=WEIGHT, for questions with answers: exact, numeric, math, boxed.", "the task's")
    ] = {}
    task_options: Annotated[dict[str, Option | list[Option]], Field(max_length=64)] = {}
    lenient: Annotated[bool, Flag(LEARNING, "exact and math ignore case, final dots and 'The answer is'.")] = False
    system_prompt: Annotated[str | None, Field(max_length=65_536), Flag(LEARNING, "The system message of a chat.")] = (
        None
    )
    chat: Annotated[bool | None, Flag(LEARNING, "Give prompts as a chat.", "if the model has a template")] = None
    # Arguments of the model's chat template, such as enable_thinking of Qwen3.
    chat_arguments: Annotated[dict[str, bool | int | str], Field(max_length=64)] = {}
    stop: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(max_length=16)] = ()
    max_prompt_tokens: Tokens | None = None
    prompt_column: Annotated[str, Field(min_length=1, max_length=256)] = "prompt"
    answer_column: Annotated[str, Field(min_length=1, max_length=256)] = "answer"
    held_out_share: Annotated[float, Field(gt=0, le=0.5)] = 0.05
    reward_memory_mb: Annotated[int, Field(ge=256, le=1 << 20), RESUMED] = 4096
    reward_processes: Annotated[int | None, Field(ge=1, le=256), RESUMED] = None
    eval_samples: Annotated[int, Field(ge=1, le=1024), RESUMED] = 1
    eval_every_steps: Annotated[Whole, RESUMED] = 10
    eval_prompts: Annotated[int, Field(ge=1, le=10_000)] = 100
    checkpoint_every_steps: Annotated[Whole, Flag(MEMORY, "Steps between two checkpoints."), RESUMED] = 50
    keep_checkpoints: Annotated[
        int, Field(ge=1, le=1000), Flag(MEMORY, "Newest checkpoints that stay on disk."), RESUMED
    ] = 3
    keep_rollouts: Annotated[
        int | None, Field(ge=0), Flag(MEMORY, "Steps whose rollouts keep their tokens on disk.", "all"), RESUMED
    ] = None
    tensorboard: Annotated[bool, Flag(MEMORY, "Log for TensorBoard too."), RESUMED] = False
    log_format: Annotated[LogFormat, Flag(SWARM, LOG_FORMAT), RESUMED] = "text"
    beat_s: Annotated[float, Field(ge=0.2, le=60)] = 5.0
    lease_time_limit_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    reward_timeout_s: Annotated[float, Field(gt=0, le=3600), RESUMED] = 10.0
    trainer_hang_s: Annotated[float, Field(ge=10), RESUMED] = 600.0

    activate: Annotated[
        Literal["all", "cheapest"] | None,
        Flag(MONEY, "All samplers, or the cheapest that suffice.", "cheapest if there are prices"),
        RESUMED,
    ] = None
    idle_target: Annotated[float, Field(gt=0, lt=1), RESUMED] = 0.02
    budget_per_hour: Annotated[
        float | None, Field(gt=0, le=1e6), Flag(MONEY, "Most that the active samplers may cost per hour."), RESUMED
    ] = None
    max_cost: Annotated[
        float | None,
        Field(gt=0, le=1e12),
        Flag(MONEY, "End the run, with a checkpoint, once it has cost this much."),
        RESUMED,
    ] = None
    cost_per_hour: Annotated[Price, Flag(MONEY, "Price of this machine per hour."), RESUMED] = 0.0
    egress_cost_per_gb: Annotated[Price, Flag(MONEY, "Price of metered traffic, per 1e9 bytes."), RESUMED] = 0.0

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.publish_every_steps > self.max_staleness + 1:
            raise ValueError(
                f"--publish-every-steps {self.publish_every_steps} is above --max-staleness + 1, which is "
                f"{self.max_staleness + 1}: the learner would wait for ever for rollouts fresh enough; lower the one "
                "or raise the other"
            )
        if self.adapter is not None and (self.trainer_ranks > 1 or self.trainer_machines > 1):
            raise ValueError(
                "an adapter is trained by one rank: leave --trainer-ranks and trainer_machines out, or --adapter"
            )
        if self.adapter is None and (self.adapter_alpha is not None or self.adapter_targets):
            raise ValueError("adapter_alpha and adapter_targets are an adapter's: give its rank with --adapter")
        if self.adapter is None and self.base_precision != "bf16":
            raise ValueError("--base-precision is of the model beside an adapter: give a rank with --adapter")
        if self.trainer_machines > 1 and self.trainer_meeting is None:
            raise ValueError(
                "trainer_machines above 1 needs trainer_meeting, a host:port of this machine that the others reach"
            )
        if self.model not in EMBEDDED and "task" not in self.model_fields_set:
            raise ValueError(
                f"what is {self.model[-MAX_SHOWN:]} to learn? Say it with {TASKS}; `echo-node tasks` lists all kinds"
            )
        return self

    @property
    def resolved_reward_processes(self) -> int:
        """By default a quarter of the cores, at most 8: the trainer and the network need the rest."""
        return self.reward_processes or max(1, min(8, (os.cpu_count() or 1) // 4))

    @property
    def resolved_learning_rate(self) -> float:
        """By default the rate in EMBEDDED, or 1e-6, which is usual for post-training a real model; for an adapter ten
        times as much, as others found; docs/learner.md has a small model for which it is too much."""
        default = EMBEDDED.get(self.model, 1e-6)
        return self.learning_rate or (round(10 * default, 9) if self.adapter else default)

    @property
    def resolved_adapter_alpha(self) -> float:
        """By default twice the rank. What counts is alpha / rank, which scales the adapter: so it is the same at every
        rank."""
        return self.adapter_alpha or 2.0 * (self.adapter or 0)

    @property
    def resolved_clip(self) -> tuple[float, float]:
        """By default DAPO's, of single tokens, or GSPO's own, whose ratio is a mean over many and moves far less."""
        low, high = (3e-4, 4e-4) if self.objective == "gspo" else (0.2, 0.28)
        return self.clip_low or low, self.clip_high or high

    @property
    def resolved_normalisation(self) -> Normalisation:
        return self.loss_normalisation or ("rollouts" if self.objective == "gspo" else "tokens")


# Settings that may differ when a run is resumed
CHANGEABLE = frozenset(name for name, field in LeadConfig.model_fields.items() if RESUMED in field.metadata)


CLOCK_TIME = r"([01]?\d|2[0-3]):([0-5]\d)"


def read_hours(text: str) -> list[tuple[int, int]]:
    """Return ranges of the day such as "22:00-08:00, 12:00-13:30" in minutes since midnight; one may go over midnight.
    Raise ValueError for any other text."""
    ranges = []
    for part in text.split(",") if text.strip() else []:
        found = re.fullmatch(rf"{CLOCK_TIME}\s*-\s*{CLOCK_TIME}", part.strip())
        start, end = (60 * int(found[at]) + int(found[at + 1]) for at in (1, 3)) if found else (0, 0)
        if start == end:
            raise ValueError("hours are written as 22:00-08:00, several of them with commas between")
        ranges.append((start, end))
    return ranges


class Limits(BaseModel):
    """What the owner of a joining machine gives of it: all that may be changed while the node runs (join/owner.py)."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    max_upload: Annotated[Mbit | None, Flag(LIMITS, "Most upload that weights may use, in Mbit/s.")] = None
    max_download: Annotated[Mbit | None, Flag(LIMITS, "Most download that weights may use, in Mbit/s.")] = None
    max_disk: Annotated[
        float | None, Field(gt=0, le=1e6), Flag(LIMITS, "Most that the weights may take on the disk, in GB.")
    ] = None
    gpu_memory_share: Annotated[Share, Flag(LIMITS, "Share of each GPU's memory for vLLM or mlx.")] = 0.85
    threads: Annotated[
        Threads | None, Flag(LIMITS, "Threads of the engine, and of what codes weights.", "what the cores can spare")
    ] = None
    nice: Annotated[int, Field(ge=0, le=19), Flag(LIMITS, "How far it gives way to other programs.")] = 0
    hours: Annotated[
        str,
        Field(max_length=256),
        AfterValidator(lambda text: text if read_hours(text) else ""),
        Flag(LIMITS, "When to draw, by this machine's clock: 22:00-08:00,12:00-13:30.", "always"),
    ] = ""
    only_on_mains: Annotated[bool, Flag(LIMITS, "Draw nothing while on battery.")] = False
    only_when_idle: Annotated[bool, Flag(LIMITS, "Draw nothing while somebody uses the desktop.")] = False


class JoinConfig(Limits):
    """One sampler or relay. The defaults of `host`, `port`, `tls` and `lan` depend on where the bootstraps are."""

    role: Annotated[
        Literal["sampler", "relay"], Flag(MOST, "A relay keeps the swarm together and draws no samples.")
    ] = "sampler"
    bootstrap: Annotated[
        Bootstrap, Field(min_length=1), Flag(MOST, "Any member: host, host:port or a join line (echo1:...).")
    ]
    host: Annotated[str | None, Flag(SWARM, "Address to listen on.", "all, if a bootstrap is far")] = None
    port: Annotated[
        int | None, Field(ge=0, le=65_535), Flag(SWARM, "Port to listen on.", "any free one; for a relay 7700")
    ] = None
    tls: Annotated[bool | None, Flag(SWARM, "Encrypt.", "unless on loopback")] = None
    lan: Annotated[bool | None, Flag(SWARM, "Allow private addresses.", "only on one machine")] = None
    nickname: Annotated[Nickname, Flag(MOST, NICKNAME)] = ""
    log_format: Annotated[LogFormat, Flag(SWARM, LOG_FORMAT)] = "text"
    grace: Annotated[
        float, Field(ge=0, le=86_400), Flag(MOST, "Seconds that samples under way get to end when asked to stop.")
    ] = 10.0
    state_dir: Annotated[Path | None, Flag(SWARM, "Key and weights.", "under ~/.local/state")] = None
    base: Annotated[
        str | None,
        Field(min_length=1, max_length=4096),
        Flag(SWARM, "Directory or cached Hugging Face id of the base model; only what differs is fetched."),
    ] = None
    weights: Annotated[
        Literal["auto", "memory", "disk"], Flag(SWARM, "Where the weights are kept; each version wears a disk.")
    ] = "auto"
    device: Annotated[str, Flag(MOST, "auto, cpu, cuda, cuda:1, mps, ...")] = "auto"
    engine: Annotated[
        Literal["auto", "transformers", "vllm", "mlx"],
        Flag(MOST, "auto is vllm with a GPU, mlx on Apple silicon, if its package is there."),
    ] = "auto"
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Flag(ENGINE, "Type of the weights.")] = "auto"
    precision: Annotated[Rounding, Flag(ENGINE, "Round the matrices, to fit a smaller memory.")] = "none"
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64), Flag(ENGINE, "GPUs that share the model.")] = 1
    max_model_len: Annotated[
        int | None,
        Field(ge=16, le=16_777_216),
        Flag(ENGINE, "Most tokens of prompt and answer together.", "what the model takes"),
    ] = None
    engine_arguments: Annotated[dict[str, Any], Field(max_length=64)] = {}  # vLLM's own (`AsyncEngineArgs`)
    batch_samples: Annotated[
        int | None, Field(ge=1, le=4096), Flag(ENGINE, "Samples drawn at a time.", "as many as fit")
    ] = None
    engine_hang_s: Annotated[float, Field(ge=10)] = 120.0
    device_class: Annotated[
        str | None,
        Field(min_length=1, max_length=64),
        Flag(MONEY, "Kind of device, for prices and speeds.", "what the device says"),
    ] = None
    cost_per_hour: Annotated[Price, Flag(MONEY, "Price of this machine per hour.")] = 0.0
    down_cost_per_gb: Annotated[Price, Flag(MONEY, "Price of metered incoming traffic, per 1e9 bytes.")] = 0.0
    up_cost_per_gb: Annotated[Price, Flag(MONEY, "Price of metered outgoing traffic, per 1e9 bytes.")] = 0.0

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.engine_arguments and self.engine != "vllm":
            raise ValueError('engine_arguments are vLLM\'s: set engine = "vllm" with them, or leave them out')
        if odd := [name for name in self.engine_arguments if not name.isidentifier()]:
            raise ValueError(
                f"engine_arguments: {odd[0]!r} cannot be an argument of vLLM's; write block_size for --block-size"
            )
        if "tensor_parallel_size" in self.model_fields_set and self.engine not in ("auto", "vllm"):
            raise ValueError(
                f"--tensor-parallel-size is for vllm: leave it out, or take --engine vllm, not {self.engine}"
            )
        return self

    @property
    def engine_options(self) -> EngineOptions:
        from swarm.sampler.engine import EngineOptions

        named = {"arguments": "engine_arguments", "places": "batch_samples", "hang_s": "engine_hang_s"}
        asked = set(EngineOptions.__struct_fields__) - {"sample_tokens"}  # Which the run says
        return EngineOptions(**{name: getattr(self, named.get(name, name)) for name in asked})


class DemoConfig(BaseModel):
    """A demonstration on this machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    real: Annotated[bool, Flag(MOST, "Teach a real model sums; it is fetched once.")] = False
    samplers: Annotated[int, Field(ge=1, le=16), Flag(MOST, "Sampler processes.", "3; --real 1")] = 3
    steps: Annotated[Whole | None, Flag(MOST, "Learner steps at most.", "200, or the demo's own")] = None
    kill_one: Annotated[bool, Flag(MOST, "SIGKILL a sampler half-way.")] = False
    kill_learner: Annotated[
        int, Field(ge=0, le=100), Flag(MOST, "How many times to SIGKILL the learner at a random moment and resume it.")
    ] = 0
    kill_seed: Annotated[int | None, Flag(MOST, "Seed of those moments, to repeat a former demo.", "random")] = None
    environment: Annotated[
        Literal["frozen-lake"] | None,
        Flag(MOST, "Learn to act in it, turn by turn, instead of copying digits.", "none"),
    ] = None
    reward: Annotated[Literal["task", "random"], Flag(MOST, "random is a control, which must not learn.")] = "task"
    seed: Annotated[int, Field(ge=0, lt=2**63), Flag(MOST, "Of the model and of everything that is drawn.")] = 0
    max_staleness: Annotated[Bound | None, Flag(MOST, "The bound S.", "2, or the demo's own")] = None
    adapter: Annotated[
        int | None, Field(ge=1, le=1024), Flag(MOST, "Rank: train an adapter of tiny-warm instead of a model.", "none")
    ] = None
    engine: Annotated[
        Literal["transformers", "vllm", "mlx", "all"],
        Flag(MOST, "vllm or mlx has all samplers but the last draw with it; all has one with mlx too."),
    ] = "transformers"
    run_dir: Annotated[Path | None, Flag(MOST, "Where the run is kept.", "runs/demo-DATE-TIME")] = None
    open: Annotated[bool, Flag(MOST, "Open the run's page in a browser.")] = False

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.engine == "all" and self.samplers < 3:
            raise ValueError("--engine all needs a sampler for each of three engines: --samplers 3 or more")
        if self.real + (self.environment is not None) + (self.adapter is not None) > 1:
            raise ValueError("--real, --environment and --adapter are three demos: give one of them")
        return self

    @property
    def engines(self) -> list[EngineKind]:
        """Of the samplers, in the order of their start. The point is that several engines draw for one batch."""
        if self.engine == "all":
            ahead: list[EngineKind] = ["vllm"] * (self.samplers - 2)
            return [*ahead, "mlx", "transformers"]
        several: list[EngineKind] = [self.engine] * max(1, self.samplers - 1)
        return several if self.samplers == 1 else [*several, "transformers"]


MAX_FAULTS = 3  # Faults of a file that a message names; nobody would read more in one line
MAX_SHOWN = 60  # Characters of a value or a name that a message repeats
C = TypeVar("C", bound=BaseModel)
Place = tuple[str | int, ...]  # Path to a value: keys, and positions in lists


def load_config(
    kind: type[C], file: Path | None, flags: dict[str, Any], *, before: Mapping[str, Any] | None = None
) -> C:
    """Return a `kind` built from the settings `before`, the TOML `file` and the flags that are not None; later ones
    win. Raise a one-line UserError that names a setting by its flag, or by its key in the file if it came from there.
    """
    values = read_toml(file) if file else {}
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return kind(**{**(before or {}), **values, **given})
    except ValidationError as error:
        faults = error.errors()
        in_file = [fault for fault in faults if fault["loc"] and fault["loc"][0] in values.keys() - given.keys()]
        lines = [_explain_flag(kind, fault) for fault in faults if fault not in in_file]
        if file is not None and in_file:
            lines.insert(0, _explain_file(kind, file, values, in_file))
        raise UserError("; ".join(lines)) from error


def load_file(kind: type[C], file: Path) -> C:
    """Return a `kind` from a TOML file alone. Raise a one-line UserError that names the file, keys and lines."""
    values = read_toml(file)
    try:
        return kind(**values)
    except ValidationError as error:
        raise UserError(_explain_file(kind, file, values, error.errors())) from error


def read_toml(file: Path) -> dict[str, Any]:
    """Return the settings of a file, unchecked. Raise UserError if it cannot be read."""
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise UserError(f"cannot read the configuration {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid TOML: {error}") from error


def closest(name: str, known: Iterable[str]) -> str:
    """Return `: did you mean ...?`, or "" if no known name is similar."""
    near = get_close_matches(name, list(known), n=1)
    return f": did you mean {near[0]}?" if near else ""


def line_of(text: str, place: Place) -> int:
    """Return the line, from 1, of the statement in a valid TOML text that sets the value at `place`. If the value is
    missing, return the line of the table that it would be in, or 0 if that is missing too."""
    # The parser keeps no line numbers. A statement is complete when it parses on its own. It sets `place` if it is the
    # first one with which the text so far gives as much of `place` as the whole text does.
    lines, ends = text.split("\n"), [0]
    for end in range(1, len(lines) + 1):
        with suppress(tomllib.TOMLDecodeError):
            tomllib.loads("\n".join(lines[ends[-1] : end]))
            ends.append(end)

    def depth(count: int) -> int:
        """Return how many parts of `place` the first `count` statements set."""
        values: Any = tomllib.loads("\n".join(lines[: ends[count]]))
        for found, part in enumerate(place):
            try:
                values = values[part]
            except (KeyError, IndexError, TypeError):
                return found
        return len(place)

    whole = depth(len(ends) - 1)
    return ends[bisect_left(range(len(ends)), whole, key=depth) - 1] + 1 if whole else 0


# -- words -------------------------------------------------------------------------------------------------------------


def _explain_flag(kind: type[BaseModel], fault: Any) -> str:
    name = ".".join(str(part) for part in fault["loc"])
    flag = f"--{name.replace('_', '-')}"
    if fault["type"] == "extra_forbidden":
        return f"unknown setting {name!r}" + closest(name, kind.model_fields)
    if fault["type"] == "missing":
        return f"{flag} has to be given"
    message = _message(fault)
    return f"{flag} {_shown(fault['input'])}: {message[0].lower() + message[1:]}" if name else message


def _explain_file(kind: type[BaseModel], file: Path, values: dict[str, Any], faults: Sequence[Any]) -> str:
    text = file.read_text()
    places = {fault["loc"] for fault in faults}
    # pydantic also reports a list as empty if all its members are faulty.
    own = [
        fault for fault in faults if not any(fault["loc"] == place[: len(fault["loc"])] != place for place in places)
    ]
    found = sorted((line_of(text, fault["loc"]), _explain_key(kind, values, fault)) for fault in own)
    told = "; ".join(f"line {line}: {words}" if line else words for line, words in found[:MAX_FAULTS])
    more = f"; and {len(found) - MAX_FAULTS} more" if len(found) > MAX_FAULTS else ""
    return f"{file}{', ' if found[0][0] else ': '}{told}{more}"


def _explain_key(kind: type[BaseModel], values: dict[str, Any], fault: Any) -> str:
    """Describe the fault with its key, such as `fleet vast-4090: price_per_h`."""
    key = _key(values, fault["loc"])
    match fault["type"]:
        case "extra_forbidden":
            known = _known(kind, fault["loc"])
            return f"{key} is no key of this file" + (
                closest(str(fault["loc"][-1]), known) or f"; known: {', '.join(known)}"
            )
        case "missing":
            return f"{key} is missing"
    message, given = _message(fault), fault["input"]
    if isinstance(given, dict | list):
        return f"{key}: {message}" if key else message
    return f"{key} = {repr(given)[:MAX_SHOWN]}: {message[0].lower() + message[1:]}"


def _known(kind: Any, place: Place) -> list[str]:
    """Return the keys that are valid in place of the last part of `place`."""
    for part in place[:-1]:
        if isinstance(part, str) and kind is not None:
            kind = _model_in(kind.model_fields[part].annotation)
    return list(kind.model_fields) if kind is not None else []


def _model_in(annotation: Any) -> Any:
    """Return the model of a field or of its list's entries, or None for plain values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)


def _key(values: Any, loc: tuple[str | int, ...]) -> str:
    """Join keys with dots; entries of a list of tables are called by their names."""
    key, at = "", values
    for part in loc:
        if isinstance(at, dict):
            key, at = key + (" " if key.endswith(":") else "." if key else "") + str(part), at.get(part)
        elif isinstance(at, list) and isinstance(part, int):
            at = at[part]
            name = at.get("name") if isinstance(at, dict) else None
            key += f" {name[:MAX_SHOWN] if isinstance(name, str) and name.isprintable() else f'number {part + 1}'}:"
    return key.removesuffix(":")


def _message(fault: Any) -> str:
    return str(fault["msg"]).removeprefix("Value error, ")


def _shown(given: Any) -> Any:
    return given if isinstance(given, int | float) or str(given).isprintable() else repr(given)
