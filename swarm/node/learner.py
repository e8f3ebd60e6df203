"""The learner node: HTTP, the rollout plane and the trainer child, and the loop of learner steps."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from swarm.broadcast.manifest import LAYOUT_BYTES
from swarm.broadcast.service import BroadcastService
from swarm.broadcast.tracker import InstallTracker
from swarm.config import DEFAULT_PORT, TINY, LeadConfig
from swarm.errors import UserError
from swarm.gossip.reachability import is_loopback
from swarm.gossip.records import Profile
from swarm.learner.messages import Prepared, Trained, TrainGroup, TrainRollout
from swarm.learner.service import TrainerProcess
from swarm.node.identity import StateDirectory
from swarm.node.joining import hosts_of
from swarm.node.metrics import RunLog, create_run_directory
from swarm.node.network import NetworkSettings, NodeNetwork, advertised
from swarm.rollout.admission import staleness
from swarm.rollout.api import RolloutService, ScoringFailed
from swarm.rollout.effects import ScoreWanted
from swarm.rollout.leases import MISSED_BEATS, Group, sample_seed
from swarm.rollout.plane import PlaneRules, RolloutPlane
from swarm.signing import swarm_id_of
from swarm.tasks import load_task
from swarm.tasks.scoring import Completion, RewardFailed, RewardPool
from swarm.types import Prompt, SamplingRules, Score, VersionId
from swarm.wire import encode

R = TypeVar("R")

STALL_S = 30.0
"""After this long without a batch the learner says what it waits for."""


class LearnerNode:
    """One run. `say` gets lines for the person at the terminal."""

    def __init__(self, config: LeadConfig, say: Callable[[str], None]) -> None:
        self._config = config
        self._say = say
        self._task = load_task(config.task, config.seed)
        self._run_dir = config.run_dir or Path("runs") / time.strftime(f"{config.task}-%Y%m%d-%H%M%S")
        self._state = "starting"
        self._step = 0
        self._held_out: list[dict[str, float]] = []
        self._last: dict[str, Any] = {}
        self._max_staleness_seen = 0
        self._versions_published = 0
        self._tracker = InstallTracker()
        self._rewards: RewardPool | None = None
        self._keep_run_dir = True
        self._target_reached = False
        self._staging = asyncio.Lock()
        self._staged_step = 0
        self._overtaken = asyncio.Event()
        self._settings = _network_settings(config)

    async def run(self) -> bool:
        """Lead the run to its end; False if a target was set and not reached."""
        check_model(self._config.model)
        create_run_directory(self._run_dir, self._resolved_config())
        self._log = RunLog(self._run_dir)
        try:
            state = StateDirectory.claim(self._config.state_dir or self._run_dir / "identity")
            self._network = NodeNetwork(state.path, "learner", self._settings, say=self._say, emit=self._log.event)
        except UserError:
            # Leave no run directory that refuses the corrected command.
            shutil.rmtree(self._run_dir)
            raise
        try:
            return await self._run(self._network)
        finally:
            state.release()

    async def _run(self, network: NodeNetwork) -> bool:
        self._broadcast = BroadcastService(self._run_dir / "versions", network.key, network.station)
        self._rollouts = RolloutService(
            key=network.key,
            sessions=network.sessions,
            emit=self._log.event,
            on_installed=lambda node, version: self._tracker.installed(node, version, now=time.monotonic()),
            on_gone=lambda node: self._tracker.gone(node, now=time.monotonic()),
        )
        self._trainer = TrainerProcess(self._run_dir, hang_s=self._config.trainer_hang_s)
        try:
            routes = [*self._broadcast.routes(), *self._rollouts.routes()]
            await network.start(routes, self.status, on_stream=self._broadcast.accept, beat_s=self._config.beat_s)
            async with network.swarm(network.key.public_bytes, self._config.round_s), asyncio.TaskGroup() as group:
                self._announce()
                network.on_generation = self._overtaken.set
                works = (self._rollouts.watch_silence, self._publish_anew, self._broadcast.run)
                beside = [group.create_task(work()) for work in works]
                reached = await self._lead()
                for task in beside:
                    task.cancel()
            return reached
        except* UserError:
            # Nothing was trained: leave no run directory that refuses the corrected command.
            if self._state == "starting":
                self._keep_run_dir = False
            raise
        finally:
            # The server first: its handlers use everything else.
            await network.stop()
            await self._trainer.stop()
            if self._rewards is not None:
                await asyncio.to_thread(self._rewards.close)
            self._broadcast.close()
            self._log.event("stopped", state=self._state, step=self._step)
            self._log.close()
            if self._keep_run_dir:
                self._say(f"{self._state} at step {self._step}; run directory {self._run_dir}")
            else:
                shutil.rmtree(self._run_dir, ignore_errors=True)

    def status(self) -> dict[str, Any]:
        """What the node says of itself; the keys are described in docs/protocol.md."""
        newest = self._broadcast.newest
        return {
            **self._network.status(),
            "state": self._state,
            "run_dir": str(self._run_dir),
            "url": self._network.address.url,
            "step": self._step,
            "steps": self._config.steps,
            "version": str(newest.head.version) if newest else None,
            "max_staleness": self._config.max_staleness,
            "max_staleness_seen": self._max_staleness_seen,
            "versions_published": self._versions_published,
            "broadcast_s": self._tracker.last_broadcast_s,
            "held_out": self._held_out,
            "metrics": self._last,
            **self._rollouts.status(),
            **self._broadcast.status(self._tracker.spread_s),
        }

    # -- the run ---------------------------------------------------------------------------------------------

    async def _lead(self) -> bool:
        prepared = await self._prepare()
        self._rewards = RewardPool(
            task=self._config.task,
            seed=self._config.seed,
            reward=self._config.reward,
            tokenizer=self._trainer.files_dir / "tokenizer.json",
            timeout_s=self._config.reward_timeout_s,
        )
        self._open_plane(prepared, self._rewards)
        await self._publish(0)
        await self._steps()
        return await self._finish()

    async def _prepare(self) -> Prepared:
        self._say("loading the model")
        prepared = await self._trainer.prepare(self._config)
        if (nbytes := len(encode(prepared.layout))) > LAYOUT_BYTES:
            raise UserError(f"the model's tokenizer and configuration take {nbytes} bytes; {LAYOUT_BYTES} is the most")
        await self._broadcast.open(prepared.layout)
        tokenizer = self._trainer.files_dir / "tokenizer.json"
        if not tokenizer.is_file():
            raise UserError(
                f"the model {self._config.model!r} has no tokenizer.json: save its fast tokenizer beside it"
            )
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._log.event("prepared", parameters=prepared.parameters, device=prepared.device)
        self._say(f"the model has {prepared.parameters:,} parameters and trains on {prepared.device}")
        return prepared

    def _open_plane(self, prepared: Prepared, rewards: RewardPool) -> None:
        config = self._config
        rules = PlaneRules(
            swarm=swarm_id_of(self._network.key.public_bytes),
            run_seed=config.seed,
            max_staleness=config.max_staleness,
            groups_per_step=config.groups_per_step,
            group_size=config.group_size,
            rules=SamplingRules(
                temperature=config.temperature,
                max_new_tokens=config.max_new_tokens or self._task.max_new_tokens,
                stop_token_ids=prepared.stop_token_ids,
            ),
            vocab_size=prepared.vocab_size,
            beat_s=config.beat_s,
            lease_time_limit_s=config.lease_time_limit_s,
        )
        self._check_room(rules.rules.max_new_tokens, prepared.context_tokens)
        plane = RolloutPlane(rules, prompts=lambda i: self._encode(self._task.prompt(i)))
        self._held_out_prompts = [self._encode(p) for p in self._task.held_out(config.eval_prompts)]

        async def score(wanted: Sequence[ScoreWanted]) -> list[Score]:
            completions = [
                Completion(prompt=w.prompt, token_ids=w.rollout.token_ids, seed=_control_seed(config.seed, w))
                for w in wanted
            ]
            try:
                return await rewards.score(completions)
            except RewardFailed as error:
                raise ScoringFailed(str(error)) from error

        self._rollouts.open(plane, score)

    async def _steps(self) -> None:
        """The loop of learner steps; publications and held-out evaluations go on beside it."""
        self._state = "running"
        evaluation = asyncio.create_task(self._evaluate())
        publication = asyncio.create_task(asyncio.sleep(0))
        try:
            for step in range(self._config.steps):
                batch = await self._wait_for_batch(publication)
                trained = await self._trainer.train(step, [_train_group(g, step) for g in batch])
                self._record(batch, step, trained)
                # The staging file must not change while the last publication is read from it.
                await publication
                if self._step % self._config.publish_every_steps == 0 or self._step == self._config.steps:
                    await self._stage()
                    publication = asyncio.create_task(self._publish(self._step))
                if self._step % self._config.checkpoint_every_steps == 0:
                    await self._checkpoint()
                if evaluation.done():
                    evaluation.result()
                    if self._target_reached:
                        break
                    if self._step % self._config.eval_every_steps == 0 and self._step < self._config.steps:
                        evaluation = asyncio.create_task(self._evaluate())
            await publication
            await self._patiently(evaluation)
        finally:
            evaluation.cancel()
            publication.cancel()

    async def _finish(self) -> bool:
        """Measure the last version, keep it, and tell the samplers that the run is over."""
        self._state = "finishing"
        await self._rollouts.end("draining")
        newest = self._broadcast.newest
        assert newest is not None
        if self._step > newest.head.version.version:
            await self._stage()
            await self._publish(self._step)
        if self._held_out[-1]["version"] < self._step:
            await self._patiently(asyncio.create_task(self._evaluate()))
        if not (self._run_dir / "checkpoints" / f"step-{self._step:06}").exists():
            await self._checkpoint()
        self._write_summary()
        self._state = "finished"
        await self._rollouts.end("finished")
        await self._rollouts.farewell(MISSED_BEATS * self._config.beat_s)
        return self._target_reached or self._config.target is None

    async def _wait_for_batch(self, publication: asyncio.Task[None]) -> list[Group]:
        """The next batch. A publication that failed is raised here: without it no batch may ever come."""
        batch = asyncio.create_task(self._rollouts.next_batch())
        try:
            await asyncio.wait({batch, publication}, return_when=asyncio.FIRST_COMPLETED)
            if publication.done():
                publication.result()
            elif not batch.done():
                await publication
            return await self._patiently(batch)
        finally:
            batch.cancel()

    async def _patiently(self, task: asyncio.Task[R]) -> R:
        """The result of what samplers have to bring about, with a word to the user when it takes long."""
        while not task.done():
            await asyncio.wait({task}, timeout=STALL_S)
            if not task.done():
                self._say_stall()
        return task.result()

    async def _stage(self) -> None:
        """Have the trainer write the weights of this step where publications are read from."""
        async with self._staging:
            await self._trainer.stage()
            self._staged_step = self._step

    async def _publish_anew(self) -> None:
        """Whenever others know a later life of this learner than its disk did (it was restored from a copy), what is
        published counts as older than what they hold: publish it under the incarnation that follows."""
        while True:
            await self._overtaken.wait()
            self._overtaken.clear()
            if self._versions_published:
                self._say("others know a later run of this learner: publishing under the next incarnation")
                await self._publish(self._staged_step, anew=True)

    async def _publish(self, step: int, *, anew: bool = False) -> None:
        # Another run under the same key is another incarnation: its versions are newer than all of those before it.
        version = VersionId(incarnation=self._network.generation - 1, version=step)
        async with self._staging:
            if anew:
                published = await self._broadcast.republish(version)
            else:
                published = await self._broadcast.publish(self._trainer.staging, version)
        self._network.published(published.sealed_head)
        self._network.set_profile(Profile(held=version, engine="learner"))
        self._versions_published += 1
        if self._network.generation - 1 > version.incarnation:
            # Others spoke of a later life while this was being encoded.
            self._overtaken.set()
        self._tracker.published(version, now=time.monotonic())
        await self._rollouts.published(version)

    async def _evaluate(self) -> None:
        newest = self._broadcast.newest
        assert newest is not None
        result = await self._rollouts.evaluate(newest.head.version, self._held_out_prompts)
        exact = sum(score.exact for score in result.scores) / len(result.scores)
        self._held_out.append({"version": result.version, "exact_match": exact})
        target = self._config.target
        self._target_reached |= target is not None and exact >= target
        self._log.event("evaluated", version=result.version, exact_match=exact, prompts=len(result.scores))
        reward = self._last.get("reward")
        shown = "" if reward is None else f", reward {reward:.3f}"
        self._say(f"step {self._step}/{self._config.steps}: held-out exact match {exact:.3f}{shown}")

    async def _checkpoint(self) -> None:
        directory = self._run_dir / "checkpoints" / f"step-{self._step:06}"
        await self._trainer.save(directory, self._step)
        if fault := (await self._trainer.flush()).fault:
            raise UserError(fault)
        self._log.event("checkpoint", directory=str(directory))

    # -- words and figures -----------------------------------------------------------------------------------

    def _announce(self) -> None:
        network = self._network
        address, line = network.address, network.join_line()
        # Renamed into place: whoever waits for the file must never read half of it.
        partial = self._run_dir / "node.json.partial"
        partial.write_text(json.dumps({"url": address.url, "join": line}) + "\n")
        partial.rename(self._run_dir / "node.json")
        status = network.status()
        self._say(f"learner of swarm {status['swarm']} at {address.url}, run directory {self._run_dir}")
        command = os.environ.get("ECHO_NODE_COMMAND", "echo-node")
        bootstrap = address.authority if is_loopback(address.host) and not address.fingerprint else line
        self._say(f"a sampler joins with:  {command} join --role sampler --bootstrap {bootstrap}")
        if address.host != self._config.host and self._config.advertise is None:
            self._say(f"(if others reach this machine at another address than {address.host}, pass --advertise HOST)")

    def _record(self, batch: list[Group], step: int, trained: Trained) -> None:
        """Count the step. All of it at once: `status` may be asked at every await."""
        self._step = step + 1
        ages = [staleness(group.oldest_version, step) for group in batch]
        self._max_staleness_seen = max(self._max_staleness_seen, *ages)
        scores = [s.score for group in batch for s in group.samples if s.score]
        self._last = {
            "step": self._step,
            "exact_match": sum(score.exact for score in scores) / len(scores),
            "train_step_s": round(trained.seconds, 4),
            "broadcast_s": self._tracker.last_broadcast_s,
            "rollouts_per_s": round(self._rollouts.rollouts_per_s(), 1),
            "samplers": len(self._rollouts.samplers),
            **trained.metrics,
        }
        self._log.metrics({**self._last, "time": round(time.time(), 3)})

    def _write_summary(self) -> None:
        status = self.status()
        (self._run_dir / "summary.json").write_text(json.dumps({**status, "state": "finished"}, indent=2) + "\n")

    def _say_stall(self) -> None:
        counts = self._rollouts.status()
        line = (
            f"waiting for rollouts: {len(self._rollouts.samplers)} samplers, {counts['samples_leased']} samples leased"
        )
        self._say(line)
        self._log.event("waiting", samplers=len(self._rollouts.samplers), samples_leased=counts["samples_leased"])

    def _resolved_config(self) -> dict[str, Any]:
        values = self._config.model_dump(mode="json")
        return {**values, "run_dir": str(self._run_dir), "learning_rate": self._config.resolved_learning_rate}

    def _encode(self, prompt: Prompt) -> Prompt:
        """With its token ids; whether a BOS comes first is the tokenizer's own affair."""
        token_ids = self._tokenizer.encode(prompt.text).ids
        return Prompt(prompt_id=prompt.prompt_id, text=prompt.text, answer=prompt.answer, token_ids=tuple(token_ids))

    def _check_room(self, max_new_tokens: int, context_tokens: int) -> None:
        longest = max(len(self._encode(p).token_ids) for p in self._task.held_out(1))
        if longest + max_new_tokens > context_tokens:
            raise UserError(
                f"a prompt of {longest} tokens and --max-new-tokens {max_new_tokens} do not fit the model's context of "
                f"{context_tokens}"
            )


def _network_settings(config: LeadConfig) -> NetworkSettings:
    """UserError for an address that is none, before anything is written."""
    settings = NetworkSettings(
        host=config.host,
        port=config.port,
        bootstrap=config.bootstrap,
        advertise=config.advertise,
        tls=config.tls,
        lan=config.lan,
        max_upload_mbit=config.max_upload,
        max_download_mbit=config.max_download,
        round_s=config.round_s,
    )
    advertised(settings, config.port or DEFAULT_PORT, b"")
    hosts_of(config.bootstrap)
    return settings


def check_model(name: str) -> None:
    """UserError for a path that cannot be a model, before anything is started."""
    path = Path(name)
    looks_like_path = name != TINY and (path.is_dir() or name.startswith((".", "/")))
    if looks_like_path and not (path / "config.json").is_file():
        raise UserError(f"{name} has no config.json: give a directory in Hugging Face format, a model id, or tiny")


def _train_group(group: Group, step: int) -> TrainGroup:
    rollouts: list[TrainRollout] = []
    for sample in group.samples:
        assert sample.rollout is not None
        assert sample.score is not None
        oldest = sample.rollout.oldest
        assert oldest is not None
        rollouts.append(
            TrainRollout(
                token_ids=sample.rollout.token_ids,
                logprobs=sample.rollout.logprobs,
                loss_mask=sample.rollout.loss_mask,
                reward=sample.score.reward,
                staleness=staleness(oldest, step),
            )
        )
    return TrainGroup(prompt_token_ids=group.prompt.token_ids, rollouts=tuple(rollouts))


def _control_seed(run_seed: int, wanted: ScoreWanted) -> int:
    """A seed for the random control reward that depends on the rollout's name alone."""
    return sample_seed(run_seed + 1, wanted.group_id, wanted.index)
