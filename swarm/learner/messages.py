"""Commands to the trainer's process, and its answers. Weights are not in them but in files."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from swarm.broadcast.version.manifest import Layout
from swarm.settings import LeadConfig
from swarm.types import Turn

MODEL, STAGING = "model", "staging.bin"  # In the run directory: the model's small files, and its staged weights


class TrainerConfig(LeadConfig):
    """The settings of the run, and two values that the trainer needs besides. `longest_completion` is the token limit
    of a rollout, which follows from the task. `shares_beyond`: 0 if rows do not share their prompt; else the number of
    tokens to which attention costs as much as a token's way through the matrices of a layer. The trainer chooses that,
    and, where they are None, `packing`, `activation_checkpointing` and `tokens_per_micro_batch`."""

    longest_completion: int = 0
    shares_beyond: int = 0

    @property
    def one_player(self) -> bool:
        """Whether all streams of an episode are conversations of one program."""
        return self.task.startswith(("agent:", "verifiers:"))


AlarmKind = Literal[
    "mismatch_kl", "entropy", "gradient_spike", "not_finite", "no_variance", "reward_floor", "reward_failed"
]
"""The last three are raised by the node (lead/signal.py)."""

Reaction = Literal["none", "skip", "lower", "stop"]


class Alarm(msgspec.Struct, frozen=True):
    """A fault in a learner step, and the reaction to it. `text` is for people."""

    kind: AlarmKind
    reaction: Reaction
    value: float
    limit: float
    text: str


class AlarmState(msgspec.Struct, frozen=True):
    """The state of the alarms, which is kept in checkpoints. `norms` are the last gradient norms before clipping;
    `first` and `recent` are (entropy, reward, spread of the reward within groups) of the first and the last steps that
    were trained on. Counts are of learner steps in a row."""

    learning_rate_scale: float = 1.0
    norms: tuple[float, ...] = ()
    not_finite_steps: int = 0
    mismatched_steps: int = 0
    unchanged_steps: int = 0
    steps_since_lowered: int = 0
    first: tuple[tuple[float, float, float], ...] = ()
    recent: tuple[tuple[float, float, float], ...] = ()


class ClaimState(msgspec.Struct, frozen=True):
    """The state of learner/claims.py, also kept in checkpoints. `usual` are (staleness, usual distance in nats)."""

    usual: tuple[tuple[int, float], ...] = ()


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Load or make the model, save its small files and stage its weights in the run directory. `config` is a
    TrainerConfig as plain data. `resume` is the checkpoint directory to go on from, or ""."""

    config: dict[str, Any]
    resume: str = ""


class Prepared(msgspec.Struct, frozen=True):
    """The model is ready. `trained` of its `parameters` change. `step` and `lineage` are those of the checkpoint that
    the run goes on from; `weights` is the digest of the weights that it began with, in hex; `notes` are for people.
    `left_bytes` are what a step is predicted to leave of the device, which has `whole_bytes` if it is a GPU."""

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
    left_bytes: int = 0
    whole_bytes: int = 0


FROZEN, SMALL_FILES, WEIGHTS = "frozen", "model", "weights.bin"
"""Files in which a model is laid out that is not trained: what describes it, its small files, the stream of weights."""


class Frozen(msgspec.Struct, frozen=True):
    """A model that is not trained: the parts of Prepared that say how to ask it, and the sums of its tensors."""

    layout: Layout
    tensor_sums: tuple[int, ...]
    context_tokens: int
    stop_token_ids: tuple[int, ...]


class TrainRollout(msgspec.Struct, frozen=True):
    """One rollout as the trainer reads it. `staleness` is in learner steps; arrays, `turns` and `seats` are as in
    types.Rollout. `parts` say which node drew which tokens. `truncated`: it ended at the token limit."""

    token_ids: bytes
    logprobs: bytes
    reward: float
    staleness: int
    truncated: bool = False
    sampler: str = ""
    parts: tuple[Turn, ...] = ()
    turns: tuple[Turn, ...] = ()
    seats: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """The number of completion tokens, including an environment's."""
        return len(self.token_ids) // 4

    @property
    def drawn(self) -> int:
        """The number of tokens that samplers drew."""
        return sum(turn.end - turn.start for turn in self.turns) if self.turns else self.length


class TrainGroup(msgspec.Struct, frozen=True):
    prompt_token_ids: tuple[int, ...]
    rollouts: tuple[TrainRollout, ...]


class Train(msgspec.Struct, frozen=True, tag=True):
    """Take one learner step on these groups. `lineage` is the digest of all batches up to this one. `learning_rate`
    replaces the configured peak of the learning rate."""

    step: int
    groups: tuple[TrainGroup, ...]
    lineage: bytes = b""
    learning_rate: float | None = None


class Saved(msgspec.Struct, frozen=True):
    """The newest step whose checkpoint this process has written, and why the last save failed, or ""."""

    step: int | None = None
    fault: str = ""


class Trained(msgspec.Struct, frozen=True):
    """Figures of the step, by TRL's names where TRL has one. A fault in `saved` is reported once, here or in the answer
    to Flush. An alarm whose reaction is "stop" asks the node to end the run. `withheld`: for each
    sampler, the number of rollouts that were not trained on because of its claims. `mismatches`: for each sampler, the
    summed k3 of its tokens that were compared at equal weights, in nats, and their number."""

    metrics: dict[str, float]
    seconds: float
    saved: Saved = Saved()
    alarms: tuple[Alarm, ...] = ()
    withheld: dict[str, int] = {}
    mismatches: dict[str, tuple[float, float]] = {}


class AuditRollout(msgspec.Struct, frozen=True):
    """One rollout to draw again; arrays as in types.Rollout. Without a seed it was drawn greedily."""

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
    """The errors of log-probs and the margins of draws of each rollout, in nats (audit/auditor.py): float32 [tokens].
    Both are empty if there is no memory for second weights. `exact`: computed in float32."""

    errors: tuple[bytes, ...] = ()
    margins: tuple[bytes, ...] = ()
    exact: bool = True
    seconds: float = 0.0


class Stage(msgspec.Struct, frozen=True, tag=True):
    """Write the weights into the staging file, as bf16 in layout order."""


class Save(msgspec.Struct, frozen=True, tag=True):
    """Copy model, optimiser and generators as they are after `step` steps, and write the copy to `directory` while
    training goes on. Done is sent when the copy is taken, after waiting for an earlier save. The directory appears
    whole or not at all."""

    directory: str
    step: int


class Flush(msgspec.Struct, frozen=True, tag=True):
    """Wait until no checkpoint is being written."""


class Done(msgspec.Struct, frozen=True):
    """The command was carried out."""


Command = Prepare | Train | Audit | Stage | Save | Flush
