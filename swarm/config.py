"""What a user may set: pydantic models, read from a TOML file and from flags. Unknown keys are refused."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from swarm.errors import UserError
from swarm.sampler.engine import EngineDtype, EngineOptions
from swarm.types import RewardFailure

DEFAULT_PORT = 7700

TINY, TINY_WARM = "tiny", "tiny-warm"
EMBEDDED = {TINY: 1e-3, TINY_WARM: 3e-4}
"""Models that are made and not loaded, with the learning rate that suits each: random, and with its warm start."""

MOST_FAULTS = 3
"""Of a file, told in one line: who sees more reads none."""

MOST_SHOWN = 60
"""Characters of a value or a name that a fault repeats."""

C = TypeVar("C", bound=BaseModel)


def _as_list(value: Any) -> Any:
    """One bootstrap may be written without brackets."""
    return [value] if isinstance(value, str) else value


def _as_weights(value: Any) -> Any:
    """A flag gives them as NAME=WEIGHT, or as NAME for a weight of 1."""
    if not isinstance(value, list | tuple):
        return value
    return {name: weight if equals else 1.0 for name, equals, weight in (str(one).partition("=") for one in value)}


Mbit = Annotated[float, Field(gt=0, le=1e6)]
"""A rate of the line in Mbit/s; not set means no cap."""

Price = Annotated[float, Field(ge=0, le=1e6)]
"""By the hour or by 1e9 bytes, in one currency that the whole swarm means; 0 is free."""

Noise = Annotated[float, Field(ge=0, le=0.5)]
"""By which share a rehearsed time is longer or shorter than it should be, drawn anew each time."""

EngineArguments = Annotated[dict[str, Any], Field(max_length=64)]
"""Arguments of vLLM's own, by its names (`AsyncEngineArgs`); it has some two hundred, of which nobody sets 64."""

VLLM_ALONE = ("tensor_parallel_size", "gpu_memory_share", "max_model_len")
"""Settings that no other engine can follow."""

Rewards = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[float, Field(ge=-1e6, le=1e6)]],
    BeforeValidator(_as_weights),
    Field(max_length=16),
]
"""Weights of rewards by name, or as NAME=WEIGHT each; none given is the task's own choice."""

ChatArguments = Annotated[dict[str, bool | int | str], Field(max_length=64)]
"""What a model's chat template asks for by a name of its own, as enable_thinking of Qwen3's."""

Bootstrap = Annotated[tuple[str, ...], BeforeValidator(_as_list), Field(max_length=32)]
"""Places to begin: host, host:port, URL or join line."""


class LeadConfig(BaseModel):
    """One run of a learner. Every field can be set in the TOML file; the ones users change most are flags too."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = TINY
    task: str = "copy"
    reward: Literal["task", "random"] = "task"
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = DEFAULT_PORT
    advertise: str | None = None
    tls: bool | None = None
    lan: bool | None = None
    bootstrap: Bootstrap = ()
    round_s: Annotated[float, Field(ge=0.05, le=60)] = 2.0
    max_upload: Mbit | None = None
    max_download: Mbit | None = None
    run_dir: Path | None = None
    state_dir: Path | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: str = "auto"

    max_staleness: Annotated[int, Field(ge=0, le=1024)] = 2
    publish_every_steps: Annotated[int, Field(ge=1)] = 1
    hold_s: Annotated[float, Field(ge=0)] = 0.0
    steps: Annotated[int, Field(ge=1)] = 200
    target: Annotated[float, Field(gt=0, le=1)] | None = None

    groups_per_step: Annotated[int, Field(ge=1, le=65_536)] = 32
    group_size: Annotated[int, Field(ge=2, le=1024)] = 16
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    max_new_tokens: Annotated[int, Field(ge=1, le=131_072)] | None = None
    learning_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    minibatches: Annotated[int, Field(ge=1, le=64)] = 2

    objective: str = "grpo"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0, le=9)] = 0.28
    advantage_normalisation: Literal["group", "none"] = "group"
    kl_weight: Annotated[float, Field(ge=0, le=10)] = 0.0
    overlong: Literal["keep", "mask", "punish"] = "keep"
    overlong_margin: Annotated[int, Field(ge=1, le=131_072)] | None = None

    tokens_per_micro_batch: Annotated[int, Field(ge=16, le=1 << 24)] | None = None
    packing: bool | None = None
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    activation_checkpointing: bool | None = None
    compile: bool = False
    trainer_ranks: Annotated[int, Field(ge=1, le=1024)] = 1
    trainer_machines: Annotated[int, Field(ge=1, le=1024)] = 1
    trainer_meeting: Annotated[str, Field(pattern=r"^[^\s:]+:[0-9]{1,5}$")] | None = None

    alarm_mismatch_kl: Annotated[float, Field(gt=0, le=100)] = 0.5
    alarm_entropy: Annotated[float, Field(ge=0, le=1)] = 0.1
    alarm_gradient_spike: Annotated[float, Field(gt=1, le=1e9)] = 10.0

    rewards: Rewards = {}
    lenient: bool = False
    system_prompt: Annotated[str, Field(max_length=65_536)] | None = None
    chat: bool | None = None
    chat_arguments: ChatArguments = {}
    stop: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(max_length=16)] = ()
    max_prompt_tokens: Annotated[int, Field(ge=1, le=131_072)] | None = None
    prompt_column: Annotated[str, Field(min_length=1, max_length=256)] = "prompt"
    answer_column: Annotated[str, Field(min_length=1, max_length=256)] = "answer"
    held_out_share: Annotated[float, Field(gt=0, le=0.5)] = 0.05
    reward_failure: RewardFailure = "zero"
    reward_memory_mb: Annotated[int, Field(ge=256, le=1 << 20)] = 4096
    reward_processes: Annotated[int, Field(ge=1, le=256)] | None = None
    eval_samples: Annotated[int, Field(ge=1, le=1024)] = 1

    eval_every_steps: Annotated[int, Field(ge=1)] = 10
    eval_prompts: Annotated[int, Field(ge=1, le=10_000)] = 100
    checkpoint_every_steps: Annotated[int, Field(ge=1)] = 50
    keep_checkpoints: Annotated[int, Field(ge=1, le=1000)] = 3
    keep_rollouts: Annotated[int, Field(ge=0)] | None = None
    tensorboard: bool = False
    beat_s: Annotated[float, Field(ge=0.2, le=60)] = 5.0
    lease_time_limit_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    reward_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    trainer_hang_s: Annotated[float, Field(ge=10)] = 600.0
    rehearse_step_s: Annotated[float, Field(gt=0, le=3600)] | None = None
    rehearse_noise: Noise = 0.0

    activate: Literal["all", "cheapest"] | None = None
    idle_target: Annotated[float, Field(gt=0, lt=1)] = 0.02
    budget_per_hour: Annotated[float, Field(gt=0, le=1e6)] | None = None
    max_cost: Annotated[float, Field(gt=0, le=1e12)] | None = None
    cost_per_hour: Price = 0.0
    egress_cost_per_gb: Price = 0.0

    @model_validator(mode="after")
    def _period_fits_bound(self) -> Self:
        if self.publish_every_steps > self.max_staleness + 1:
            raise ValueError(
                f"--publish-every-steps {self.publish_every_steps} is above --max-staleness + 1, which is "
                f"{self.max_staleness + 1}: the learner would wait for ever for rollouts fresh enough; lower the one "
                "or raise the other"
            )
        return self

    @model_validator(mode="after")
    def _machines_know_where_to_meet(self) -> Self:
        if self.trainer_machines > 1 and self.trainer_meeting is None:
            raise ValueError(
                "trainer_machines above 1 needs trainer_meeting, a host:port of this machine that the others reach"
            )
        return self

    @property
    def resolved_reward_processes(self) -> int:
        """A quarter of the cores, 8 at most: the trainer and the network want the others. Each is started when all
        before it are at work."""
        return self.reward_processes or max(1, min(8, (os.cpu_count() or 1) // 4))

    @property
    def resolved_learning_rate(self) -> float:
        """EMBEDDED says what suits those; 1e-6 is the usual rate for post-training a real one."""
        return self.learning_rate or EMBEDDED.get(self.model, 1e-6)


class JoinConfig(BaseModel):
    """One sampler or relay. `host`, `port`, `tls` and `lan` depend on where the bootstraps are unless they are set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["sampler", "relay"] = "sampler"
    bootstrap: Annotated[Bootstrap, Field(min_length=1)]
    host: str | None = None
    port: Annotated[int, Field(ge=0, le=65_535)] | None = None
    tls: bool | None = None
    lan: bool | None = None
    max_upload: Mbit | None = None
    max_download: Mbit | None = None
    state_dir: Path | None = None
    base: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    device: str = "auto"
    engine: Literal["auto", "transformers", "vllm", "scripted"] = "auto"
    dtype: EngineDtype = "auto"
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    gpu_memory_share: Annotated[float, Field(gt=0, le=1)] = 0.85
    max_model_len: Annotated[int, Field(ge=16, le=16_777_216)] | None = None
    engine_arguments: EngineArguments = {}
    batch_samples: Annotated[int, Field(ge=1, le=4096)] = 128
    engine_hang_s: Annotated[float, Field(ge=10)] = 120.0
    rehearse_tokens_per_s: Annotated[float, Field(gt=0, le=1e6)] | None = None
    rehearse_noise: Noise = 0.0
    device_class: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    cost_per_hour: Price = 0.0
    down_cost_per_gb: Price = 0.0
    up_cost_per_gb: Price = 0.0

    @model_validator(mode="after")
    def _rehearses_without_a_model(self) -> Self:
        if self.rehearse_tokens_per_s is not None and self.engine != "scripted":
            raise ValueError(
                'rehearse_tokens_per_s sets the pace of the engine without a model: set engine = "scripted" with it'
            )
        return self

    @model_validator(mode="after")
    def _asks_vllm_alone_for_what_is_its_own(self) -> Self:
        if self.engine_arguments and self.engine not in ("vllm", "scripted"):
            raise ValueError('engine_arguments are vLLM\'s: set engine = "vllm" with them, or leave them out')
        if self.engine == "scripted" and set(self.engine_arguments) - {"continuous"}:
            raise ValueError("the engine without a model knows one argument, continuous")
        if odd := [name for name in self.engine_arguments if not name.isidentifier()]:
            raise ValueError(
                f"engine_arguments: {odd[0]!r} cannot be an argument of vLLM's; write block_size for --block-size"
            )
        given = [f"--{name.replace('_', '-')}" for name in VLLM_ALONE if name in self.model_fields_set]
        if given and self.engine not in ("auto", "vllm"):
            raise ValueError(f"{given[0]} is for vLLM: leave it out, or take --engine vllm instead of {self.engine}")
        return self

    @property
    def engine_options(self) -> EngineOptions:
        """What the engine is started with."""
        return EngineOptions(
            dtype=self.dtype,
            tensor_parallel_size=self.tensor_parallel_size,
            gpu_memory_share=self.gpu_memory_share,
            max_model_len=self.max_model_len,
            arguments=self.engine_arguments,
        )


def load_config(kind: type[C], file: Path | None, flags: dict[str, Any]) -> C:
    """A `kind` from the TOML `file`, if any, overridden by the flags that were given. UserError in one line."""
    values = read_toml(file) if file else {}
    values.update({name: value for name, value in flags.items() if value is not None})
    try:
        return kind(**values)
    except ValidationError as error:
        raise UserError("; ".join(_explain(kind, fault) for fault in error.errors())) from error


def load_file(kind: type[C], file: Path) -> C:
    """A `kind` that a TOML file alone says. UserError in one line that names the file and the keys."""
    values = read_toml(file)
    try:
        return kind(**values)
    except ValidationError as error:
        faults = [_explain_key(values, fault) for fault in error.errors()]
        more = f"; and {len(faults) - MOST_FAULTS} more" if len(faults) > MOST_FAULTS else ""
        raise UserError(f"{file}: {'; '.join(faults[:MOST_FAULTS])}{more}") from error


def read_toml(file: Path) -> dict[str, Any]:
    """The settings of a file, as they stand. UserError if it cannot be read."""
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise UserError(f"cannot read the configuration {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid TOML: {error}") from error


def _explain(kind: type[BaseModel], fault: Any) -> str:
    name = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"unknown setting {name!r}; known ones: {', '.join(kind.model_fields)}"
    if fault["type"] == "missing":
        return f"--{name.replace('_', '-')} has to be given"
    message = _message(fault)
    return (
        f"--{name.replace('_', '-')} {_shown(fault['input'])}: {message[0].lower() + message[1:]}" if name else message
    )


def _explain_key(values: dict[str, Any], fault: Any) -> str:
    """The fault by its key, as in `fleet vast-4090: price_per_h`."""
    key = _key(values, fault["loc"])
    match fault["type"]:
        case "extra_forbidden":
            return f"{key} is no key of this file"
        case "missing":
            return f"{key} is missing"
    message, given = _message(fault), fault["input"]
    if isinstance(given, dict | list):
        return f"{key}: {message}" if key else message
    return f"{key} = {repr(given)[:MOST_SHOWN]}: {message[0].lower() + message[1:]}"


def _key(values: Any, loc: tuple[str | int, ...]) -> str:
    """Keys with dots between them; an entry of a list of tables is called by its name."""
    key, at = "", values
    for part in loc:
        if isinstance(at, dict):
            key, at = key + (" " if key.endswith(":") else "." if key else "") + str(part), at.get(part)
        elif isinstance(at, list) and isinstance(part, int):
            at = at[part]
            name = at.get("name") if isinstance(at, dict) else None
            key += f" {name[:MOST_SHOWN] if isinstance(name, str) and name.isprintable() else f'number {part + 1}'}:"
    return key.removesuffix(":")


def _message(fault: Any) -> str:
    return str(fault["msg"]).removeprefix("Value error, ")


def _shown(given: Any) -> Any:
    return given if isinstance(given, int | float) or str(given).isprintable() else repr(given)
