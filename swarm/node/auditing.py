"""The learner's side of the audit: keeps the weights of published versions, and has the trainer draw again with them.

The weights of a version are its published file under a second name, as long as a batch may hold rollouts of it. That
copies no bytes; Training stages into a new file as long as the name exists. A batch is looked at before it is taken, so
that what a caught sampler gave can be drawn again by others, and the journal never holds a batch with it.

A caught sampler has a file with the evidence in RUN_DIR/caught. It outlives the process, and the sampler is barred as
long as it is there: `echo-node set let_in=NODE` removes it. So has one that the run's owner refuses.
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
from swarm.learner.messages import Audited, AuditRollout
from swarm.node.rundir import write_json
from swarm.rollout.plane.episodes import part_of, reads_of
from swarm.rollout.plane.leases import MAX_NODES, Group, Outcomes, Sample, seat_seed
from swarm.types import NodeId, Rollout, Span, Turn, VersionId

TIME_SHARE = 0.015
"""Of the time of all steps, for samplers that are neither new nor suspicious: with those that are it is to be 2 %."""
NEW_TIME_SHARE = 0.1  # For those that are: a run begins with newcomers alone
CLASSES = Path(__file__).parents[1] / "audit" / "classes.toml"
CAUGHT = "caught"
REFUSED = "refused by this run's owner"

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


def bar_file(run_dir: Path, node: NodeId) -> Path:
    return run_dir / CAUGHT / f"{node}.json"


def note_refused(run_dir: Path, node: NodeId, *, step: int) -> None:
    """Keep for later lives that the owner refuses a sampler. Blocking."""
    (run_dir / CAUGHT).mkdir(exist_ok=True)
    known = {"node": node, "why": REFUSED, "detector": "owner", "step": step, "engine": ""}
    write_json(bar_file(run_dir, node), {**known, "audited_rollouts": 0, "evidence": []})


@dataclass(frozen=True, slots=True)
class Chosen:
    """A rollout to be drawn again, or a turn of an episode, by its `name`. Its sampler is new or suspicious if all of
    its rollouts are, `in_full`."""

    name: str
    node: NodeId
    prompt_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    rollout: Rollout
    seed: int
    in_full: bool

    def past_its_end(self) -> int:
        """Return how many tokens follow the first one that ends an answer."""
        tokens = self.rollout.tokens()
        end = next((i for i, token in enumerate(tokens) if token in self.stop_token_ids), len(tokens))
        return max(0, len(tokens) - end - 1)

    def described(self, missed: int, distance: float) -> dict[str, Any]:
        """Return it as evidence, with all that drawing it again takes but the weights."""
        return {
            "rollout": self.name,
            "version": ", ".join(str(span.version) for span in self.rollout.spans),
            "seed": self.seed,
            "missed_tokens": missed,
            "distance_nats": distance,
            "prompt_token_ids": self.prompt_token_ids,
            "token_ids": list(array("i", self.rollout.token_ids)),
            "logprobs": list(array("f", self.rollout.logprobs)),
        }


class Auditing:
    """Weights are kept in `directory`; `audit` is the trainer's. `class_of` names the class of a sampler's engine.
    Where a failed reward `redraws` a sample from another seed, answers from before a restart are left out."""

    def __init__(
        self,
        directory: Path,
        auditor: Auditor,
        audit: Audit,
        *,
        class_of: Callable[[NodeId], str],
        redraws: bool = False,
        emit: Callable[..., None],
        say: Callable[[str], None],
    ) -> None:
        self._directory = directory
        self._auditor = auditor
        self._audit = audit
        self._class_of = class_of
        self._redraws = redraws
        self._emit = emit
        self._say = say
        self._seen: set[tuple[str, NodeId]] = set()
        self._passed_over = False
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
        """Return what of the batch is to be audited and has not been."""
        drawn: defaultdict[tuple[str, NodeId], list[tuple[Group, Sample, Rollout, Turn]]] = defaultdict(list)
        for group in batch:
            for sample in group.samples:
                rollout = sample.rollout
                assert rollout is not None
                whole = Turn(start=0, end=rollout.length, node=sample.author or "")
                for turn in rollout.turns or (whole,):
                    drawn[rollout.rollout_id, NodeId(turn.node)].append((group, sample, rollout, turn))
        self._seen &= drawn.keys()
        found: list[Chosen] = []
        chosen = Counter[NodeId]()
        room = self._room()  # For which of a newcomer's rollouts is secret
        for (name, node), parts in sorted(drawn.items(), key=lambda one: self._auditor.drawn(one[0][0])):
            if (name, node) in self._seen or (self._redraws and parts[0][1].restored):
                continue
            has_time = sum(chosen.values()) < room
            share = self._auditor.share(node, self._class_of(node), chosen=chosen[node], has_time=has_time)
            if self._may_spend(share) and self._auditor.drawn(name) < share:
                chosen[node] += 1
                for group, sample, rollout, turn in parts:
                    reads, stops = reads_of(rollout, turn, group.prompt.token_ids), group.rules.stop_token_ids
                    seed = seat_seed(sample.spec.seed, turn.seat)
                    found.append(Chosen(name, node, reads, stops, part_of(rollout, turn), seed, in_full=share == 1))
        return sorted(found, key=lambda one: one.name)

    async def look(self, chosen: Sequence[Chosen]) -> dict[NodeId, str]:
        """Have these drawn again. Return who is to be barred, and why."""
        self._auditor.settle()
        by_version: defaultdict[VersionId, list[tuple[Chosen, Span]]] = defaultdict(list)
        for one in chosen:
            self._seen.add((one.name, one.node))
            for span in one.rollout.spans:
                by_version[span.version].append((one, span))
        sums: defaultdict[tuple[str, NodeId], tuple[int, int, float]] = defaultdict(lambda: (0, 0, 0.0))
        exact = True
        for version, parts in sorted(by_version.items()):
            found = await self._draw_again(version, parts)
            exact = exact and found.exact
            for (one, span), missed, distance in zip(parts, found.missed, found.distances, strict=False):
                tokens, more, nats = sums[one.name, one.node]
                length = span.end - span.start
                sums[one.name, one.node] = (tokens + length, more + missed, nats + distance * length)
        self.audited += len(sums)
        caught: dict[NodeId, str] = {}
        past = Counter[tuple[str, NodeId]]()
        for one in chosen:
            past[one.name, one.node] += one.past_its_end()
        # Of all that a node drew of an episode together: a turn may be a token, which says little.
        for key, one in {(one.name, one.node): one for one in chosen}.items():
            tokens, missed, nats = sums[key]
            if not tokens:
                continue
            found_of = (tokens, min(tokens, missed + past[key]), nats / tokens)
            verdict = self._note(one, *found_of, self._class_of(one.node) if exact else "")
            if verdict is not None and not verdict.suspect:
                why = f"barred: its {verdict.detector} are not those of the weights that it names"
                caught[one.node] = why
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
                self._say(f"sampler {node} leaves many leases unanswered: it gets one sample at a time")
                found.append(node)
        return found

    def let_in(self, node: NodeId) -> bool:
        """Forget what is known of a sampler, as an operator wants. Return whether anything was."""
        self._against.pop(node, None)
        return self._auditor.forget(node)

    # -- parts -----------------------------------------------------------------------------------------------

    def _room(self) -> float:
        """Return how many rollouts of newcomers there is time for."""
        left_s = NEW_TIME_SHARE * self.trained_s - (self.spent_s - self.sampled_s)
        return left_s * self.audited / self.spent_s if self.spent_s else 0.0

    def _may_spend(self, share: float) -> bool:
        """What is audited in full has another purse: nobody could behave well until newcomers have emptied this one,
        and then go unseen."""
        return share == 1 or self.sampled_s <= TIME_SHARE * self.trained_s

    async def _draw_again(self, version: VersionId, parts: Sequence[tuple[Chosen, Span]]) -> Audited:
        """Return what of each part of a rollout is not what the version draws; nothing if that cannot be had."""
        found, path = Audited(), self.place(version)
        if path.exists():
            # Not cancelled with the wait for a batch: that would kill the trainer.
            found = await asyncio.shield(self._audit(path, tuple(self._asked(*part) for part in parts)))
        self.spent_s += found.seconds
        self.sampled_s += found.seconds * sum(not one.in_full for one, _ in parts) / len(parts)
        if not found.missed:
            self._emit("unaudited", version=str(version), rollouts=len(parts), step=self.step)
            if not self._passed_over:
                self._say(
                    f"{len(parts)} rollouts cannot be audited: the weights of version {version} are not kept any more, "
                    "or do not fit beside the trainer's; later ones are in events.jsonl, as unaudited"
                )
            self._passed_over = True
        return found

    def _asked(self, one: Chosen, span: Span) -> AuditRollout:
        """A version drew its part of a rollout with all before it as the prompt, also what another version drew."""
        tokens, start = one.rollout.token_ids, 4 * span.start
        return AuditRollout(
            prompt_token_ids=(*one.prompt_token_ids, *array("i", tokens[:start])),
            token_ids=tokens[start : 4 * span.end],
            logprobs=one.rollout.logprobs[start : 4 * span.end],
            seed=one.seed,
            margin=self._auditor.calibration(self._class_of(one.node)).margin,
        )

    def _note(self, one: Chosen, tokens: int, missed: int, distance: float, class_name: str) -> Caught | None:
        finding = Finding(rollout_id=one.name, tokens=tokens, missed=missed, distance=distance)
        verdict = self._auditor.note(one.node, class_name, finding)
        if missed or distance > self._auditor.calibration(class_name).distance:
            self._remember(one, missed, distance)
        if verdict is not None:
            self._say_of(verdict)
        return verdict

    def _remember(self, one: Chosen, missed: int, distance: float) -> None:
        self._against.setdefault(one.node, deque(maxlen=KEPT_EVIDENCE)).append(one.described(missed, distance))
        if len(self._against) > MAX_NODES:
            del self._against[next(iter(self._against))]

    def _say_of(self, verdict: Caught) -> None:
        if verdict.suspect:
            engine = self._class_of(verdict.node) or "that is not known"
            what = f"its {verdict.detector} are off, and what honest engines of class {engine} do was never measured"
            self._say(f"sampler {verdict.node} is suspect: {what}. Its rollouts are trained on")
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
        path = bar_file(self._directory.parent, verdict.node)
        path.parent.mkdir(exist_ok=True)
        if len(_files(self._directory.parent)) >= MAX_NODES:
            return  # Keys cost nothing: theirs must not fill the disk. A restart knows no more of this one.
        evidence = [one for one in self._against.get(verdict.node, ()) if one["rollout"] in verdict.rollouts]
        known = {"node": verdict.node, "why": why, "detector": verdict.detector, "step": self.step}
        engine = self._class_of(verdict.node)
        write_json(path, {**known, "engine": engine, "audited_rollouts": verdict.audited, "evidence": evidence})
