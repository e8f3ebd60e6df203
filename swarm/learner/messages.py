"""Commands to the trainer's process and its answers. Both ends are ours; weights cross through files."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from swarm.broadcast.version.manifest import Layout
from swarm.settings import LeadConfig
from swarm.types import Turn

MODEL, STAGING = "model", "staging.bin"  # In the run directory: the model's small files, and its staged weights


class TrainerConfig(LeadConfig):
    """The settings of the run, with what the trainer knows besides. `longest_completion` is the token limit of a
    rollout, which follows from the task. `shares_beyond`: rows share their prompt, and a token's way through a layer's
    matrices costs as much as its attention to that many others; 0 where they do not. The trainer settles that, and what
    is None of `packing`, `activation_checkpointing` and `tokens_per_micro_batch`."""

    longest_completion: int = 0
    shares_beyond: int = 0


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
    """Load or make the model, save its small files and stage its weights in the run directory. `config` is a
    TrainerConfig as plain data. `resume` is the checkpoint directory to go on from, or ""."""

    config: dict[str, Any]
    resume: str = ""


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
    of the learning rate is `learning_rate`, or that of the configuration if it is None."""

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
