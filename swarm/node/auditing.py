"""The learner's side of the audit: keeps the weights of published versions, and has the trainer draw again with them.

The weights of a version are its published file under a second name, as long as a batch may hold rollouts of it. That
copies no bytes; Training stages into a new file as long as the name exists. A batch is looked at before it is taken, so
that what a caught sampler gave can be drawn again by others, and the journal never holds a batch with it.

A caught sampler has a file with the evidence in RUN_DIR/caught. It outlives the process, and the sampler is barred as
long as it is there: `echo-node audit --let-in NODE` removes it.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from swarm.audit.auditor import KEPT_EVIDENCE, Auditor, Calibration, Caught, Finding
from swarm.errors import UserError
from swarm.learner.messages import Audited, AuditRollout
from swarm.node.rundir import write_json
from swarm.rollout.plane.leases import MAX_NODES, Group, Outcomes
from swarm.types import NodeId, Rollout, VersionId

TIME_SHARE = 0.015
"""Of the time of all steps, for samplers that are neither new nor suspicious: with those that are it is to be 2 %."""
CLASSES = Path(__file__).parents[1] / "audit" / "classes.toml"
CAUGHT = "caught"

Audit = Callable[[Path, tuple[AuditRollout, ...]], Awaitable[Audited]]


def measured_classes() -> dict[str, Calibration]:
    """Return what honest samplers of each class do, as far as that was measured."""
    return msgspec.toml.decode(CLASSES.read_bytes(), type=dict[str, Calibration])


def barred_in(run_dir: Path) -> dict[NodeId, str]:
    """Return the samplers that were caught in this run and not let in again, and why. Blocking."""
    return {NodeId(path.stem): str(json.loads(path.read_text())["why"]) for path in _files(run_dir)}


def evidence_in(run_dir: Path) -> list[dict[str, Any]]:
    """Return what is known of each caught sampler, oldest first. Blocking."""
    found = [json.loads(path.read_text()) for path in _files(run_dir)]
    return sorted(found, key=lambda one: (one["step"], one["node"]))


def _files(run_dir: Path) -> list[Path]:
    return sorted((run_dir / CAUGHT).glob("*.json"))


@dataclass(frozen=True, slots=True)
class Chosen:
    """A rollout to be drawn again, of one version alone."""

    node: NodeId
    prompt_token_ids: tuple[int, ...]
    rollout: Rollout
    seed: int
    in_full: bool = True
    """Its sampler is new or suspicious, so that all of its rollouts are drawn again."""

    @property
    def version(self) -> VersionId:
        return self.rollout.spans[0].version

    def described(self, missed: int, distance: float) -> dict[str, Any]:
        """Return it as evidence, with all that drawing it again takes but the weights."""
        return {
            "rollout": self.rollout.rollout_id,
            "version": str(self.version),
            "seed": self.seed,
            "missed_tokens": missed,
            "distance_nats": distance,
            "prompt_token_ids": self.prompt_token_ids,
            "token_ids": list(array("i", self.rollout.token_ids)),
            "logprobs": list(array("f", self.rollout.logprobs)),
        }


class Auditing:
    """Weights are kept in `directory`; `audit` is the trainer's. `class_of` names the class of a sampler's engine."""

    def __init__(
        self,
        directory: Path,
        auditor: Auditor,
        audit: Audit,
        *,
        class_of: Callable[[NodeId], str],
        emit: Callable[..., None],
        say: Callable[[str], None],
    ) -> None:
        self._directory = directory
        self._auditor = auditor
        self._audit = audit
        self._class_of = class_of
        self._emit = emit
        self._say = say
        self._seen: set[str] = set()
        self._against: dict[NodeId, deque[dict[str, Any]]] = {}
        self.audited = 0
        self.step = 0
        self.spent_s = self.sampled_s = self.trained_s = 0.0
        """Seconds of all audits of this life, of those of a share of somebody's rollouts, and of all learner steps,
        which the caller counts."""

    def place(self, version: VersionId) -> Path:
        """Return where the weights of a version are to be kept."""
        self._directory.mkdir(exist_ok=True)
        return self._directory / f"{version}.bin"

    def prune(self, oldest: int) -> None:
        """Give up the weights of versions before `oldest`."""
        for path in self._directory.glob("*.bin"):
            if int(path.stem.partition(".")[2]) < oldest:
                path.unlink()

    def figures(self) -> dict[str, float]:
        """Return figures of a step: rollouts drawn again in this life, and which share of its time that took."""
        share = self.spent_s / (self.spent_s + self.trained_s) if self.spent_s else 0.0
        return {"audit/rollouts": float(self.audited), "audit/time_share": share}

    def unseen(self, batch: Sequence[Group]) -> list[Chosen]:
        """Return what of the batch is to be audited and has not been. Rollouts of several versions are left out."""
        names = {s.rollout.rollout_id for group in batch for s in group.samples if s.rollout}
        self._seen &= names
        found: list[Chosen] = []
        chosen = Counter[NodeId]()
        for group in batch:
            for sample in group.samples:
                rollout, node = sample.rollout, sample.author
                assert rollout is not None
                assert node is not None
                if rollout.rollout_id in self._seen or len(rollout.spans) > 1:
                    continue
                share = self._auditor.share(node, self._class_of(node), chosen=chosen[node])
                if self._may_spend(share) and self._auditor.is_chosen(rollout.rollout_id, share):
                    found.append(Chosen(node, group.prompt.token_ids, rollout, sample.spec.seed, share == 1))
                    chosen[node] += 1
        return found

    async def look(self, chosen: Sequence[Chosen]) -> dict[NodeId, str]:
        """Have these drawn again. Return who is to be barred, and why."""
        self._auditor.settle()
        by_version: defaultdict[VersionId, list[Chosen]] = defaultdict(list)
        for one in chosen:
            self._seen.add(one.rollout.rollout_id)
            by_version[one.version].append(one)
        caught: dict[NodeId, str] = {}
        for version, some in sorted(by_version.items()):
            if not (path := self.place(version)).exists():
                continue
            found = await self._audit(path, tuple(self._asked(one) for one in some))
            self.spent_s += found.seconds
            self.sampled_s += found.seconds * sum(not one.in_full for one in some) / len(some)
            self.audited += len(found.missed)
            for one, missed, distance in zip(some, found.missed, found.distances, strict=False):
                verdict = self._note(one, missed, distance, self._class_of(one.node) if found.exact else "")
                if verdict is not None and not verdict.suspect:
                    caught[one.node] = why = (
                        f"barred: its {verdict.detector} are not those of the weights that it names"
                    )
                    self._say(f"sampler {one.node} is {why}; echo-node audit shows the evidence")
                    await asyncio.to_thread(self._write, verdict, why)
        return caught

    def droppers(self, outcomes: Mapping[NodeId, Outcomes]) -> list[NodeId]:
        """Return who leaves too many leases unanswered."""
        found = []
        for node, one in outcomes.items():
            verdict = self._auditor.note_leases(node, answered=one.answered, dropped=one.dropped)
            if verdict is not None:
                self._say_of(verdict)
                found.append(node)
        return found

    def let_in(self, node: NodeId) -> None:
        """Forget what is known of a sampler, as an operator wants. UserError if it was not caught."""
        if self._file(node) not in _files(self._directory.parent):
            raise UserError(f"node {node} was not caught in this run: `echo-node audit` names those that were")
        self._auditor.forget(node)
        self._against.pop(node, None)
        self._file(node).unlink(missing_ok=True)

    # -- parts -----------------------------------------------------------------------------------------------

    def _may_spend(self, share: float) -> bool:
        """Newcomers are audited whatever it costs, and out of another purse: nobody could behave well until they have
        emptied it, and then go unseen."""
        return share == 1 or self.sampled_s <= TIME_SHARE * self.trained_s

    def _asked(self, one: Chosen) -> AuditRollout:
        return AuditRollout(
            prompt_token_ids=one.prompt_token_ids,
            token_ids=one.rollout.token_ids,
            logprobs=one.rollout.logprobs,
            seed=one.seed,
            margin=self._auditor.calibration(self._class_of(one.node)).margin,
        )

    def _note(self, one: Chosen, missed: int, distance: float, class_name: str) -> Caught | None:
        rollout = one.rollout
        finding = Finding(rollout_id=rollout.rollout_id, tokens=rollout.length, missed=missed, distance=distance)
        verdict = self._auditor.note(one.node, class_name, finding)
        if missed or distance > self._auditor.calibration(class_name).distance:
            self._remember(one, missed, distance)
        if verdict is not None:
            self._say_of(verdict)
        return verdict

    def _remember(self, one: Chosen, missed: int, distance: float) -> None:
        if one.node in self._against or len(self._against) < MAX_NODES:
            kept = self._against.setdefault(one.node, deque(maxlen=KEPT_EVIDENCE))
            kept.append(one.described(missed, distance))

    def _say_of(self, verdict: Caught) -> None:
        self._emit(
            "suspect" if verdict.suspect else "caught",
            node=verdict.node,
            detector=verdict.detector,
            rollouts=list(verdict.rollouts),
            audited=verdict.audited,
            step=self.step,
            engine=self._class_of(verdict.node),
        )

    def _write(self, verdict: Caught, why: str) -> None:
        path = self._file(verdict.node)
        path.parent.mkdir(exist_ok=True)
        evidence = [one for one in self._against.get(verdict.node, ()) if one["rollout"] in verdict.rollouts]
        if len(_files(self._directory.parent)) >= MAX_NODES:  # Keys cost nothing: theirs must not fill the disk
            evidence = []
        known = {"node": verdict.node, "why": why, "detector": verdict.detector, "step": self.step}
        engine = self._class_of(verdict.node)
        write_json(path, {**known, "engine": engine, "audited_rollouts": verdict.audited, "evidence": evidence})

    def _file(self, node: NodeId) -> Path:
        return self._directory.with_name(CAUGHT) / f"{node}.json"
