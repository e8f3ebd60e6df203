"""The learner's side of the audit: keeps the weights of published versions, and has the trainer draw rollouts again
with them.

The weights of a version are kept by giving its published file a second name, for as long as a batch may hold rollouts
of it. This copies no bytes: while the second name exists, Training stages into a new file. A batch is audited before it
is taken, so that other samplers can redraw a caught sampler's rollouts and the journal never holds a batch with them.

The learner does not believe the log-probs of a sampler whose class is unmeasured, and trains with recomputed ones.

When a sampler is caught, a file with the evidence is written to RUN_DIR/caught. The sampler is barred as long as the
file is there, also after a restart; `echo-node set let_in=NODE` removes it. The same file is written when the owner
refuses a sampler.
"""

from __future__ import annotations

import asyncio
import json
import os
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from swarm.audit.auditor import ANY, CUT, HALF, MIN_ROLLOUTS, Auditor, Caught, ErrorLimits, Finding
from swarm.bounded import Bounded
from swarm.errors import UserError
from swarm.learner.messages import Audited, AuditRollout
from swarm.rollout.plane.effects import AuditResult
from swarm.rollout.plane.episodes import part_of, reads_of, seat_seed
from swarm.rollout.plane.groups import Group, Sample
from swarm.rollout.plane.nodes import MAX_NODES
from swarm.run.directory import write_json
from swarm.types import GroupId, NodeId, Rollout, Span, Turn, VersionId

TIME_SHARE = 0.015
"""Share of the time of all steps that may be spent on samplers that are neither new nor suspicious. With the others it
should come to 2 %."""
NEW_TIME_SHARE = 0.1  # The same for newcomers; at the start of a run every sampler is one
CLASSES = Path(__file__).with_name("classes.toml")
KEPT_EVIDENCE = 16  # Rollouts kept for each sampler: the last ones that differ
MIN_DIFFERENCE = 1e-3  # Nats a token in the mean: a rollout that differs by less is not kept as evidence
CAUGHT = "caught"
REFUSED = "refused by this run's owner"

Replay = Callable[[Path, tuple[AuditRollout, ...], bool], Awaitable[Audited]]
Floats = NDArray[np.float32]
EMPTY = np.zeros(0, np.float32)


def measured_classes() -> dict[str, ErrorLimits]:
    """Return the limits of each class that was measured, by us or by this machine's owner. Raise UserError if the
    owner's file cannot be read."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    found: dict[str, ErrorLimits] = {}
    for path in (CLASSES, config / "echo-node" / CLASSES.name):
        try:
            found |= msgspec.toml.decode(path.read_bytes(), type=dict[str, ErrorLimits])
        except FileNotFoundError:
            continue
        except (OSError, msgspec.MsgspecError) as error:
            raise UserError(f"cannot read the measured classes of engines in {path}: {error}") from error
    return found


def barred_in(run_dir: Path) -> dict[NodeId, str]:
    """Return the samplers that are barred from this run, with the reasons. Blocking."""
    return {NodeId(path.stem): str(json.loads(path.read_text())["why"]) for path in _files(run_dir)}


def evidence_in(run_dir: Path) -> list[dict[str, Any]]:
    """Return the record of each barred sampler, oldest first. Blocking."""
    found = [json.loads(path.read_text()) for path in _files(run_dir)]
    return sorted(found, key=lambda one: (one["step"], one["node"]))


def _files(run_dir: Path) -> list[Path]:
    return sorted((run_dir / CAUGHT).glob("*.json"))


def bar_file(run_dir: Path, node: NodeId) -> Path:
    return run_dir / CAUGHT / f"{node}.json"


def write_refusal(run_dir: Path, node: NodeId, *, step: int) -> None:
    """Write the file that keeps a sampler barred because the owner refuses it. Blocking."""
    (run_dir / CAUGHT).mkdir(exist_ok=True)
    known = {"node": node, "why": REFUSED, "detector": "owner", "step": step, "engine": ""}
    write_json(bar_file(run_dir, node), {**known, "audited_rollouts": 0, "evidence": []})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRollout:
    """A rollout to draw again, or one turn of an episode, which begins at token `start` of the `whole` rollout. `seed`
    is None if it was drawn greedily. `in_full`: all rollouts of this sampler are audited, because it is new, suspicious
    or of an unmeasured class. `side` as in Finding."""

    node: NodeId
    start: int
    prompt_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    rollout: Rollout
    whole: Rollout
    seed: int | None
    side: int
    in_full: bool

    @property
    def name(self) -> str:
        return self.whole.rollout_id

    def past_its_end(self) -> int:
        """Return how many tokens follow the first stop token."""
        tokens = self.rollout.tokens()
        end = next((i for i, token in enumerate(tokens) if token in self.stop_token_ids), len(tokens))
        return max(0, len(tokens) - end - 1)

    def described(self, errors: Floats, margins: Floats) -> dict[str, Any]:
        """Return it as evidence: everything that is needed to draw it again, except the weights."""
        return {
            "rollout": self.name,
            "version": ", ".join(str(span.version) for span in self.rollout.spans),
            "seed": self.seed,
            "error_nats": fmean(errors.tolist() or [0.0]),
            "margin_nats": fmean(margins.tolist()),
            "prompt_token_ids": self.prompt_token_ids,
            "token_ids": list(array("i", self.rollout.token_ids)),
            "logprobs": list(array("f", self.rollout.logprobs)),
            "errors": errors.tolist(),
            "margins": margins.tolist(),
        }


@dataclass(frozen=True, slots=True)
class AuditedPart:
    """The tokens of a rollout that its sampler says one version drew, and what the audit found. `exact`: the audit
    computed in float32."""

    chosen: ChosenRollout
    span: Span
    errors: Floats
    margins: Floats
    exact: bool


class Auditing:
    """Keeps weights in `directory`; `replay` has the trainer draw with them. `class_of` names the class of a sampler's
    engine."""

    def __init__(
        self,
        directory: Path,
        auditor: Auditor,
        replay: Replay,
        *,
        class_of: Callable[[NodeId], str],
        emit: Callable[..., None],
        say: Callable[[str], None],
    ) -> None:
        self._directory = directory
        self._auditor = auditor
        self._replay = replay
        self._class_of = class_of
        self._emit = emit
        self._say = say
        self._seen: set[tuple[str, NodeId]] = set()
        self._has_skipped = False
        self._against: Bounded[NodeId, deque[dict[str, Any]]] = Bounded(MAX_NODES)
        self._faults: dict[NodeId, str] = {}
        self.measured: VersionId | None = None
        self.audited = self.step = 0
        self.spent_s = self.sampled_s = self.trained_s = 0.0
        """Seconds since the learner was started: of all audits, of audits of samplers that are not audited in full, and
        of all learner steps, which the caller counts."""

    def place(self, version: VersionId) -> Path:
        """Return the path at which to keep the weights of a version."""
        self._directory.mkdir(exist_ok=True)
        return self._directory / f"{version}.bin"

    def prune(self, oldest: int) -> None:
        """Remove the weights of versions before `oldest`, except the version that is being evaluated."""
        for path in self._directory.glob("*.bin"):
            if int(path.stem.partition(".")[2]) < oldest and path.stem != str(self.measured):
                path.unlink()

    def is_measured(self, node: NodeId) -> bool:
        return self._auditor.is_measured(self._class_of(node))

    def figures(self) -> dict[str, float]:
        """Return figures for metrics: the rollouts audited since the learner was started, and the share of its time
        that this took."""
        share = self.spent_s / (self.spent_s + self.trained_s) if self.spent_s else 0.0
        return {"audit/rollouts": float(self.audited), "audit/time_share": share}

    def select(self, batch: Sequence[Group]) -> list[ChosenRollout]:
        """Return the rollouts of the batch that are to be audited and have not been yet. There are few held-out
        answers, so no time limit applies to them."""
        drawn: defaultdict[tuple[str, NodeId], list[tuple[Group, Sample, Turn]]] = defaultdict(list)
        for group in batch:
            for sample in group.samples:
                for turn in _turns_of(sample):
                    assert sample.rollout is not None
                    drawn[sample.rollout.rollout_id, NodeId(turn.node)].append((group, sample, turn))
        if any(group.purpose == "train" for group in batch):
            self._seen &= drawn.keys()
        found: list[ChosenRollout] = []
        chosen = Counter[NodeId]()
        room = self._newcomer_rollouts()
        # In a secret order: a newcomer cannot know which of its rollouts there is time for.
        for (name, node), parts in sorted(drawn.items(), key=lambda one: self._auditor.drawn(one[0][0])):
            if (name, node) in self._seen:
                continue
            has_time = sum(chosen.values()) < room
            share = self._auditor.share(node, self._class_of(node), chosen=chosen[node], has_time=has_time)
            is_paid = parts[0][0].purpose == "eval" or self._may_spend(share)
            if is_paid and self._auditor.drawn(name) < share:
                chosen[node] += 1
                found += [self._chosen(*part, in_full=share == 1) for part in parts]
        return sorted(found, key=lambda one: one.name)

    async def audit(self, chosen: Sequence[ChosenRollout]) -> AuditResult:
        """Have these rollouts drawn again. The caller bars the samplers that are caught, and trains with the recomputed
        log-probs."""
        result = AuditResult()
        by_version: defaultdict[tuple[VersionId, bool], list[tuple[ChosenRollout, Span]]] = defaultdict(list)
        for one in chosen:
            self._seen.add((one.name, one.node))
            for span in one.rollout.spans:
                # Other engines' log-probs are no more exact than the trainer's fast passes.
                is_fast = not (self.is_measured(one.node) and "/float32/" in self._class_of(one.node))
                by_version[span.version, is_fast].append((one, span))
        found: defaultdict[tuple[str, NodeId], list[AuditedPart]] = defaultdict(list)
        for (version, is_fast), parts in sorted(by_version.items()):
            replayed = await self._draw_again(version, parts, is_fast)
            result.unaudited += 0 if replayed.errors else len(parts)
            for (one, span), errors, margins in zip(parts, replayed.errors, replayed.margins, strict=False):
                own = np.frombuffer(errors, np.float32), np.frombuffer(margins, np.float32)
                found[one.name, one.node].append(AuditedPart(one, span, *own, replayed.exact))
        self.audited += len(found)
        # All turns of an episode that a node drew are judged together: one turn may be a single token.
        for parts_of in found.values():
            await self._judge(parts_of, result)
        return result

    async def is_genuine(self, group: Group, sample: Sample) -> tuple[bool | None, AuditResult]:
        """Return whether an answer is what its seed draws (None if that cannot be computed), and the sampler if this
        catches it."""
        rollout, result = sample.rollout, AuditResult()
        if rollout is None or len(_turns_of(sample)) > 1:
            return None, result
        one = self._chosen(group, sample, _turns_of(sample)[0], in_full=True)
        parts = []
        for span in rollout.spans:
            replayed = await self._draw_again(span.version, [(one, span)], is_fast=True, is_counted=False)
            if not replayed.margins:
                return None, result
            parts.append(AuditedPart(one, span, EMPTY, np.frombuffer(replayed.margins[0], np.float32), replayed.exact))
        margins = np.concatenate([part.margins for part in parts])
        limits = self._auditor.classes.get(self._class_of(one.node), ANY).widened(HALF)
        genuine = float(np.minimum(margins, CUT).sum()) < limits.margin * len(margins) + limits.sum / MIN_ROLLOUTS
        if not genuine:
            await self._judge(parts, result)
        return genuine, result

    def fault_of(self, node: NodeId) -> str:
        """Return what is wrong, for a caught sampler whose engine may only be broken; "" if it was caught before."""
        return self._faults.get(node, "")

    def forgive(self, node: NodeId, why: str) -> bool:
        """Give a caught sampler that has restarted its engine one second chance. Return whether it gets it: not if it
        had one before, or if the reason `why` it is barred is another, such as that the owner refuses it."""
        if not (fault := self.fault_of(node)) or why != _why(fault):
            return False
        self.let_in(node)
        self._faults[node] = ""
        bar_file(self._directory.parent, node).unlink(missing_ok=True)
        return True

    def let_in(self, node: NodeId) -> bool:
        """Forget all that is known about a sampler, as the operator wants. Return whether anything was known."""
        self._against.pop(node, None)
        self._faults.pop(node, None)
        self._seen = {one for one in self._seen if one[1] != node}
        return self._auditor.forget(node)

    # -- parts -----------------------------------------------------------------------------------------------

    def _chosen(self, group: Group, sample: Sample, turn: Turn, *, in_full: bool) -> ChosenRollout:
        rollout = sample.rollout
        assert rollout is not None
        return ChosenRollout(
            node=NodeId(turn.node),
            start=turn.start,
            prompt_token_ids=reads_of(rollout, turn, group.prompt.token_ids),
            stop_token_ids=group.rules.stop_token_ids,
            rollout=part_of(rollout, turn),
            whole=rollout,
            seed=seat_seed(sample.seed, turn.seat) if group.rules.temperature > 0 else None,
            side=_side_of(sample, group),
            in_full=in_full,
        )

    async def _judge(self, parts: list[AuditedPart], result: AuditResult) -> None:
        """Add what the audit found in the parts of one rollout that one node drew, and act on a verdict."""
        one, class_name = parts[0].chosen, self._class_of(parts[0].chosen.node)
        for part in () if one.seed is None or self._auditor.is_measured(class_name) else parts:
            if len(part.errors):
                self._replace(result, part)
        errors = EMPTY if one.seed is None else np.concatenate([part.errors for part in parts])
        margins = np.concatenate([part.margins for part in parts])
        past = sum(chosen.past_its_end() for chosen in {id(part.chosen): part.chosen for part in parts}.values())
        if past:
            margins = np.concatenate([margins[:-past], np.full(past, CUT, np.float32)])
        limits = self._auditor.classes.get(class_name, ANY)
        finding = Finding(errors=errors, margins=margins, side=one.side)
        exact = all(part.exact for part in parts)
        verdict = self._auditor.add(one.node, limits if exact else limits.widened(HALF), finding)
        self._remember(one, errors, margins)
        if verdict is not None:
            why = _why(verdict.what)
            result.caught[one.node] = why
            if len(self._faults) < MAX_NODES:
                self._faults.setdefault(one.node, verdict.what)
            evidence = list(self._against.get(verdict.node, ()))
            self._report(verdict, why, [known["rollout"] for known in evidence])
            await asyncio.to_thread(self._write, verdict, why, evidence)

    @staticmethod
    def _replace(result: AuditResult, part: AuditedPart) -> None:
        one = part.chosen
        name = GroupId(one.whole.group_id), one.whole.index
        held = array("f", result.recomputed[name][1] if name in result.recomputed else one.whole.logprobs)
        claimed = np.frombuffer(one.rollout.logprobs, np.float32)[part.span.start : part.span.end]
        own = array("f", (claimed - part.errors).tobytes())
        held[one.start + part.span.start : one.start + part.span.end] = own
        result.recomputed[name] = one.whole, held.tobytes()

    def _newcomer_rollouts(self) -> float:
        """Return for how many more rollouts of newcomers there is time."""
        left_s = NEW_TIME_SHARE * self.trained_s - (self.spent_s - self.sampled_s)
        return left_s * self.audited / self.spent_s if self.spent_s else 0.0

    def _may_spend(self, share: float) -> bool:
        """Samplers that are audited in full have a budget of their own. With one budget for all, a sampler could behave
        well until newcomers have used it up, and then lie without being audited."""
        return share == 1 or self.sampled_s <= TIME_SHARE * self.trained_s

    async def _draw_again(
        self, version: VersionId, parts: Sequence[tuple[ChosenRollout, Span]], is_fast: bool, *, is_counted: bool = True
    ) -> Audited:
        """Return what the trainer finds for each part; nothing if the weights are gone or do not fit. The time counts
        against the budgets if `is_counted`."""
        found, path = Audited(), self.place(version)
        if path.exists():
            # If the wait for a batch is cancelled, this call goes on: cancelling it would kill the trainer.
            found = await asyncio.shield(self._replay(path, tuple(_audit_rollout(*part) for part in parts), is_fast))
        self.spent_s += found.seconds * is_counted
        self.sampled_s += found.seconds * sum(not one.in_full for one, _ in parts) / len(parts)
        if not found.errors:
            self._emit("unaudited", version=str(version), rollouts=len(parts), step=self.step)
            if not self._has_skipped:
                self._say(
                    f"{len(parts)} rollouts cannot be audited: the weights of version {version} are not kept any more, "
                    "or do not fit in memory with the trainer's; later cases are in events.jsonl, as unaudited"
                )
            self._has_skipped = True
        return found

    def _remember(self, one: ChosenRollout, errors: Floats, margins: Floats) -> None:
        if not max(np.abs(errors).sum(), margins.sum()) > MIN_DIFFERENCE * len(margins):
            return
        self._against.setdefault(one.node, deque(maxlen=KEPT_EVIDENCE)).append(one.described(errors, margins))

    def _report(self, verdict: Caught, why: str, rollouts: Sequence[str]) -> None:
        self._say(f"sampler {verdict.node} is {why}; echo-node audit shows the evidence")
        self._emit(
            "caught",
            node=verdict.node,
            detector=verdict.detector,
            rollouts=rollouts,
            audited=verdict.audited,
            step=self.step,
            engine=self._class_of(verdict.node),
        )

    def _write(self, verdict: Caught, why: str, evidence: list[dict[str, Any]]) -> None:
        path = bar_file(self._directory.parent, verdict.node)
        path.parent.mkdir(exist_ok=True)
        if len(_files(self._directory.parent)) >= MAX_NODES:
            return  # An attacker can create any number of keys. After a restart this one is a newcomer again.
        known = {"node": verdict.node, "why": why, "detector": verdict.detector, "step": self.step}
        engine = self._class_of(verdict.node)
        try:
            write_json(path, {**known, "engine": engine, "audited_rollouts": verdict.audited, "evidence": evidence})
        except OSError as error:
            self._say(f"sampler {verdict.node} is barred only until the learner restarts: {error}")


def _why(fault: str) -> str:
    return f"barred: {fault}"


def _turns_of(sample: Sample) -> tuple[Turn, ...]:
    assert sample.rollout is not None
    return sample.rollout.turns_by(sample.author or "")


def _side_of(sample: Sample, group: Group) -> int:
    rewards = [one.score.reward for one in group.samples if one.score is not None]
    if sample.score is None or not rewards:
        return 0
    above = sample.score.reward - fmean(rewards)
    return int(above > 0) - int(above < 0)


def _audit_rollout(one: ChosenRollout, span: Span) -> AuditRollout:
    """The prompt of a part is everything before it, including what another version drew."""
    tokens, start = one.rollout.token_ids, 4 * span.start
    return AuditRollout(
        prompt_token_ids=(*one.prompt_token_ids, *array("i", tokens[:start])),
        token_ids=tokens[start : 4 * span.end],
        logprobs=one.rollout.logprobs[start : 4 * span.end],
        seed=one.seed,
    )
