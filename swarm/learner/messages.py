"""Commands to the trainer's process and its answers. Both ends are ours; weights cross through files."""

from __future__ import annotations

from typing import Literal

import msgspec

from swarm.broadcast.version.manifest import Layout
from swarm.types import BasePrecision, Normalisation, ObjectiveName, OptimizerStates, Schedule, Turn


class LearningRules(msgspec.Struct, frozen=True):
    """What a learner step optimises; docs/learner.md has the formulas. `longest_completion` is the token limit of a
    rollout."""

    objective: ObjectiveName = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    loss_normalisation: Normalisation = "tokens"
    weight_decay: float = 0.0
    kl_weight: float = 0.0
    entropy_weight: float = 0.0
    overlong: Literal["keep", "mask", "punish"] = "keep"
    longest_completion: int = 0
    credit: Literal["episode", "turn"] = "episode"
    turn_discount: float = 1.0


class ComputeRules(msgspec.Struct, frozen=True):
    """How a learner step is computed; none of it changes what is optimised. None lets the trainer choose.
    `shares_beyond`: rows share their prompt, and a token's way through a layer's matrices costs as much as its
    attention to that many others; 0 where they do not."""

    tokens_per_micro_batch: int | None = None
    packing: bool | None = None
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    activation_checkpointing: bool | None = None
    optimizer_states: OptimizerStates = "float32"
    shares_beyond: int = 0


class AdapterRules(msgspec.Struct, frozen=True):
    """An adapter to train in place of the model: `rank` and `alpha` as in manifest.AdapterShape, beside all
    linear layers but the head. The model is held in `base_precision`."""

    rank: int
    alpha: float
    base_precision: BasePrecision = "bf16"


class AlarmRules(msgspec.Struct, frozen=True):
    """Where an alarm goes off. `mismatch_kl` in nats a token, of most rollouts; `entropy` as a share of what it was at
    first, 0 is never; `gradient_spike` in medians of the norm."""

    mismatch_kl: float = 0.5
    entropy: float = 0.1
    gradient_spike: float = 10.0


AlarmKind = Literal[
    "mismatch_kl", "entropy", "gradient_spike", "not_finite", "no_variance", "reward_floor", "reward_failed"
]
"""The last three are the node's own (lead/signal.py)."""

Reaction = Literal["none", "skip", "lower", "stop"]


class Alarm(msgspec.Struct, frozen=True):
    """Something is wrong with a learner step, and what was done about it. `text` is for people."""

    kind: AlarmKind
    reaction: Reaction
    value: float
    limit: float
    text: str


class AlarmState(msgspec.Struct, frozen=True):
    """What alarms remember from one learner step to the next, and over checkpoints. `norms` are the last gradient norms
    before clipping; `first` and `recent` are (entropy, reward, spread of the reward within groups) of the first and the
    last steps that were trained on. Counts are of learner steps in a row."""

    learning_rate_scale: float = 1.0
    norms: tuple[float, ...] = ()
    not_finite_steps: int = 0
    mismatched_steps: int = 0
    unchanged_steps: int = 0
    steps_since_lowered: int = 0
    first: tuple[tuple[float, float, float], ...] = ()
    recent: tuple[tuple[float, float, float], ...] = ()


class ClaimState(msgspec.Struct, frozen=True):
    """What learner/claims.py remembers likewise. `usual` are (staleness, usual distance in nats)."""

    usual: tuple[tuple[int, float], ...] = ()


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Load or make the model, save its small files under `files_dir`, stage its weights at `staging`.

    `model` is a directory, a Hugging Face id, or one of EMBEDDED. `minibatches` optimiser steps make a learner step.
    The learning rate follows `schedule` over `steps` learner steps. `resume` is the checkpoint directory to go
    on from, or "". With `audit_share` 0 claims are believed.
    """

    model: str
    files_dir: str
    staging: str
    seed: int
    device: str
    learning_rate: float
    warmup_steps: int
    minibatches: int
    temperature: float
    schedule: Schedule = "constant"
    steps: int = 0
    longest_prompt: int = 0
    learning: LearningRules = LearningRules()
    compute: ComputeRules = ComputeRules()
    alarms: AlarmRules = AlarmRules()
    resume: str = ""
    audit_share: float = 0.05
    adapter: AdapterRules | None = None


class Prepared(msgspec.Struct, frozen=True):
    """The model is ready. Of its `parameters`, `trained` change. `step` and `lineage` are those of the checkpoint that
    it goes on from; `weights` is a digest of what it began with, in hex; `notes` are for people."""

    layout: Layout
    parameters: int
    trained: int
    vocab_size: int
    context_tokens: int
    stop_token_ids: tuple[int, ...]
    device: str
    step: int = 0
    lineage: bytes = b""
    weights: str = ""
    notes: tuple[str, ...] = ()


class TrainRollout(msgspec.Struct, frozen=True):
    """One rollout as the trainer sees it. `staleness` is in learner steps; arrays as in types.Rollout. `truncated`: it
    ended at the token limit. `turns` and `seats` are an episode's, as there."""

    token_ids: bytes
    logprobs: bytes
    reward: float
    staleness: int
    truncated: bool = False
    sampler: str = ""
    turns: tuple[Turn, ...] = ()
    seats: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """Completion tokens, an environment's included."""
        return len(self.token_ids) // 4

    @property
    def drawn(self) -> int:
        """Tokens that samplers drew."""
        return sum(turn.end - turn.start for turn in self.turns) if self.turns else self.length


class TrainGroup(msgspec.Struct, frozen=True):
    prompt_token_ids: tuple[int, ...]
    rollouts: tuple[TrainRollout, ...]


class Train(msgspec.Struct, frozen=True, tag=True):
    """Take one learner step on these groups. `lineage` is the digest of all batches up to and with this one. The peak
    of the learning rate is `learning_rate`, or that of Prepare if it is None."""

    step: int
    groups: tuple[TrainGroup, ...]
    lineage: bytes = b""
    learning_rate: float | None = None


class Trained(msgspec.Struct, frozen=True):
    """Figures of the step, by TRL's names where TRL has one. `saved_step` and `save_fault` as in Saved; a fault is told
    once, here or there. An alarm whose reaction is "stop" asks the node to end the run. `withheld`: of each sampler,
    how many rollouts, or what it drew of them, were not trained on because of their claims. `mismatches`: of each
    sampler, the summed k3 of its tokens that were compared at equal weights, in nats, and their number."""

    metrics: dict[str, float]
    seconds: float
    saved_step: int | None = None
    save_fault: str = ""
    alarms: tuple[Alarm, ...] = ()
    withheld: dict[str, int] = {}
    mismatches: dict[str, tuple[float, float]] = {}


class AuditRollout(msgspec.Struct, frozen=True):
    """One rollout whose draws are replayed; arrays as in types.Rollout. Without a seed it was drawn greedily."""

    prompt_token_ids: tuple[int, ...]
    token_ids: bytes
    logprobs: bytes
    seed: int | None


class Audit(msgspec.Struct, frozen=True, tag=True):
    """Draw these rollouts again with the weights in the file at `path`, laid out as the staging file; in the precision
    of training passes if `fast`, else in float32."""

    path: str
    rollouts: tuple[AuditRollout, ...]
    fast: bool = False


class Audited(msgspec.Struct, frozen=True):
    """The errors of log-probs and the margins of draws of each rollout, in nats a token (audit/auditor.py):
    float32. Both are empty where the memory for second weights is missing. `exact`: computed in float32."""

    errors: tuple[bytes, ...] = ()
    margins: tuple[bytes, ...] = ()
    exact: bool = True
    seconds: float = 0.0


class Stage(msgspec.Struct, frozen=True, tag=True):
    """Write the weights as bf16, in layout order, over the staging file."""


class Save(msgspec.Struct, frozen=True, tag=True):
    """Copy model, optimiser and generators as they are after `step` steps, and write them to `directory` meanwhile.
    Done comes when the copy is taken, which waits for a former save. The directory appears whole or not at all."""

    directory: str
    step: int


class Flush(msgspec.Struct, frozen=True, tag=True):
    """Wait until no checkpoint is being written."""


class Saved(msgspec.Struct, frozen=True):
    """The newest step whose checkpoint this process has brought to the disk, and why the last save failed ("")."""

    step: int | None
    fault: str


class Done(msgspec.Struct, frozen=True):
    """The command was carried out."""


Command = Prepare | Train | Audit | Stage | Save | Flush
