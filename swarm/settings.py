"""Everything a user may set, as pydantic models: one class a section.

Every field is a key of the TOML file, in the table of its section (settings_file.py). A field with a `Flag` is also a
command-line option (cli/options.py), and RESUMED says that it may be changed when a run is resumed. So a new setting is
one line here, and one in docs/settings.md, which tests/pages.py writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from swarm.types import (
    MAX_ABOUT,
    MAX_TURNS,
    BasePrecision,
    Freshness,
    Normalisation,
    ObjectiveName,
    OptimizerStates,
    Schedule,
    Selection,
)

if TYPE_CHECKING:
    from swarm.sampler.engine import EngineKind, EngineOptions

DEFAULT_PORT = 7700

TINY, TINY_WARM = "tiny", "tiny-warm"
EMBEDDED = {TINY: 1e-3, TINY_WARM: 3e-4}
"""Models that are built in place instead of loaded, with a suitable learning rate for each"""

RANDOM = "random"  # The reward of a control

TASKS = (
    "--task jsonl:FILE (your own questions and answers), --task hf:DATASET (those of the Hugging Face hub), --task "
    "gym:leg_counting (questions without end)"
)
"""Examples for who named a model and no task"""

MAX_SHOWN = 60  # Characters of a value or a name that a message repeats


@dataclass(frozen=True, slots=True)
class Key:
    """Describes a setting. `default` describes the default if the field's own value does not."""

    help: str
    default: str = ""


@dataclass(frozen=True, slots=True)
class Flag(Key):
    """Makes a setting a command-line option too, if need be with another `name`, next to its own."""

    name: str = ""


RESUMED = object()
"""Marks a setting that may be changed when the run is resumed. One without this mark is fixed: recorded batches depend
on it, and training on them with another value would be another run. lead/dials.py has what changes while it runs."""


def _as_weights(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return value
    return {name: weight if equals else 1.0 for name, equals, weight in (str(one).partition("=") for one in value)}


def as_task(value: Any) -> Any:
    """A file is a task: jsonl:FILE, or what the library `datasets` reads."""
    kinds = {".jsonl": "jsonl", **dict.fromkeys((".json", ".csv", ".parquet", ".arrow"), "hf")}
    kind = kinds.get(Path(value).suffix) if isinstance(value, str) and ":" not in value else None
    return f"{kind}:{value}" if kind else value


def _as_words(value: Any) -> Any:
    """Split words that came with commas, from a flag or from `echo-node limits`."""
    given = [value] if isinstance(value, str) else value
    return [word.strip() for one in given for word in str(one).split(",")] if isinstance(given, list) else given


Whole = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Tokens = Annotated[int, Field(ge=1, le=131_072)]  # Tokens of a prompt or a completion
Bound = Annotated[int, Field(ge=0, le=1024)]  # Largest staleness in learner steps: older rollouts teach nothing
Threads = Annotated[int, Field(ge=1, le=256)]
Nickname = Annotated[str, Field(max_length=32)]
Mbit = Annotated[float, Field(gt=0, le=1e6)]  # Line rate in Mbit/s; None is no cap
Price = Annotated[float, Field(ge=0, le=1e6)]  # Per hour or per 1e9 bytes, in the swarm's one currency; 0 is free


def dashboard_address(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT, such as 127.0.0.1:0 or [::1]:8080. Raise ValueError if it is none."""
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not (host and port.isascii() and port.isdigit() and int(port) < 65_536):
        raise ValueError("give HOST:PORT, such as 127.0.0.1:0, or off")
    return host, int(port)


def _check_page(text: str) -> str:
    if text != "off":
        dashboard_address(text)
    return text


PageAddress = Annotated[str, AfterValidator(_check_page)]
Option = bool | int | float | str

Rewards = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=256)], Annotated[float, Field(ge=-1e6, le=1e6)]],
    BeforeValidator(_as_weights),
    Field(max_length=16),
]  # Weights of rewards by name. A flag gives them as NAME=WEIGHT, or as NAME for a weight of 1.

Bootstrap = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value), Field(max_length=32)
]  # First members to contact: host, host:port, URL or join line. A single one may be written without brackets.


class Section(BaseModel):
    """A table of the TOML file, and a section of --help. In Python settings are flat."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    table: ClassVar[str] = ""


def sections(kind: type[BaseModel]) -> dict[str, str]:
    """Return the table of each setting."""
    return {name: base.table for base in _bases(kind) for name in base.__annotations__ if name in kind.model_fields}


def headings(kind: type[BaseModel]) -> dict[str, str]:
    """Return a heading for each table."""
    return {base.table: f"[{base.table}] {(base.__doc__ or '').split('.')[0]}" for base in _bases(kind)}


def _bases(kind: type[BaseModel]) -> list[type[Section]]:
    return [base for base in reversed(kind.__mro__) if issubclass(base, Section) and "table" in vars(base)][1:]


class ModelSection(Section):
    """What is trained."""

    table: ClassVar[str] = "model"
    model: Annotated[str, Flag("Directory, Hugging Face id, tiny or tiny-warm.")] = TINY
    adapter: Annotated[
        int | None, Field(ge=1, le=1024), Flag("Rank: train an adapter (LoRA); the model is frozen.", "none")
    ] = None
    base_precision: Annotated[BasePrecision, Flag("Of the model beside an adapter: bf16, or nf4 (4 bits, QLoRA).")] = (
        "bf16"
    )


class TaskSection(Section):
    """What it learns, and from which rewards."""

    table: ClassVar[str] = "task"
    task: Annotated[
        str,
        BeforeValidator(as_task),
        Flag("What to learn: a file of questions, or what `echo-node tasks` lists.", "copy for an embedded model"),
    ] = "copy"
    task_options: Annotated[
        dict[str, Option | list[Option]],
        Field(max_length=64),
        Key("Options of gym:NAME, such as { min_terms = 2 }, or of agent:NAME, { network = true }.", "the data set's"),
    ] = {}
    judge: Annotated[
        str | None,
        Field(pattern=r"^https?://\S+$"),
        Flag("URL[#MODEL] that an agent reaches as the model judge; its key is the variable JUDGE_API_KEY.", "none"),
    ] = None
    rewards: Annotated[
        Rewards,
        Flag(
            "NAME=WEIGHT, for questions with answers: exact, numeric, math, boxed, or your own FILE.py:FUNCTION. With "
            "random among them, for every task, a control that must not learn.",
            "the task's",
            name="reward",
        ),
    ] = {}
    lenient: Annotated[bool, Flag("exact and math ignore case, final dots and 'The answer is'.")] = False
    system_prompt: Annotated[str | None, Field(max_length=65_536), Flag("The system message of a chat.")] = None
    chat: Annotated[bool | None, Flag("Give prompts as a chat.", "if the model has a template")] = None
    chat_arguments: Annotated[
        dict[str, bool | int | str],
        Field(max_length=64),
        Key("Arguments of the model's chat template, such as { enable_thinking = false }.", "none"),
    ] = {}
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...],
        Field(max_length=16),
        Key("Strings that end an answer.", "none"),
    ] = ()
    max_prompt_tokens: Annotated[
        Tokens | None,
        Key("Longest prompt; a smaller one lets samplers draw more at a time.", "what the model's context leaves"),
    ] = None
    max_new_tokens: Annotated[Tokens | None, Flag("Longest completion.", "the task's")] = None
    max_turns: Annotated[
        int | None, Field(ge=1, le=MAX_TURNS), Flag("Most turns of an episode.", "the environment's")
    ] = None
    max_episode_tokens: Annotated[
        Tokens | None, Flag("Most tokens of an episode after its prompt.", "the environment's")
    ] = None
    columns: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], Annotated[str, Field(min_length=1, max_length=256)]],
        Key("Columns of the questions and of the answers in a data set."),
    ] = ("prompt", "answer")
    reward_timeout_s: Annotated[float, Field(gt=0, le=3600), Key("Seconds that a reward may take."), RESUMED] = 10.0
    reward_processes: Annotated[
        int | None,
        Field(ge=1, le=256),
        Key("Processes that score answers; more for a judge on the network.", "a quarter of the cores, at most 8"),
        RESUMED,
    ] = None

    @property
    def is_control(self) -> bool:
        """Whether what is trained on is random, so that nothing can be learned."""
        return RANDOM in self.rewards

    @property
    def own_rewards(self) -> dict[str, float]:
        return {name: weight for name, weight in self.rewards.items() if name != RANDOM}


class Learn(Section):
    """How it learns."""

    table: ClassVar[str] = "learn"
    steps: Annotated[Whole, Flag("Learner steps."), RESUMED] = 200
    seed: Annotated[int, Field(ge=0, lt=2**63), Flag("Seed of prompts, samples and batches.")] = 0
    groups_per_step: Annotated[int, Field(ge=1, le=65_536), Flag("Prompts in a learner step.")] = 32
    group_size: Annotated[int, Field(ge=2, le=1024), Flag("Rollouts of each prompt.")] = 16
    temperature: Annotated[float, Field(gt=0, le=10), Flag("Sampling temperature.")] = 1.0
    learning_rate: Annotated[
        float | None,
        Field(gt=0, le=1),
        Flag("Peak of the learning rate.", "1e-6; tiny 1e-3, tiny-warm 3e-4; tenfold for an adapter"),
    ] = None
    warmup_steps: Annotated[int, Field(ge=0), Key("Learner steps over which the learning rate rises to its peak.")] = 10
    schedule: Annotated[
        Schedule,
        Flag("How the learning rate changes over --steps, after its warm-up."),
    ] = "constant"
    minibatches: Annotated[int, Field(ge=1, le=64), Key("Optimiser steps in a learner step.")] = 2
    objective: Annotated[ObjectiveName, Flag("Explained in docs/learner.md.")] = "grpo"
    clip: Annotated[
        tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(gt=0, le=9)]] | None,
        Key("How far below and above 1 a token's ratio counts.", "[0.2, 0.28]; gspo [3e-4, 4e-4]"),
    ] = None
    loss_normalisation: Annotated[
        Normalisation | None, Flag("What the loss is divided by.", "tokens; gspo rollouts")
    ] = None
    weight_decay: Annotated[float, Field(ge=0, lt=1), Key("AdamW's weight decay.")] = 0.0
    kl_weight: Annotated[float, Field(ge=0, le=10), Key("Weight of the distance to the first model in the loss.")] = 0.0
    entropy_weight: Annotated[float, Field(ge=0, le=1), Key("Weight of the policy's entropy in the loss.")] = 0.0
    dynamic_sampling: Annotated[
        bool,
        Key(
            "Draw others for groups whose rewards are all equal, for each step at most as many as it has groups (DAPO)."
        ),
        RESUMED,
    ] = False
    selection: Annotated[
        Selection,
        Flag("Prompts: each as often as any other, or more often those at the frontier of what the model can do."),
    ] = "uniform"
    overlong: Annotated[
        Literal["keep", "mask", "punish"],
        Key("What becomes of rollouts cut off at the longest completion: kept, left out of the loss, or punished."),
    ] = "keep"
    credit: Annotated[
        Literal["episode", "turn"],
        Flag("What a turn is judged by: its episode, or what follows it."),
    ] = "episode"
    turn_discount: Annotated[
        float, Field(ge=0, le=1), Key('What a turn\'s reward is worth to the turn before it, with credit = "turn".')
    ] = 1.0

    @property
    def resolved_clip(self) -> tuple[float, float]:
        """By default DAPO's, of single tokens, or GSPO's own, whose ratio is a mean over many and moves far less."""
        return self.clip or ((3e-4, 4e-4) if self.objective == "gspo" else (0.2, 0.28))

    @property
    def resolved_normalisation(self) -> Normalisation:
        return self.loss_normalisation or ("rollouts" if self.objective == "gspo" else "tokens")


class Evaluation(Section):
    """How it is measured."""

    table: ClassVar[str] = "eval"
    target: Annotated[Share | None, Flag("Stop once the last version reaches this held-out exact match."), RESUMED] = (
        None
    )
    eval_every_steps: Annotated[Whole, Key("Steps between two held-out evaluations."), RESUMED] = 10
    eval_prompts: Annotated[int, Field(ge=1, le=10_000), Key("Held-out prompts of an evaluation.")] = 100
    eval_samples: Annotated[
        int, Field(ge=1, le=1024), Key("Answers to each held-out prompt: 1 is the likeliest, k gives pass@k."), RESUMED
    ] = 1


class LeadSwarm(Section):
    """Who takes part, and how old rollouts may be."""

    table: ClassVar[str] = "swarm"
    max_staleness: Annotated[Bound, Flag("S: 0 is on-policy, 1 and more overlap."), RESUMED] = 2
    publish_every_steps: Annotated[Whole, Flag("K, at most S + 1."), RESUMED] = 1
    freshness: Annotated[
        Freshness,
        Flag("adaptive keeps rollouts as young as the fleet allows, off opens them as early as S allows."),
        RESUMED,
    ] = "adaptive"
    audit_share: Annotated[
        float,
        Field(ge=0, le=1),
        Flag("Share of rollouts that are drawn again to see who lies; newcomers' all. 0 believes everybody."),
        RESUMED,
    ] = 0.05
    samplers: Annotated[
        int | None, Field(ge=0, le=64), Flag("Samplers that this machine runs itself.", "1 if it fits"), RESUMED
    ] = None
    host: Annotated[str, Flag("Address to listen on; 127.0.0.1 keeps others out."), RESUMED] = "0.0.0.0"
    port: Annotated[int, Field(ge=0, le=65_535), Flag("0 takes any free one."), RESUMED] = DEFAULT_PORT
    advertise: Annotated[str | None, Flag("host[:port] that others dial.", "--host"), RESUMED] = None
    tls: Annotated[bool | None, Flag("Encrypt.", "unless on loopback"), RESUMED] = None
    lan: Annotated[bool | None, Flag("Allow private addresses.", "only on one machine"), RESUMED] = None
    bootstrap: Annotated[Bootstrap, Flag("A member of a swarm that exists already."), RESUMED] = ()
    max_upload: Annotated[Mbit | None, Flag("Most upload that weights may use, in Mbit/s."), RESUMED] = None
    dashboard: Annotated[
        PageAddress,
        Flag("HOST:PORT of the live page, or off. Port 0 takes any free one; other hosts need the token."),
        RESUMED,
    ] = "127.0.0.1:0"
    public_page: Annotated[PageAddress, Flag("HOST:PORT of a page for volunteers, plain HTTP, or off."), RESUMED] = (
        "off"
    )
    beat_s: Annotated[float, Field(ge=0.2, le=60), Key("Seconds between two signs of life of a sampler.")] = 5.0


class Storage(Section):
    """What is kept of the run."""

    table: ClassVar[str] = "run"
    about: Annotated[
        str, Field(max_length=MAX_ABOUT), Flag("What it is for, as volunteers read it before they join."), RESUMED
    ] = ""
    run_dir: Annotated[Path | None, Flag("Where the run is kept.", "runs/TASK-DATE-TIME"), RESUMED] = None
    state_dir: Annotated[
        Path | None,
        Flag("Holds the swarm's key; keep it to lead the same swarm in another run.", "in the run directory"),
        RESUMED,
    ] = None
    checkpoint_every_steps: Annotated[Whole, Flag("Steps between two checkpoints."), RESUMED] = 50
    keep_rollouts: Annotated[
        int | None, Field(ge=0), Flag("Steps whose rollouts keep their tokens on disk.", "all"), RESUMED
    ] = None
    tensorboard: Annotated[bool, Flag("Log for TensorBoard too."), RESUMED] = False
    wandb: Annotated[bool, Flag("Log to Weights & Biases too, as its own client is set up."), RESUMED] = False


class TrainerSection(Section):
    """Devices and memory of the training."""

    table: ClassVar[str] = "trainer"
    device: Annotated[str, Flag("auto, cpu, cuda, cuda:1, ..."), RESUMED] = "auto"
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"], Key("Arithmetic of training; auto is bfloat16 on GPUs that have it.")
    ] = "auto"
    tokens_per_micro_batch: Annotated[
        int | None, Field(ge=16, le=1 << 24), Flag("Most tokens in one forward pass.", "chosen"), RESUMED
    ] = None
    packing: Annotated[bool | None, Key("Put several rollouts into one row.", "with flash attention")] = None
    activation_checkpointing: Annotated[
        bool | None, Key("Compute layers twice instead of keeping what they gave.", "what fits")
    ] = None
    optimizer_states: Annotated[
        OptimizerStates,
        Key("AdamW's moments: float32, 8bit (extra quantized), or float32 in the memory of the host."),
        RESUMED,
    ] = "float32"
    trainer_ranks: Annotated[int, Field(ge=1, le=1024), Flag("GPUs that share the training."), RESUMED] = 1
    trainer_machines: Annotated[
        str | None,
        Field(pattern=r"^[1-9][0-9]{0,3}@[^\s:@]+:[0-9]{1,5}$"),
        Key("COUNT@HOST:PORT of this machine: how many share the training, and where they meet.", "none"),
        RESUMED,
    ] = None


class LeadMoney(Section):
    """Prices and limits of cost."""

    table: ClassVar[str] = "money"
    activate: Annotated[
        Literal["all", "cheapest"] | None,
        Flag("All samplers, or the cheapest that suffice.", "cheapest if there are prices"),
        RESUMED,
    ] = None
    budget_per_hour: Annotated[
        float | None, Field(gt=0, le=1e6), Flag("Most that the active samplers may cost per hour."), RESUMED
    ] = None
    max_cost: Annotated[
        float | None,
        Field(gt=0, le=1e12),
        Flag("End the run, with a checkpoint, once it has cost this much."),
        RESUMED,
    ] = None
    cost_per_hour: Annotated[Price, Flag("Price of this machine per hour."), RESUMED] = 0.0
    traffic_cost_per_gb: Annotated[Price, Flag("Price of metered traffic, per 1e9 bytes."), RESUMED] = 0.0


class Heeded(NamedTuple):
    """Settings that count only where `where` holds; `words` say where that is."""

    names: tuple[str, ...]
    where: Callable[[Any], bool]
    words: str


def _refuse_ignored(config: BaseModel, rules: Iterable[Heeded]) -> None:
    """Raise ValueError for a setting that would have no effect."""
    for names, where, words in rules:
        for name in names if not where(config) else ():
            field = type(config).model_fields[name]
            if getattr(config, name) != field.default:
                shown = f"--{name.replace('_', '-')}" if any(isinstance(one, Flag) for one in field.metadata) else name
                raise ValueError(f"{shown} has no effect here, only {words}: leave it out")


def _kind(config: LeadConfig) -> str:
    return config.task.partition(":")[0]


OF_LEAD = (
    Heeded(
        ("rewards",),
        lambda c: _kind(c) in ("jsonl", "hf") or c.own_rewards == {},
        "with questions of one's own (jsonl: and hf:); other tasks have rewards of their own",
    ),
    Heeded(
        ("lenient", "columns"),
        lambda c: _kind(c) in ("jsonl", "hf"),
        "with questions of one's own (jsonl: and hf:); other tasks have rewards of their own",
    ),
    Heeded(("task_options",), lambda c: _kind(c) in ("gym", "agent"), "with a task gym:NAME or agent:NAME"),
    Heeded(
        ("max_turns", "max_episode_tokens", "credit"),
        lambda c: _kind(c) not in ("copy", "sort", "jsonl", "hf", "gym"),
        "with a task of several turns",
    ),
    Heeded(("judge",), lambda c: _kind(c) == "agent", "with a task agent:NAME"),
    Heeded(("turn_discount",), lambda c: c.credit == "turn", 'with credit = "turn"'),
    Heeded(("chat_arguments", "system_prompt"), lambda c: c.chat is not False, "in a chat, without --no-chat"),
    Heeded(("clip",), lambda c: c.objective != "tis", "with an objective that clips"),
    Heeded(("base_precision",), lambda c: c.adapter is not None, "beside an adapter (give a rank with --adapter)"),
)


class LeadConfig(LeadMoney, TrainerSection, Storage, LeadSwarm, Evaluation, Learn, TaskSection, ModelSection):
    """One run of a learner. Fields come in the order of the sections from the last base to the first."""

    max_download: ClassVar[None] = None  # What it fetches is little

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _refuse_ignored(self, OF_LEAD)
        if self.adapter is not None and (self.trainer_ranks > 1 or self.trainer_machines):
            raise ValueError(
                "an adapter is trained by one rank: leave --trainer-ranks and trainer_machines out, or --adapter"
            )
        if self.model not in EMBEDDED and "task" not in self.model_fields_set:
            raise ValueError(
                f"what is {self.model[-MAX_SHOWN:]} to learn? Say it with {TASKS}; `echo-node tasks` lists all kinds"
            )
        return self

    @property
    def resolved_learning_rate(self) -> float:
        """By default the rate in EMBEDDED, or 1e-6, which is usual for post-training a real model; for an adapter ten
        times as much, as others found; docs/learner.md has a small model for which it is too much."""
        default = EMBEDDED.get(self.model, 1e-6) * (10 if self.adapter else 1)
        return round(default, 9) if self.learning_rate is None else self.learning_rate


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


class LimitsSection(Section):
    """What the machine gives. All of it may be changed while the node runs (join/owner.py)."""

    table: ClassVar[str] = "limits"
    max_upload: Annotated[Mbit | None, Flag("Most upload that weights may use, in Mbit/s.")] = None
    max_download: Annotated[Mbit | None, Flag("Most download that weights may use, in Mbit/s.")] = None
    max_disk: Annotated[
        float | None, Field(gt=0, le=1e6), Flag("Most that the weights may take on the disk, in GB.")
    ] = None
    gpu_memory_share: Annotated[Share, Flag("Share of each GPU's memory for vLLM or mlx.")] = 0.85
    threads: Annotated[
        Threads | None, Flag("Threads of the engine, and of what codes weights.", "what the cores can spare")
    ] = None
    nice: Annotated[int, Field(ge=0, le=19), Flag("How far it gives way to other programs.")] = 0
    hours: Annotated[
        str,
        Field(max_length=256),
        AfterValidator(lambda text: text if read_hours(text) else ""),
        Flag("When to draw, by this machine's clock: 22:00-08:00,12:00-13:30.", "always"),
    ] = ""
    only_when: Annotated[
        tuple[Literal["mains", "idle"], ...],
        BeforeValidator(_as_words),
        Flag("mains: draw nothing while on battery; idle: nothing while somebody uses the desktop."),
    ] = ()


class JoinSwarm(Section):
    """Which swarm, and in which part."""

    table: ClassVar[str] = "swarm"
    bootstrap: Annotated[
        Bootstrap, Field(min_length=1), Flag("Any member: host, host:port or a join line (echo1:...).")
    ]
    role: Annotated[Literal["sampler", "relay"], Flag("A relay keeps the swarm together and draws no samples.")] = (
        "sampler"
    )
    host: Annotated[str | None, Flag("Address to listen on.", "all, if a bootstrap is far")] = None
    port: Annotated[
        int | None, Field(ge=0, le=65_535), Flag("Port to listen on.", "any free one; for a relay 7700")
    ] = None
    tls: Annotated[bool | None, Flag("Encrypt.", "unless on loopback")] = None
    lan: Annotated[bool | None, Flag("Allow private addresses.", "only on one machine")] = None
    nickname: Annotated[Nickname, Flag("What others see next to this node's id.")] = ""
    grace: Annotated[float, Field(ge=0, le=86_400), Flag("Seconds in which it leaves when asked to stop.")] = 10.0
    state_dir: Annotated[Path | None, Flag("Key and weights.", "under ~/.local/state")] = None
    base: Annotated[
        str | None,
        Field(min_length=1, max_length=4096),
        Flag("Directory or cached Hugging Face id of the base model; only what differs is fetched."),
    ] = None
    weights: Annotated[
        Literal["auto", "memory", "disk"], Flag("Where the weights are kept; each version wears a disk.")
    ] = "auto"


class EngineSection(Section):
    """What draws."""

    table: ClassVar[str] = "engine"
    engine: Annotated[
        Literal["auto", "transformers", "vllm", "mlx"],
        Flag("auto is vllm with a GPU, mlx on Apple silicon, if its package is there."),
    ] = "auto"
    device: Annotated[str, Flag("auto, cpu, cuda, cuda:1, mps, ...")] = "auto"
    precision: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8", "int4"],
        Flag("Type of the weights; fp8, int8 and int4 round the matrices, to fit a smaller memory."),
    ] = "auto"
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64), Flag("GPUs that share the model.")] = 1
    max_model_len: Annotated[
        int | None,
        Field(ge=16, le=16_777_216),
        Flag("Most tokens of prompt and answer together.", "what the model takes"),
    ] = None
    batch_samples: Annotated[int | None, Field(ge=1, le=4096), Flag("Samples drawn at a time.", "as many as fit")] = (
        None
    )
    engine_arguments: Annotated[
        dict[str, Any],
        Field(max_length=64),
        Key("vLLM's own arguments (`AsyncEngineArgs`), such as { block_size = 32 }.", "none"),
    ] = {}


class JoinMoney(Section):
    """Prices."""

    table: ClassVar[str] = "money"
    cost_per_hour: Annotated[Price, Flag("Price of this machine per hour.")] = 0.0
    traffic_cost_per_gb: Annotated[Price, Flag("Price of metered traffic, per 1e9 bytes.")] = 0.0
    spot: Annotated[bool, Flag("A rented machine that its cloud may take away: heed its notices.")] = False


OF_JOIN = (
    Heeded(
        (*EngineSection.model_fields, "base", "gpu_memory_share"), lambda c: c.role == "sampler", "with --role sampler"
    ),
    Heeded(("engine_arguments",), lambda c: c.engine == "vllm", 'with engine = "vllm"'),
    Heeded(("tensor_parallel_size",), lambda c: c.engine in ("auto", "vllm"), "with --engine vllm"),
    Heeded(("gpu_memory_share",), lambda c: c.engine != "transformers", "with --engine vllm or mlx"),
)


class JoinConfig(JoinMoney, LimitsSection, EngineSection, JoinSwarm):
    """One sampler or relay. The defaults of `host`, `port`, `tls` and `lan` depend on where the bootstraps are."""

    advertise: ClassVar[None] = None  # Publics see its address

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _refuse_ignored(self, OF_JOIN)
        if odd := [name for name in self.engine_arguments if not name.isidentifier()]:
            raise ValueError(
                f"engine_arguments: {odd[0]!r} cannot be an argument of vLLM's; write block_size for --block-size"
            )
        return self

    @property
    def engine_options(self) -> EngineOptions:
        from swarm.sampler.engine import EngineOptions

        named = {"arguments": "engine_arguments", "places": "batch_samples"}
        asked = set(EngineOptions.__struct_fields__) - {"sample_tokens", "hang_s", "dtype", "precision"}
        given = {name: getattr(self, named.get(name, name)) for name in asked}
        match self.precision:
            case "fp8" | "int8" | "int4":
                return EngineOptions(**given, precision=self.precision)
            case dtype:
                return EngineOptions(**given, dtype=dtype)


class DemoConfig(BaseModel):
    """A demonstration on this machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    real: Annotated[bool, Flag("Teach a real model sums; it is fetched once.")] = False
    samplers: Annotated[int, Field(ge=1, le=16), Flag("Sampler processes.", "3; --real 1")] = 3
    steps: Annotated[Whole | None, Flag("Learner steps at most.", "200, or the demo's own")] = None
    kill_one: Annotated[bool, Flag("SIGKILL a sampler half-way.")] = False
    kill_learner: Annotated[
        int, Field(ge=0, le=100), Flag("How many times to SIGKILL the learner at a random moment and resume it.")
    ] = 0
    kill_seed: Annotated[int | None, Flag("Seed of those moments, to repeat a former demo.", "random")] = None
    environment: Annotated[
        Literal["frozen-lake"] | None,
        Flag("Learn to act in it, turn by turn, instead of copying digits.", "none"),
    ] = None
    reward: Annotated[Literal["task", "random"], Flag("random is a control, which must not learn.")] = "task"
    seed: Annotated[int, Field(ge=0, lt=2**63), Flag("Of the model and of everything that is drawn.")] = 0
    max_staleness: Annotated[Bound | None, Flag("The bound S.", "2, or the demo's own")] = None
    adapter: Annotated[
        int | None, Field(ge=1, le=1024), Flag("Rank: train an adapter of tiny-warm instead of a model.", "none")
    ] = None
    engine: Annotated[
        Literal["transformers", "vllm", "mlx", "all"],
        Flag("vllm or mlx has all samplers but the last draw with it; all has one with mlx too."),
    ] = "transformers"
    run_dir: Annotated[Path | None, Flag("Where the run is kept.", "runs/demo-DATE-TIME")] = None
    open: Annotated[bool, Flag("Open the run's page in a browser.")] = False

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
