"""Small valid values for tests: each function fills in what a test does not care about."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy

from swarm.broadcast.encoding import by_threads
from swarm.broadcast.publishing import PublishedVersions
from swarm.broadcast.store.store import HeldVersion
from swarm.broadcast.version.manifest import AdapterShape, Dtype, Layout, ModelFile, TensorSpec
from swarm.net.signing import SigningKey, swarm_id_of
from swarm.rollout.journal.entries import Entry
from swarm.rollout.journal.journal import Journal
from swarm.rollout.messages import Answer
from swarm.rollout.plane.begun import begun_name
from swarm.rollout.plane.effects import Effect, Granted, Judged, Refused, ScoreWanted
from swarm.rollout.plane.episodes import EpisodeRules
from swarm.rollout.plane.groups import Group, LeaseTable, Sample
from swarm.rollout.plane.plane import PlaneRules, RolloutPlane
from swarm.types import (
    Finish,
    GroupId,
    Lease,
    NodeId,
    Prompt,
    Purpose,
    Rollout,
    SampleSpec,
    SamplingRules,
    Score,
    Span,
    Verdict,
    VersionId,
)

VOCAB = 14
STOP = 2
ALICE, BOB = NodeId("alice"), NodeId("bob")
KEY = SigningKey.from_bytes(bytes(range(32)))
OTHER_KEY = SigningKey.from_bytes(bytes(range(1, 33)))
RULES = SamplingRules(temperature=1.0, max_new_tokens=6, stop_token_ids=(STOP,))


def v(version: int, incarnation: int = 0) -> VersionId:
    return VersionId(incarnation=incarnation, version=version)


def ints(*values: int) -> bytes:
    return array("i", values).tobytes()


def floats(*values: float) -> bytes:
    return array("f", values).tobytes()


def prompt(number: int = 0) -> Prompt:
    return Prompt(prompt_id=f"p{number}", text=f"{number}=", answer=str(number), token_ids=(1, 3, 13))


def lease(
    *,
    group_id: str = "t0",
    indices: Sequence[int] = (0, 1),
    min_version: VersionId | None = None,
    purpose: Purpose = "train",
    rules: SamplingRules = RULES,
) -> Lease:
    return Lease(
        purpose=purpose,
        group_id=group_id,
        prompt_token_ids=(1, 3, 13),
        samples=tuple(SampleSpec(index=i, seed=i) for i in indices),
        rules=rules,
        min_version=min_version or v(0),
        time_limit_s=60.0,
    )


def rollout(
    *,
    group_id: str = "t0",
    index: int = 0,
    tokens: Sequence[int] = (3, 4, 5, STOP),
    version: int = 0,
    spans: Sequence[Span] | None = None,
    finish: Finish = "stop",
) -> Rollout:
    """A well-formed answer under `lease()`."""
    whole = (Span(version=v(version), start=0, end=len(tokens)),)
    return Rollout(
        group_id=group_id,
        index=index,
        token_ids=ints(*tokens),
        logprobs=floats(*(-0.5 for _ in tokens)),
        spans=whole if spans is None else tuple(spans),
        finish=finish,
    )


def failed_rollout(*, group_id: str = "t0", index: int = 0, reason: str = "out of memory") -> Rollout:
    return Rollout(
        group_id=group_id,
        index=index,
        token_ids=b"",
        logprobs=b"",
        spans=(),
        finish="failed",
        reason=reason,
    )


def ready_group(version: int, order: int, *, samples: int = 1) -> Group:
    """A group of `version` whose samples are all answered and scored."""
    group_id = GroupId(f"t{order}")
    done = [
        Sample(
            seed=i,
            rollout=rollout(group_id=group_id, index=i, version=version),
            score=Score(reward=0.5, exact=False),
        )
        for i in range(samples)
    ]
    return Group(
        group_id=group_id,
        order=order,
        purpose="train",
        prompt=prompt(order),
        rules=RULES,
        min_version=v(version),
        bound=2,
        samples=done,
        answered=samples,
        oldest_answer=version,
    )


def open_group(table: LeaseTable, number: int, *, purpose: Purpose = "train", version: int = 0, size: int = 2) -> Group:
    group = Group(
        group_id=GroupId(f"t{number}"),
        order=number,
        purpose=purpose,
        prompt=prompt(number),
        rules=RULES,
        min_version=v(version),
        bound=2,
    )
    return table.open(group, size)


def new_plane(
    *,
    max_staleness: int = 2,
    groups: int = 2,
    size: int = 2,
    newest: int | None = 0,
    eval_samples: int = 1,
    episodes: EpisodeRules | None = None,
) -> RolloutPlane:
    """A plane that has published `newest`, of episodes if their rules are given."""
    rules = PlaneRules(
        run_seed=7,
        max_staleness=max_staleness,
        groups_per_step=groups,
        group_size=size,
        eval_samples=eval_samples,
        rules=RULES,
        vocab_size=VOCAB,
        beat_s=1.0,
        lease_time_limit_s=60.0,
        episodes=episodes,
    )
    plane = RolloutPlane(rules, prompts=prompt)
    if newest is not None:
        plane.published(v(newest))
    return plane


def ask(plane: RolloutPlane, node: NodeId, held: int, capacity: int, *, now: float = 0.0) -> tuple[Lease, ...]:
    """The leases that the plane grants; fails if it refuses."""
    *_, answer = plane.ask(node, v(held), capacity, now=now)
    assert isinstance(answer, Granted), answer
    return answer.leases


def refusal(plane: RolloutPlane, node: NodeId, held: int, capacity: int = 1, *, now: float = 0.0) -> str:
    """Why the plane grants nothing; fails if it grants something."""
    *_, answer = plane.ask(node, v(held), capacity, now=now)
    assert isinstance(answer, Refused), answer
    return answer.reason


def answering(to: Lease, drawn: Rollout, turn: int | None = None) -> Answer:
    """`drawn` as the answer to a sample of the lease, or a turn of its episode: the first one under it."""
    attempts = {spec.index: spec.attempt for spec in to.samples}
    first = to.episode.turn if to.episode is not None else begun_name(to.begun)
    return Answer(drawn, attempts.get(drawn.index, 0), first if turn is None else turn)


def answers(granted: Sequence[Lease], version: int) -> list[tuple[Lease, Rollout]]:
    """One good rollout by `version` for each sample of the leases."""
    return [
        (one, rollout(group_id=one.group_id, index=spec.index, version=version))
        for one in granted
        for spec in one.samples
    ]


def verdict_of(effects: Sequence[Effect]) -> Verdict:
    (judged,) = [effect for effect in effects if isinstance(effect, Judged)]
    return judged.verdict


def submit_and_score(
    plane: RolloutPlane, node: NodeId, granted: Sequence[Lease], version: int, *, now: float = 0.0
) -> list[Effect]:
    """Answer every sample of the leases and score each answer; what the plane said of it."""
    effects: list[Effect] = []
    for one, drawn in answers(granted, version):
        said = plane.submit(node, answering(one, drawn), now=now)
        effects += said
        for wanted in [effect for effect in said if isinstance(effect, ScoreWanted)]:
            effects += plane.scored(wanted.group_id, wanted.index, Score(reward=1.0, exact=True))
    return effects


def layout(*tensors: tuple[str, Dtype, tuple[int, ...]], files: Sequence[ModelFile] = ()) -> Layout:
    specs = tuple(TensorSpec(name=name, dtype=dtype, shape=shape) for name, dtype, shape in tensors)
    return Layout(tensors=specs, files=tuple(files))


MIXED_LAYOUT = layout(
    ("embed", "BF16", (700, 512)),
    ("layer.0", "BF16", (300, 1024)),
    ("scale", "F32", (40_000,)),
    ("steps", "I64", (3,)),
)
"""1.5 MB in three dtypes: several regions of each kind, several chunks."""


ADAPTED_LAYOUT = Layout(
    tensors=(
        TensorSpec(name="embed.weight", dtype="BF16", shape=(700, 512), frozen=True),
        TensorSpec(name="layer.weight", dtype="BF16", shape=(300, 1024), frozen=True),
        TensorSpec(name="layer.lora_A.weight", dtype="BF16", shape=(16, 1024)),
        TensorSpec(name="layer.lora_B.weight", dtype="BF16", shape=(300, 16)),
        TensorSpec(name="mask", dtype="U8", shape=(70_001,), frozen=True),
    ),
    files=(),
    adapter=AdapterShape(rank=16, alpha=32.0, base=bytes(32)),
)
"""An adapter of 42 kB in a stream of 1.4 MB, with something frozen on both sides of it."""


def weights_of(what: Layout, seed: int) -> bytes:
    """Weights that compress as real ones do: bf16 exponents repeat, everything else is noise."""
    draw = numpy.random.default_rng(seed)
    parts: list[bytes] = []
    for tensor in what.tensors:
        if tensor.dtype == "BF16":
            values = draw.normal(0, 0.02, tensor.nbytes // 2).astype("<f4")
            parts.append(values.view("<u2")[1::2].tobytes())
        else:
            parts.append(draw.bytes(tensor.nbytes))
    return b"".join(parts)


CHUNK_BYTES = 256 * 1024


def publish(directory: Path, what: Layout, weights: bytes, *, version: int = 0) -> HeldVersion:
    """`weights` published by KEY from files under `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    staging = directory / "staging.bin"
    staging.write_bytes(weights)
    with ThreadPoolExecutor(2) as pool:
        published = PublishedVersions(directory / "versions", KEY, what)
        return published.publish(staging, v(version), CHUNK_BYTES, by_threads(pool))


SWARM_OF_KEY = swarm_id_of(KEY.public_bytes)


class ListJournal(Journal):
    """Records in memory, committed at once."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.fault = ""
        self.pending_bytes = 0

    async def write(self, entries: Sequence[Entry]) -> None:
        self.entries += entries

    def enqueue(self, entries: Sequence[Entry]) -> None:
        self.entries += entries
