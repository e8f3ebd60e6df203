"""Attackers that are nodes: `python -m swarm.redteam.sampler ATTACK join ...` joins as any node does, and deviates.

What deviates is replaced in the attacker's own process, or in its engine's. A dishonest engine proves and reports what
an honest one would. Its log-probs are those that the true weights give its tokens, unless they are the attack, so that
only the tokens can give it away. The tasks are those of swarm/tasks/digits.py: the answer is in the prompt.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from swarm.broadcast import transfers
from swarm.broadcast.mesh.forwarder import Forwarder
from swarm.broadcast.notes import Have, Kind, Note, Want
from swarm.net.stream import Outgoing
from swarm.process import Child, ChildChannel
from swarm.rollout.client import Answer, Refused, RolloutClient
from swarm.sampler import worker
from swarm.sampler.engine import Engine, Generate, Generated, Install, Installed, Job, Sampled, Told
from swarm.tasks.digits import DIGITS
from swarm.types import Span, VersionId

NOISE = 0.3  # Of each tensor's own spread: the model still speaks, and is another one
LEVELS = 7  # Weights of 4 bits are whole numbers from -7 to 7
OLD = 8  # Steps: a lazy sampler that never installs a second version asks for leases from this one on
COOLER = 0.7  # Times the temperature that was asked for
TRUSTED = 128  # Samples: the first 64 of a newcomer are audited in full
SHIFT = 2.2  # Nats: claims that are this much too low stop a run from learning (docs/learner.md, "Claims")
HOARD = 512  # Samples that a hoarder asks for at a time: a step of the demo

# -- engines with other weights: what becomes of each tensor after an install ---------------------------------


def wrong_model(tensor: Any) -> None:
    """Sample from another model: all weights get noise."""
    tensor.add_(tensor.clone().normal_(), alpha=NOISE * float(tensor.std()))


def wrong_precision(tensor: Any) -> None:
    """Round all weights to 4 bits, and report float32."""
    step = (tensor.abs().max() / LEVELS).clamp(min=1e-12)
    tensor.copy_((tensor / step).round() * step)


# -- engines with other answers -------------------------------------------------------------------------------


def claimed(engine: Any, job: Job, tokens: Sequence[int]) -> Sampled:
    """Return `tokens` as a sample, with the log-probs that the installed weights give them."""
    prompt = job.prompt_token_ids
    ids = next(engine._model.parameters()).new_tensor([[*prompt, *tokens]]).long()
    logits = engine._model(ids).logits[0, len(prompt) - 1 : -1].detach().float() / job.rules.temperature
    logprobs = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
    return Sampled(
        token_ids=array("i", tokens).tobytes(),
        logprobs=array("f", logprobs).tobytes(),
        spans=(Span(version=engine._version, start=0, end=len(tokens)),),
        finish="stop" if tokens[-1] in job.rules.stop_token_ids else "length",
    )


def right_digits(job: Job) -> tuple[int, ...]:
    """Return the answer of the copy task: the digits of `3141=`."""
    return job.prompt_token_ids[-1 - DIGITS : -1]


def invented_log_probs(engine: Any, jobs: Sequence[Job], honest: Sequence[Sampled]) -> list[Sampled]:
    """Claim that each token was much less likely than it was."""
    shifted = [array("f", [value - SHIFT for value in array("f", one.logprobs)]) for one in honest]
    return [msgspec.structs.replace(one, logprobs=new.tobytes()) for one, new in zip(honest, shifted, strict=True)]


def temperature(engine: Any, jobs: Sequence[Job], cooler: Sequence[Sampled]) -> list[Sampled]:
    """Draw at a lower temperature (`asked` sees to that), and claim the one that was asked for."""
    return [claimed(engine, job, array("i", one.token_ids)) for job, one in zip(jobs, cooler, strict=True)]


def truncation(engine: Any, jobs: Sequence[Job], honest: Sequence[Sampled]) -> list[Sampled]:
    """Cut each completion in half and end it with the stop token."""
    halves = [array("i", one.token_ids)[: len(one.token_ids) // 8] for one in honest]
    stops = [job.rules.stop_token_ids[0] for job in jobs]
    return [claimed(engine, job, [*half, stop]) for job, half, stop in zip(jobs, halves, stops, strict=True)]


def copies(engine: Any, jobs: Sequence[Job], honest: Sequence[Sampled]) -> list[Sampled]:
    """Hand in one answer for all samples of a prompt."""
    first = {job.prompt_token_ids: one for job, one in reversed(list(zip(jobs, honest, strict=True)))}
    return [first[job.prompt_token_ids] for job in jobs]


def oracle(engine: Any, jobs: Sequence[Job], honest: Sequence[Sampled]) -> list[Sampled]:
    """Hand in right answers that were looked up and never drawn."""
    return [claimed(engine, job, [*right_digits(job), job.rules.stop_token_ids[0]]) for job in jobs]


def sleeper(engine: Any, jobs: Sequence[Job], honest: Sequence[Sampled]) -> list[Sampled]:
    """Be honest until trusted, then hand in right answers that were never drawn."""
    engine.drawn += len(jobs)
    return list(honest) if engine.drawn <= TRUSTED else oracle(engine, jobs, honest)


def easy_half(engine: Any, jobs: Sequence[Job], honest: Sequence[Sampled]) -> list[Sampled]:
    """Say that the generation of the worse half of each batch failed."""
    right = [sum(map(int.__eq__, array("i", s.token_ids), right_digits(j))) for j, s in zip(jobs, honest, strict=True)]
    worse = set(sorted(range(len(jobs)), key=lambda place: right[place])[: len(jobs) // 2])
    failed = Sampled(token_ids=b"", logprobs=b"", spans=(), finish="failed", fault="time limit")
    return [failed if place in worse else one for place, one in enumerate(honest)]


OTHER_WEIGHTS = {"wrong-model": wrong_model, "wrong-precision": wrong_precision}
OTHER_ANSWERS: dict[str, Callable[[Any, Sequence[Job], Sequence[Sampled]], list[Sampled]]] = {
    "invented-log-probs": invented_log_probs,
    "temperature": temperature,
    "truncation": truncation,
    "copies": copies,
    "oracle": oracle,
    "sleeper": sleeper,
    "easy-half": easy_half,
}
OTHER_ANSWERS["unmeasured-class"] = oracle  # Named as a class of engine of which nothing is known
ENGINES = (*OTHER_WEIGHTS, *OTHER_ANSWERS, "old-version")


def asked(attack: str, jobs: Sequence[Job]) -> tuple[Job, ...]:
    """Return what the engine is really asked for."""
    share = COOLER if attack == "temperature" else 1.0
    rules = [msgspec.structs.replace(job.rules, temperature=share * job.rules.temperature) for job in jobs]
    return tuple(msgspec.structs.replace(job, rules=one) for job, one in zip(jobs, rules, strict=True))


def engine_of(attack: str) -> Engine:
    """Return an engine that deviates by `attack`."""
    from swarm.sampler.transformers import Threaded, TransformersEngine

    class Dishonest(TransformersEngine):
        installs = drawn = 0

        def start(self, *given: Any) -> Any:
            started = super().start(*given)
            return msgspec.structs.replace(started, device="own") if attack == "unmeasured-class" else started

        def install(self, command: Install, progress: Told) -> Any:
            self.installs += 1
            if attack == "old-version" and self.installs > 1:
                self._version = command.version
                return Installed(seconds=0.0)
            # Changed words alone would be put among other weights than they belong to, and the sums would not come out.
            done = super().install(msgspec.structs.replace(command, changed=""), progress)
            if (change := OTHER_WEIGHTS.get(attack)) is not None:
                for parameter in self._model.parameters():
                    change(parameter.data)
            return done

        def generate(self, command: Generate, progress: Told) -> Generated:
            change = OTHER_ANSWERS.get(attack)
            if change is None:
                return super().generate(command, progress)
            drawn = super().generate(Generate(jobs=asked(attack, command.jobs)), progress)
            if any(one.finish == "failed" for one in drawn.samples):
                return drawn
            return msgspec.structs.replace(drawn, samples=tuple(change(self, command.jobs, drawn.samples)))

    return Threaded(Dishonest())


# -- nodes that deviate in what they do with leases and answers ----------------------------------------------


def lag() -> None:
    """Ask for nothing until the first version, which the engine keeps and calls the newest, is old."""
    honest = RolloutClient.ask

    async def ask(self: Any, held: VersionId, *given: Any, **rest: Any) -> Any:
        return Refused("behind", 1.0, "") if held.version < OLD else await honest(self, held, *given, **rest)

    RolloutClient.ask = ask  # type: ignore[method-assign]


def hoard() -> None:
    """Ask for as much as may be had at once, and never answer."""
    honest = RolloutClient.ask

    async def ask(self: Any, held: Any, capacity: int, wait_s: float, **rest: Any) -> Any:
        return await honest(self, held, HOARD, wait_s, **rest)

    async def never(self: Any, leases: Any, **rest: Any) -> Any:
        await asyncio.Event().wait()

    RolloutClient.ask = ask  # type: ignore[method-assign]
    worker.EngineWorker.draw_batch = never  # type: ignore[method-assign]


def equivocate() -> None:
    """Hand in each answer, and then another one for the same samples."""
    honest = RolloutClient.submit

    async def submit(self: Any, answers: Sequence[Answer], **rest: Any) -> Any:
        verdicts = await honest(self, answers, **rest)
        await honest(self, [Answer(lease=one.lease, rollouts=tuple(map(other, one.rollouts))) for one in answers])
        return verdicts

    RolloutClient.submit = submit  # type: ignore[method-assign]


def other(rollout: Any) -> Any:
    """Return another rollout for the same sample, as well-formed as this one."""
    lower = array("f", [value - SHIFT for value in array("f", rollout.logprobs)])
    return msgspec.structs.replace(rollout, logprobs=lower.tobytes())


# -- relays that lie about chunks -----------------------------------------------------------------------------


def send_wrong_chunks() -> None:
    """Alter one bit of each chunk that is passed on."""
    honest = transfers.Link._chunk

    def poisoned(self: Any, *given: Any) -> Outgoing:
        out = honest(self, *given)
        altered = bytearray(out.payload)
        altered[len(altered) // 2] ^= 1
        return Outgoing(out.header, memoryview(altered), out.sent)

    transfers.Link._chunk = poisoned  # type: ignore[method-assign, assignment]


def withhold_chunks() -> None:
    """Take chunks to forward, and neither forward them nor send what others ask for."""
    arrived, heard = Forwarder.arrived, Forwarder.heard

    def keep(self: Any, peer: Any, index: int, kind: Kind, via: Any, *, now: float) -> None:
        arrived(self, peer, index, Kind.COPY, via, now=now)

    def ignore(self: Any, peer: Any, note: Note, *, now: float) -> None:
        if not isinstance(note, Want):
            heard(self, peer, note, now=now)

    Forwarder.arrived, Forwarder.heard = keep, ignore  # type: ignore[method-assign]


def lie_about_chunks() -> None:
    """Say of each version, as soon as it is known, that all of it is here; and send nothing of it."""
    withhold_chunks()
    everything = lambda transfer, part: Have(bitmap=b"\xff" * (len(part.chunks) // 8 + 1))  # noqa: E731
    transfers.Transfer.opening = everything  # type: ignore[method-assign]


NODES = {"hoarded-leases": hoard, "equivocation": equivocate}
RELAYS = {"wrong-chunks": send_wrong_chunks, "withheld-chunks": withhold_chunks, "lying-bitmaps": lie_about_chunks}


def main() -> None:
    """Run an attacker's node, or, with the attack as the only argument, its engine."""
    attack = sys.argv.pop(1)
    if len(sys.argv) == 1:
        from swarm.sampler.engine_child import serve

        serve(partial(engine_of, attack), ChildChannel())
        return
    from swarm.__main__ import main as join

    if attack in ENGINES:
        worker.Child = lambda name, module, kind, *secrets, **rest: Child(name, __spec__.name, attack, **rest)  # type: ignore
    if (deviate := (NODES | RELAYS | {"old-version": lag}).get(attack)) is not None:
        deviate()
    join()


if __name__ == "__main__":
    main()
