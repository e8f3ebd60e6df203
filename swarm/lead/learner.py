"""The learner node: it assembles the network, the rollout plane, the trainer and the loop of learner steps, for a new
run or for one that is resumed."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from swarm.aio import in_thread
from swarm.audit.auditing import Auditing, barred_in, measured_classes
from swarm.audit.auditor import Auditor
from swarm.broadcast.service import BroadcastService
from swarm.broadcast.store.store import newest_head
from swarm.broadcast.version.manifest import read_layout
from swarm.errors import ProtocolError, UserError
from swarm.files import write_atomically
from swarm.join.watch import watch_clocks
from swarm.lead.answering import Answering, control_seed, episode_rules, sampling_rules
from swarm.lead.check import check_model, check_period, check_rewards, reward_pool
from swarm.lead.dials import checked, in_words
from swarm.lead.drawing import arguments, default_count, drawing, other_gpus
from swarm.lead.provisioning import Provisioning
from swarm.lead.publication import ROOM_S, InstallTracker, Publication
from swarm.lead.steps import PAUSE, Steps
from swarm.lead.training import Training
from swarm.learner.messages import Prepared
from swarm.net.hosts import is_loopback, is_private
from swarm.net.server import check_port
from swarm.node.control import control
from swarm.node.hello import card_of, sign_card, what_is_learned
from swarm.node.identity import StateDirectory
from swarm.node.network import EVERYWHERE, NodeNetwork, check_addresses
from swarm.rollout.ahead import PromptsAhead
from swarm.rollout.api import RolloutService
from swarm.rollout.journal.entries import BoundSet
from swarm.rollout.journal.index import require_database
from swarm.rollout.journal.journal import DATABASE, Journal
from swarm.rollout.messages import Beat
from swarm.rollout.plane.effects import ScoreWanted
from swarm.rollout.plane.frontier import CANDIDATES
from swarm.rollout.plane.nodes import MISSED_BEATS
from swarm.rollout.plane.plane import PlaneRules, RolloutPlane
from swarm.rollout.plane.rules import publication_period
from swarm.rollout.scoring import TURN_S
from swarm.run.directory import (
    ADDRESS,
    LOGS,
    SUMMARY,
    TIMELINE,
    Origin,
    begin_again,
    create_run_directory,
    default_run_dir,
    kept_line,
    locked,
    ran_on,
    remove_run_directory,
    write_json,
)
from swarm.run.log import RunLog
from swarm.run.prompts import ProgressLine, check_data, longest_completion, open_task, prepare_prompts
from swarm.run.run import Run
from swarm.run.timeline import Timeline
from swarm.sampler.choice import find_gpus
from swarm.settings import LeadConfig
from swarm.tasks.base import Read
from swarm.tasks.reward_pool import Completion, RewardPool
from swarm.types import NodeId, Score, Unscored
from swarm.wire import encode

LEASE_LIMIT_S = 600.0  # For a completion, or longer for a long one (docs/staleness.md)
ROUND_BEATS = 0.4  # Beats in a round of gossip
TIMELINE_S = 60.0  # Between two writes of the timeline: 2 MB for 1,000 samplers


class LearnerNode:
    """One run. `say` gets lines for the person at the terminal."""

    def __init__(
        self,
        config: LeadConfig,
        say: Callable[[str], None],
        *,
        resume: bool = False,
        origin: Origin | None = None,
        beside: Callable[[Path], AbstractAsyncContextManager[None]] = lambda run_dir: nullcontext(),
        only_check: bool = False,
    ) -> None:
        """`resume` continues the run in its directory. `origin` is the run whose model this run begins with. `beside`
        is entered while this node holds its run directory: from before it listens until all of it has ended. With
        `only_check` it ends where it would listen, and keeps nothing."""
        self._config = config
        self._say = say
        self._resume = resume
        self._task = open_task(config, ProgressLine(say))
        self._max_new_tokens = longest_completion(config, self._task)
        self._origin = origin
        self._beside = beside
        self._only_check = only_check
        self._run_dir = config.run_dir or default_run_dir(config.task)
        self._had_logs = (self._run_dir / LOGS).is_dir()
        self._state = "starting"
        self._waits_for = "the network to open"
        self._join = ""
        # Whether `status` can be called, and whether the user stopped the run before its end.
        self.is_up = self.is_stopped = False
        self._tracker = InstallTracker()
        self._rewards: RewardPool | None = None
        self._steps: Steps | None = None
        self._is_kept = self._has_prompts = False
        self._exits = AsyncExitStack()
        check_addresses(config)
        self.timeline = Timeline(time.time())

    async def run(self) -> bool:
        """Lead the run to its end. Return False if it missed its target, or if an alarm or the user ended it."""
        if self._origin is None:
            check_model(self._config.model)
        if not self._resume:
            check_period(self._config)
            await asyncio.to_thread(create_run_directory, self._run_dir, self._config, self._origin, self._say)
        with locked(self._run_dir):
            self._is_kept = not self._only_check
            async with self._beside(self._run_dir):
                return await self._run_alone()

    def request_stop(self) -> bool:
        """End the run after the current step and a checkpoint. Return False if there is nothing to wait for."""
        if self._steps is None or self.is_stopped:
            return False
        if self._state != "finished" and (words := self._steps.request_stop()):
            self.is_stopped = True
            self._state, self._waits_for = "stopping", words
        if self._waits_for:
            self._say(f"stopping; waiting for {self._waits_for} (again to stop at once)")
        return bool(self._waits_for)

    def last_words(self) -> str:
        """Return a line that says what is kept of the run if it ends now; "" if nothing is kept."""
        if not self._is_kept:
            return ""
        come_to = (self._steps.step, self._training.saved_step) if self._steps is not None else (None, None)
        return kept_line(self._run_dir, *come_to, steps=self._config.steps)

    async def _run_alone(self) -> bool:
        # All that is opened is closed, even if the run turns out to be damaged.
        async with AsyncExitStack() as opened:
            opened.callback(self._remove_unless_kept)
            try:
                state = StateDirectory.claim(self._config.state_dir or self._run_dir / "identity")
                opened.callback(state.release)
                told = what_is_learned(self._config) if self._config.wandb and not self._only_check else None
                board = self._config.tensorboard
                log = await asyncio.to_thread(RunLog, self._run_dir, tensorboard=board, wandb=told)
                opened.push_async_callback(asyncio.to_thread, log.close)
                self._network = NodeNetwork(state.path, "learner", self._config, say=self._say, emit=log.event)
            except UserError:
                self._is_kept = False
                raise
            if self._resume:
                check_data(self._run_dir, self._task)
                require_database(self._run_dir / DATABASE)
                self.timeline = await asyncio.to_thread(self._read_timeline)
            journal = Journal(self._run_dir, group_size=self._config.group_size)
            opened.push_async_callback(journal.close)
            opened.push_async_callback(self._exits.aclose)
            self._life = Run(
                config=self._config,
                directory=self._run_dir,
                log=log,
                journal=journal,
                timeline=self.timeline,
                say=self._say,
            )
            return await self._run(self._network)

    def _remove_unless_kept(self) -> None:
        """Remove a new run directory, which would make the corrected command fail."""
        if not (self._is_kept or self._resume):
            remove_run_directory(self._run_dir, keep_logs=self._had_logs)

    async def _run(self, network: NodeNetwork) -> bool:
        self._recorded = await asyncio.to_thread(self._life.journal.load)
        if (published := self._recorded.published) is not None:
            network.incarnation = published.version.incarnation
        self._build(network)
        # Refuse a damaged run before changing anything or telling others.
        await self._training.look()
        if self._only_check:
            return await self._check()
        if self._resume:
            begin_again(self._run_dir, self._config)
        try:
            await self._life.journal.start()
            routes = [*self._broadcast.routes(), *self._rollouts.routes()]
            self._sign_card(0)
            beat_s, accept = self._config.beat_s, self._broadcast.accept
            await network.start(routes, self._status_for_all, on_stream=accept, beat_s=beat_s)
            async with network.swarm(network.key.public_bytes, ROUND_BEATS * self._config.beat_s):
                # First of all: if others announced our own earlier version to us, it would look like a later life's.
                network.published(newest_head(self._run_dir / "versions", network.key.public_bytes))
                return await self._take_part()
        except* UserError:
            # If nothing was trained, nothing is kept.
            self._is_kept = self._state != "starting"
            raise
        finally:
            await self._close(network)

    async def _check(self) -> bool:
        """Prepare all that the run needs. Raise UserError for the first thing that is wrong."""
        await check_port(self._config.host, self._config.port)
        try:
            if self._config.trainer_machines:
                self._say("the model is not loaded: that takes the trainers of all machines")
            else:
                await self._start_rewards(await self._prepare())
        finally:
            await self._end_children()
        self._say("the run can begin: leave --check out")
        return True

    async def _take_part(self) -> bool:
        self.is_up = True
        async with control(self._run_dir, partial(self.change, by="socket")), asyncio.TaskGroup() as group:
            self._write_address()
            parts = (self._rollouts.watch_silence, self._publication.watch, self._broadcast.run, self._provisioning.run)
            beside = [
                group.create_task(work()) for work in (*parts, self._ahead.run, self._watch_room, self._keep_timeline)
            ]
            beside.append(group.create_task(watch_clocks(self._say)))
            reached = await self._lead()
            for task in beside:
                task.cancel()
        return reached

    def _build(self, network: NodeNetwork) -> None:
        run = self._life
        self._broadcast = BroadcastService(self._run_dir / "versions", network.key, network.station)
        self._exits.callback(self._broadcast.close)
        self._provisioning = Provisioning(run, self._tracker, network, self._broadcast, given=self._recorded.given)
        self._ahead = PromptsAhead(
            lambda number: self._prompts(number),
            first=self._recorded.opened,
            # The most groups that may be open at a time, and one batch more.
            most=(self._config.max_staleness + 2) * self._config.groups_per_step,
            per_group=CANDIDATES if self._config.selection == "frontier" else 1,
        )
        self._rollouts = RolloutService(
            sessions=network.sessions,
            journal=run.journal,
            emit=self._rollout_event,
            watch=self._provisioning,
            heard=self._heard,
            prompts=self._ahead,
            absent=run.log.absent,
        )
        self._training = Training(
            run, self._ahead, self._max_new_tokens, on_divergence=lambda: self._publication.diverged()
        )
        self._publication = Publication(run, network, self._broadcast, self._rollouts, self._training, self._tracker)

    async def _close(self, network: NodeNetwork) -> None:
        # The server stops first: its handlers use everything else.
        await network.stop()
        await self._exits.aclose()
        await self._end_children()
        step = self._steps.step if self._steps is not None else 0
        self._life.log.event("stopped", state=self._state, step=step, **self._provisioning.account())
        await self._write_timeline()
        if self.is_stopped:
            self._state, self._waits_for = "stopped", ""

    async def _end_children(self) -> None:
        await self._training.stop()
        if self._rewards is not None:
            await self._rewards.close()

    def readers(self) -> Read:
        """Return what makes prompts by number, the text of token ids and boards, from any thread. Raise UserError if
        the node has not read its prompts yet."""
        if not self._has_prompts:
            raise UserError(f"the learner is starting: it waits for {self._waits_for}")
        return self._prompts, self._prompts.decode, self._prompts.boards

    def status(self) -> dict[str, Any]:
        """Return the node's status. The keys are described in docs/protocol.md."""
        newest = self._broadcast.newest
        fault = self._fault()
        is_held = self._steps is not None and self._steps.is_paused and self._state in ("running", "finishing")
        return {
            **self._network.status(),
            "state": "paused" if fault else "paused by its owner" if is_held else self._state,
            "fault": fault or self._training.save_fault,
            "url": self._network.address.url,
            "join": f"echo-node {self._join}" if self._join else "",
            "waits_for": "`echo-node set paused=false`" if is_held else self._waits_for,
            "step": self._life.log.last.get("step", 0),
            "steps": self._config.steps,
            "batch_rollouts": self._config.groups_per_step * self._config.group_size,
            "version": str(newest.head.version) if newest else None,
            "max_staleness": self._config.max_staleness,
            "max_staleness_seen": 0,
            "versions_published": self._publication.count,
            "broadcast_s": self._tracker.last_broadcast_s,
            "held_out": self._life.log.held_out,
            "best": None,
            "metrics": dict(self._life.log.last),
            "alarm": None,
            "stopped_by": "",
            "settings": [],
            "barred": [],
            **(self._steps.status() if self._steps is not None else {}),
            **self._rollouts.status(),
            **self._provisioning.status(),
            **self._broadcast.status(self._tracker.seen),
        }

    def _status_for_all(self) -> dict[str, Any]:
        """Return what everybody may ask for. Who gave most is for the public page, if there is one."""
        return {key: value for key, value in self.status().items() if key != "leaders"}

    def _sign_card(self, weights_bytes: int) -> None:
        config, network = self._config, self._network
        tokens, about = self._longest_sample(), config.about
        card = card_of(config.model, config.task, weights_bytes=weights_bytes, sample_tokens=tokens, about=about)
        network.card = sign_card(card, network.key)

    def _longest_sample(self) -> int:
        """Return the tokens of the longest sample with its prompt, 0 if not known."""
        prompt = self._config.max_prompt_tokens
        return prompt + self._max_new_tokens if prompt else 0

    # -- the run ---------------------------------------------------------------------------------------------

    async def _lead(self) -> bool:
        prepared = await self._prepare()
        self._sign_card(prepared.layout.total_bytes)
        rewards = await self._start_rewards(prepared)
        self._answering = Answering(self._life, self._task, rewards, self._rollouts)
        identity = self._config.state_dir or self._run_dir / "identity"
        await self._answering.open(self._prompts, prepared, self._exits, identity, self._say)
        await self._publication.look_back()
        self._waits_for = "the recorded batches to be trained on again"
        await self._training.catch_up(self._recorded.next_batch)
        bound = await self._bound()
        steps = self._steps = await self._open_plane(prepared, rewards, bound)
        self._provisioning.open(self._rollouts, lambda: steps.bound)
        self._waits_for = "the first version to be published"
        await self._publication.go_on(steps.step, bound.publish_every_steps)
        # Announce only now, when settings that do not work have been refused.
        self._announce()
        async with AsyncExitStack() as own:
            # Samplers of this machine leave while this node still answers.
            await self._draw(prepared, own)
            return await self._take_steps(steps)

    async def _take_steps(self, steps: Steps) -> bool:
        """Take all steps and measure the last version, as `run` says."""
        if (self._run_dir / PAUSE).exists():
            self._say("paused by its owner, as before: `echo-node set paused=false` goes on")
            steps.pause(True)
        self._state, self._waits_for = "running", ""
        await steps.run()
        if not self.is_stopped:
            self._state, self._waits_for = "finishing", "samplers to measure the last version"
            reached = await steps.finish()
        if self.is_stopped:
            if not self._fault():
                await steps.leave_off()
            return False
        self._state, self._waits_for = "finished", "samplers to hear that the run is over"
        summary = {**self.status(), "waits_for": ""}
        await self._rollouts.end("finished")
        await self._rollouts.farewell(MISSED_BEATS * self._config.beat_s)
        # Written last: a learner that is killed before must be resumable, or its samplers would wait for ever.
        write_json(self._run_dir / SUMMARY, summary)
        return reached

    async def _draw(self, prepared: Prepared, own: AsyncExitStack) -> None:
        """Start the samplers of this machine, which end with `own`."""
        if (count := self._config.samplers) == 0:
            return
        found = await asyncio.to_thread(find_gpus) if prepared.whole_bytes else {}
        gpus = other_gpus(prepared.device, self._config.trainer_ranks, () if isinstance(found, str) else [*found])
        if count is None:
            count, why = (1, "") if gpus else default_count(prepared, self._longest_sample())
            if why:
                self._say(why)
        if count:
            here = EVERYWHERE.get(self._config.host)
            bootstrap = f"{here}:{self._network.port}" if here else self._join.rpartition(" ")[2]
            words = arguments(prepared, bootstrap, sharing=0 if gpus else count)
            await own.enter_async_context(drawing(count, self._run_dir, words, gpus, self._say))
            self._say(f"this machine draws too: {count} sampler{'' if count == 1 else 's'} (--samplers 0: only others)")

    async def _bound(self) -> BoundSet:
        """Return the bound that the configuration asks for, and record it."""
        wanted, was = self._config.max_staleness, self._recorded.bound
        bound = BoundSet(
            max_staleness=wanted,
            publish_every_steps=publication_period(self._config.publish_every_steps, wanted),
            step=self._recorded.next_batch,
            learning_rate=was.learning_rate if was else None,
        )
        await self._life.journal.write([bound])
        for key in ("max_staleness", "publish_every_steps"):
            if was is not None and (before := getattr(was, key)) != (after := getattr(bound, key)):
                self._life.log.event("set", key=key, before=before, after=after, by="resume", step=self._training.step)
        return bound

    async def _watch_room(self) -> None:
        """Tell the user when a full disk pauses the run, and when it goes on."""
        said = ""
        while True:
            fault = self._fault()
            if bool(fault) != bool(said):
                self._say(f"paused: {fault}" if fault else "there is room again: going on")
                self._life.log.event("paused" if fault else "unpaused", reason=fault or said)
            said = fault
            await asyncio.sleep(ROOM_S)

    def _fault(self) -> str:
        return self._life.journal.fault or self._publication.fault

    async def change(self, request: Mapping[str, Any], *, by: str) -> str:
        """Change what a run's owner may change while it runs (lead/dials.py), `stop` as the first Ctrl-C does. Return a
        line for each change, or without any for each present value. UserError says why one cannot be made; those before
        it hold."""
        lines: list[str] = []
        for key, value in checked(request).items():
            if self._steps is None or self._state not in ("running", "finishing"):
                raise UserError(f"the learner is {self._state}: nothing can be changed now")
            if fault := self._fault():
                raise UserError(f"the learner is paused: {fault}")
            if key == "refuse" and value == self._network.key.node_id:
                raise UserError("that is the learner itself: its samplers are those of `echo-node status`")
            if key == "stop":
                self.is_stopped, self._state, self._waits_for = True, "stopping", self._steps.request_stop()
            lines.append(await self._steps.change(key, value, by=by))
        return "\n".join(lines) or in_words(self.status()["settings"])

    async def _prepare(self) -> Prepared:
        self._say("loading the model")
        self._waits_for = "torch to be imported and the model to be loaded"
        prepared = await self._training.open()
        self._waits_for = "the prompts to be read and measured"
        try:
            read_layout(encode(prepared.layout))
        except ProtocolError as error:
            raise UserError(f"no sampler could take this model, its tokenizer or its configuration: {error}") from error
        await self._broadcast.open(prepared.layout)
        # In a thread, because a large data set takes a while.
        progress = ProgressLine(self._say)
        try:
            self._prompts, self._held_out = await in_thread(
                partial(prepare_prompts, self._run_dir, self._config, self._task, prepared, self._say, progress)
            )
        finally:
            progress.stop()
        self._episodes = episode_rules(self._config, self._task, context_tokens=prepared.context_tokens)
        self._ahead.begin()
        self._has_prompts = True
        known = await asyncio.to_thread(ran_on)
        found = {"step": prepared.step, "parameters": prepared.parameters, "device": prepared.device}
        self._life.log.event("prepared", **found, **known)
        part = f", of which an adapter's {prepared.trained:,} are trained," if prepared.layout.adapter else ""
        self._say(f"the model has {prepared.parameters:,} parameters{part} and trains on {prepared.device}")
        for note in prepared.notes:
            self._say(note)
        return prepared

    async def _start_rewards(self, prepared: Prepared) -> RewardPool:
        self._waits_for = "the reward processes to start"
        self._rewards = reward_pool(self._config, self._training.files_dir, prepared.stop_token_ids)
        await self._rewards.start()
        if line := await check_rewards(self._rewards, self._config, self._held_out[0]):
            self._say(line)
        return self._rewards

    async def _open_plane(self, prepared: Prepared, rewards: RewardPool, bound: BoundSet) -> Steps:
        """Continue where the journal ends, and answer samplers from now on."""
        config = self._config
        rules = PlaneRules(
            run_seed=config.seed,
            life=self._network.generation,
            max_staleness=bound.max_staleness,
            adaptive=config.freshness == "adaptive",
            groups_per_step=config.groups_per_step,
            group_size=config.group_size,
            dynamic_sampling=config.dynamic_sampling,
            selection=config.selection,
            credit=config.credit,
            eval_samples=config.eval_samples,
            rules=sampling_rules(config, self._task, prepared.stop_token_ids),
            vocab_size=prepared.vocab_size,
            beat_s=config.beat_s,
            lease_time_limit_s=LEASE_LIMIT_S,
            episodes=self._episodes,
        )
        plane = RolloutPlane(rules, prompts=self._ahead)

        async def score(wanted: Sequence[ScoreWanted]) -> list[Score | Unscored]:
            asked = ((one, control_seed(config.seed, one.group_id, one.index)) for one in wanted)
            given = [Completion(prompt=w.prompt, token_ids=w.rollout.token_ids, seed=seed) for w, seed in asked]
            return await rewards.score(given, TURN_S)

        # In a thread, because the prompts of the open groups are made again.
        restored = await in_thread(partial(plane.restore, self._recorded, now=time.monotonic()))
        # A crash may have come between a verdict and the return of what the caught sampler gave.
        for node, why in (await asyncio.to_thread(barred_in, self._run_dir)).items():
            restored += plane.bar(node, why)
        if (auditing := self._auditing()) is not None:
            self._publication.kept_at = auditing.place
        step, processes = self._answering.step, rewards.processes
        self._rollouts.open(plane, score, restored, step, processes, auditing)
        sweeping = asyncio.create_task(self._answering.sweep(plane.leased.attempts))
        self._exits.callback(sweeping.cancel)
        return Steps(
            self._life,
            bound,
            self._training,
            self._publication,
            self._rollouts,
            self._provisioning,
            self._held_out,
            auditing,
        )

    def _auditing(self) -> Auditing | None:
        config = self._config
        if not config.audit_share:
            return None
        return Auditing(
            self._training.audited,
            Auditor(measured_classes(), secret=os.urandom(32), share=config.audit_share),
            self._training.audit,
            class_of=self._rollouts.tally.engine_of,
            emit=self._life.log.event,
            say=self._say,
        )

    # -- the timeline ----------------------------------------------------------------------------------------

    def _heard(self, node: NodeId, beat: Beat, idle: str) -> None:
        state = "standby" if idle else "fetch" if beat.installed is None else "draw" if beat.samples else "wait"
        name = beat.offer.nickname if beat.offer else ""
        self.timeline.heard(node, beat.did, state=state, now=time.time(), name=name)

    def _read_timeline(self) -> Timeline:
        try:
            return Timeline.of(json.loads((self._run_dir / TIMELINE).read_bytes()), now=time.time())
        except (OSError, ValueError) as error:
            self._say(f"the timeline of what was done begins again: {error}")
            return self.timeline

    async def _keep_timeline(self) -> None:
        while True:
            await asyncio.sleep(TIMELINE_S)
            await self._write_timeline()

    async def _write_timeline(self) -> None:
        """Replace the file. A full disk pauses the run, and the user hears that elsewhere."""
        kept = msgspec.json.encode(self.timeline.kept(now=time.time()))
        with suppress(OSError):
            await asyncio.to_thread(write_atomically, self._run_dir / TIMELINE, kept)

    # -- words and figures -----------------------------------------------------------------------------------

    def _write_address(self) -> None:
        """Write where this node listens, so that programs can start samplers before the model is loaded."""
        network = self._network
        write_json(self._run_dir / ADDRESS, {"url": network.address.url, "join": network.join_line()})
        address = network.address
        is_plain = is_loopback(address.host) and not address.fingerprint
        bootstrap = address.authority if is_plain else network.join_line()
        self._join = f"join --role sampler --bootstrap {bootstrap}"
        swarm = network.status()["swarm"]
        self._say(f"learner of swarm {swarm} at {network.address.url}, run directory {self._run_dir}")
        if not is_loopback(host := self._config.host):
            where = f"all of its addresses, port {network.port}" if host in EVERYWHERE else network.address.authority
            how = "encrypted" if network.address.fingerprint else "NOT encrypted"
            self._say(f"open to other machines: listens at {where}, {how} (--host 127.0.0.1 keeps it on this machine)")

    def _announce(self) -> None:
        address = self._network.address
        self._say(f"a sampler joins with:  echo-node {self._join}")
        if (here := EVERYWHERE.get(self._config.host)) is not None:
            command = os.environ.get("ECHO_NODE_COMMAND", "echo-node")
            self._say(f"on this machine also with:  {command} join --bootstrap {here}:{self._network.port}")
        if self._config.advertise is None and is_private(address.host):
            self._say(
                f"{address.host} is an address of a private network: for machines outside of it let the router pass "
                f"port {address.port} on to this machine, and name the router's address with --advertise"
            )

    def _rollout_event(self, kind: str, **fields: Any) -> None:
        self._life.log.event(kind, **fields)
        if kind in ("sampler_left", "sampler_silent"):
            self.timeline.note(fields["node"], "gone", time.time())
        if kind == "reward_failed":
            # A reward that only hangs ends the run after minutes; its author may be watching.
            more = f" ({fields['rollouts']} since the last such line)" if fields["rollouts"] > 1 else ""
            self._say(f"the reward failed for prompt {fields['prompt']}: {fields['reason']}{more}")
