"""Attackers that are nodes: `python -m tests.redteam.sampler ATTACK join ...` joins as any node does, and deviates.

What deviates is replaced in the attacker's own process (wire.py), or in its engine's (here). An engine deviates in one
thing: it proves and reports what an honest one would, and its log-probs are those that its weights give its tokens,
unless they are the attack. The tasks are those of swarm/tasks/digits.py: the answer is in the prompt.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, partialmethod
from itertools import pairwise, repeat
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from msgspec.structs import replace

from swarm.process import Child, ChildChannel
from swarm.sampler import worker
from swarm.sampler.engine import Engine, Generate, Generated, Install, Job, Sampled, Told
from swarm.tasks.digits import DIGITS
from swarm.types import Span, VersionId
from tests.redteam.wire import BEYOND, NODES, RELAYS

NOISE = 0.3  # Of each tensor's own spread: the model still speaks, and is another one
LEVELS = 7  # Weights of 4 bits are whole numbers from -7 to 7
COOLER = 0.7  # Times the temperature that was asked for
TRUSTED = 128  # Samples: the first 64 of a newcomer are audited in full
LATE = 30  # A version: attackers that begin late are known as honest by then
SIGNED = 0.3  # Nats up or down, which nearly cancel in the mean
BELOW = 0.019  # The limit of bfloat16 is 0.02 nats: the worst lie that stays unseen
KEPT = 3  # Versions: S + 1 of the campaign's runs
VOCABULARY = 14  # Of the tiny model
RAISING, HANGING = 4, 5  # Equals signs on which the reward of runs.py raises, or never returns
NOTED = "noted"  # File in the node's directory

BFLOAT16, INT8, OWN = {"dtype": "bfloat16"}, {"precision": "int8"}, {"device": "own"}  # Of no class that is known
FAILED = Sampled(token_ids=b"", logprobs=b"", spans=(), finish="failed", fault="time limit")
Answers = Callable[[Any, Sequence[Job], Sequence[Sampled]], list[Sampled]]
"""Makes the answers that are handed in from an engine, jobs, and what the engine drew for them."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """How an attacker's engine deviates: in its `answers` to training prompts, or to `held_out` ones, from version
    `since` on; in what it makes of each tensor after an install; in fields of Started. Several `nodes` may attack
    together."""

    answers: Answers | None = None
    held_out: bool = False
    since: int = 0
    weights: Callable[[Any], None] = lambda tensor: None
    names: Mapping[str, Any] = field(default_factory=dict)
    nodes: int = 1


def wrong_model(tensor: Any) -> None:
    tensor.add_(tensor.clone().normal_(), alpha=NOISE * float(tensor.std()))


def wrong_precision(tensor: Any) -> None:
    """Round to 4 bits."""
    step = (tensor.abs().max() / LEVELS).clamp(min=1e-12)
    tensor.copy_((tensor / step).round() * step)


def tokens_of(one: Sampled) -> list[int]:
    return array("i", one.token_ids).tolist()


def expected(job: Job) -> list[int]:
    """Return the right answer to `3141=`: its digits and the stop token."""
    return [*job.prompt_token_ids[-1 - DIGITS : -1], job.rules.stop_token_ids[0]]


def right(job: Job, one: Sampled) -> int:
    """Return how many tokens of an answer are right."""
    return sum(map(int.__eq__, tokens_of(one), expected(job)))


def best(job: Job, samples: Sequence[Sampled]) -> Sampled:
    return max(samples, key=partial(right, job))


def sampled(job: Job, parts: Sequence[tuple[int, float, VersionId]]) -> Sampled:
    """Return an answer of these tokens, each with its log-prob and version."""
    tokens, logprobs, versions = zip(*parts, strict=True)
    ends = [at for at in range(1, len(parts) + 1) if versions[at - 1] != (*versions, None)[at]]
    return Sampled(
        token_ids=array("i", tokens).tobytes(),
        logprobs=array("f", logprobs).tobytes(),
        spans=tuple(Span(version=versions[start], start=start, end=end) for start, end in pairwise([0, *ends])),
        finish="stop" if tokens[-1] in job.rules.stop_token_ids else "length",
    )


def claimed(engine: Any, job: Job, tokens: Sequence[int]) -> Sampled:
    """Return an answer of these tokens, with the log-probs that the installed weights give them."""
    prompt = job.prompt_token_ids
    ids = next(engine._model.parameters()).new_tensor([[*prompt, *tokens]]).long()
    logits = engine._model(ids).logits[0, len(prompt) - 1 : -1].detach().float() / (job.rules.temperature or 1.0)
    logprobs = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
    return sampled(job, [(token, value, engine._version) for token, value in zip(tokens, logprobs, strict=True)])


def each(change: Callable[[Any, Job, Sampled], Sampled]) -> Answers:
    """Change each answer by itself."""
    return lambda engine, jobs, honest: [change(engine, job, one) for job, one in zip(jobs, honest, strict=True)]


def handing_in(change: Callable[[Job, list[int]], Sequence[int]]) -> Answers:
    """Hand in other tokens than were drawn."""
    return each(lambda engine, job, one: claimed(engine, job, change(job, tokens_of(one))))


def saying(change: Callable[[float, float], float]) -> Answers:
    """Claim other log-probs, made of the true one and of how far into the answer its token is, from 0 to 1."""

    def saying_so(engine: Any, job: Job, one: Sampled) -> Sampled:
        values = array("f", one.logprobs)
        changed = [min(0.0, change(value, at / len(values))) for at, value in enumerate(values)]
        return replace(one, logprobs=array("f", changed).tobytes())

    return each(saying_so)


def shifted(nats: float) -> Answers:
    return saying(lambda value, at: value + nats)


def note(engine: Any, figures: Sequence[float]) -> None:
    """Leave the mean of all figures so far for the campaign."""
    engine.noted += figures
    (Path(engine._directory).parent / NOTED).write_text(str(mean(engine.noted)))


def sign_by_reward(nats: float) -> Answers:
    """Claim so much too much for answers that are better than the mean of the batch, and too little for others."""

    def answers(engine: Any, jobs: Sequence[Job], honest: Sequence[Sampled]) -> list[Sampled]:
        pairs = list(zip(jobs, honest, strict=True))
        usual = mean(right(*pair) for pair in pairs)
        signs = [nats if right(*pair) > usual else -nats for pair in pairs]
        return [shifted(sign)(engine, [job], [one])[0] for sign, (job, one) in zip(signs, pairs, strict=True)]

    return answers


def temperature(engine: Any, jobs: Sequence[Job], honest: Sequence[Sampled]) -> list[Sampled]:
    """Draw at a lower temperature, and claim the one that was asked for."""
    cooler = [replace(job, rules=replace(job.rules, temperature=COOLER * job.rules.temperature)) for job in jobs]
    return [claimed(engine, job, tokens_of(one)) for job, one in zip(jobs, engine.draw(cooler), strict=True)]


def copies(engine: Any, jobs: Sequence[Job], honest: Sequence[Sampled]) -> list[Sampled]:
    """Hand in one answer for all samples of a prompt."""
    first = {job.prompt_token_ids: one for job, one in reversed(list(zip(jobs, honest, strict=True)))}
    return [first[job.prompt_token_ids] for job in jobs]


oracle = handing_in(lambda job, tokens: expected(job))
"""Hand in right answers that were looked up and never drawn."""


def sleeper(engine: Any, jobs: Sequence[Job], honest: Sequence[Sampled]) -> list[Sampled]:
    """Be an oracle once trusted."""
    engine.drawn += len(jobs)
    return list(honest) if engine.drawn <= TRUSTED else oracle(engine, jobs, honest)


def ended(job: Job, tokens: Sequence[int]) -> list[int]:
    """Cut an answer after its first stop token, or add one if there is room."""
    whole = [*tokens, job.rules.stop_token_ids[0]]
    return whole[: whole.index(whole[-1]) + 1][: job.rules.max_new_tokens]


def one_token(job: Job, tokens: list[int]) -> list[int]:
    """Put the first wrong token right."""
    wanted = expected(job)
    wrong = next((at for at, token in enumerate(wanted) if tokens[at : at + 1] != [token]), None)
    return tokens if wrong is None else ended(job, [*tokens[:wrong], wanted[wrong], *tokens[wrong + 1 :]])


def tenth(job: Job, tokens: list[int]) -> list[int]:
    """Replace a tenth of the tokens by random ones."""
    draw = Random(job.seed)
    return ended(job, [draw.randrange(VOCABULARY) if draw.random() < 0.1 else token for token in tokens])


def equals(signs: int) -> Answers:
    """Hand in nothing but equals signs: `====`."""
    return handing_in(lambda job, tokens: [*job.prompt_token_ids[-1:] * signs, job.rules.stop_token_ids[0]])


def stolen(engine: Any, job: Job, one: Sampled) -> Sampled:
    """Hand in what another node of the pair drew for the prompt, if it did. Note how often."""
    own, prompt = Path(engine._directory).parent, f"drew-{'-'.join(map(str, job.prompt_token_ids))}"
    others = [path for path in own.parent.glob(f"*/{prompt}") if path.parent != own]
    note(engine, [len(others)])
    (own / prompt).write_bytes(one.token_ids)
    return claimed(engine, job, array("i", others[0].read_bytes())) if others else one


def easy_half(engine: Any, jobs: Sequence[Job], honest: Sequence[Sampled]) -> list[Sampled]:
    """Say that the generation of the worse half of each batch failed."""
    worse = sorted(range(len(jobs)), key=lambda at: right(jobs[at], honest[at]))[: len(jobs) // 2]
    return [FAILED if at in worse else one for at, one in enumerate(honest)]


def best_of_2(engine: Any, jobs: Sequence[Job], honest: Sequence[Sampled]) -> list[Sampled]:
    """Draw once more from another seed, and hand in the better answer."""
    again = engine.draw([replace(job, seed=job.seed ^ 1) for job in jobs])
    return [best(job, two) for job, *two in zip(jobs, honest, again, strict=True)]


def best_drawn(engine: Any, jobs: Sequence[Job], honest: Sequence[Sampled], *, splices: bool) -> list[Sampled]:
    """Draw with each version kept that the lease takes, and hand in the best answer. With `splices` a newer version may
    go on from any token of an older one's answers. Note how many answers there are to choose from."""
    found: list[dict[Any, Any]] = [{} for _ in jobs]  # By tokens: each token with its log-prob and version
    for version in [*engine.kept]:
        engine.hold(version)
        able = [at for at, job in enumerate(jobs) if version.version >= job.rules.stop_token_ids[-1] - BEYOND]
        older = {at: [*found[at].values()] if splices else [] for at in able}
        begun = [(at, start) for at in able for start in {(), *(a[:n] for a in older[at] for n in range(1, len(a)))}]
        rests = engine.draw([going_on(jobs[at], start) for at, start in begun])
        for (at, start), rest in zip(begun, rests, strict=True):
            whole = (*start, *zip(tokens_of(rest), array("f", rest.logprobs), repeat(version)))
            found[at] |= {tuple(token for token, _, _ in whole): whole} if rest.token_ids else {}
    note(engine, [len(answers) for answers in found])
    answers = [[sampled(job, one) for one in ours.values()] for job, ours in zip(jobs, found, strict=True)]
    return [best(job, [one, *ours]) for job, one, ours in zip(jobs, honest, answers, strict=True)]


def going_on(job: Job, start: tuple[Any, ...]) -> Job:
    """Return the job that draws the rest: its noise depends only on the seed and on how many tokens stand before."""
    rules = replace(job.rules, max_new_tokens=job.rules.max_new_tokens - len(start))
    return replace(job, prompt_token_ids=(*job.prompt_token_ids, *(token for token, _, _ in start)), rules=rules)


ENGINES = {
    "wrong-model": Deviation(weights=wrong_model),
    "wrong-precision": Deviation(weights=wrong_precision),
    "old-version": Deviation(),
    "invented-log-probs": Deviation(shifted(-2.2)),
    "random-log-probs": Deviation(saying(lambda value, at: Random(value).uniform(-3.0, 0.0))),
    "small-shift": Deviation(shifted(-0.05)),
    "bfloat16-shift": Deviation(shifted(-0.1), names=BFLOAT16),
    "rounded-shift": Deviation(shifted(-0.27), names=INT8),
    "two-liars": Deviation(shifted(-0.27), names=INT8, nodes=2),
    "late-shift": Deviation(shifted(-0.27), names=INT8, since=LATE),
    "unknown-shift": Deviation(shifted(-1.4), names=OWN),
    "sign-by-reward": Deviation(sign_by_reward(SIGNED), names=INT8),
    "below-limits": Deviation(sign_by_reward(BELOW), names=BFLOAT16),
    "sign-by-position": Deviation(saying(lambda value, at: value + (SIGNED if at < 0.5 else -SIGNED)), names=INT8),
    "temperature": Deviation(temperature),
    "truncation": Deviation(handing_in(lambda job, tokens: [*tokens[: len(tokens) // 2], job.rules.stop_token_ids[0]])),
    "copies": Deviation(copies),
    "oracle": Deviation(oracle),
    "five-keys": Deviation(oracle, nodes=5),
    "late-oracle": Deviation(oracle, since=LATE),
    "sleeper": Deviation(sleeper),
    "unmeasured-class": Deviation(oracle, names=OWN),
    "renamed-oracle": Deviation(oracle, names=BFLOAT16),
    "class-hopper": Deviation(oracle),
    "held-out-oracle": Deviation(oracle, held_out=True),
    "one-token": Deviation(handing_in(one_token)),
    "tenth": Deviation(handing_in(tenth)),
    "best-of-2": Deviation(best_of_2),
    "best-of-versions": Deviation(partial(best_drawn, splices=False)),
    "spliced-spans": Deviation(partial(best_drawn, splices=True)),
    "stolen-answers": Deviation(each(stolen), nodes=2),
    "easy-half": Deviation(easy_half),
    "only-right": Deviation(each(lambda engine, job, one: one if tokens_of(one) == expected(job) else FAILED)),
    "raising-answers": Deviation(equals(RAISING), nodes=2),
    "hanging-answers": Deviation(equals(HANGING)),
}


def engine_of(attack: str) -> Engine:
    """Return an engine that deviates by `attack`."""
    from swarm.sampler.transformers import Threaded, TransformersEngine

    deviation = ENGINES[attack]

    class Dishonest(TransformersEngine):
        def __init__(self) -> None:
            super().__init__()
            self.drawn = 0
            self.noted: list[float] = []
            self.kept: dict[VersionId, list[Any]] = {}

        def start(self, *given: Any) -> Any:
            return replace(super().start(*given), **deviation.names)

        def install(self, command: Install, progress: Told) -> Any:
            if attack == "old-version" and self._version is not None:
                self._version = command.version
                return "sums"
            # Changed words alone would be put among other weights than they belong to, and the sums would not come out.
            done = super().install(replace(command, changed=""), progress)
            for parameter in self._model.parameters():
                deviation.weights(parameter.data)
            self.kept[command.version] = [parameter.data.clone() for parameter in self._model.parameters()]
            self.kept = dict([*self.kept.items()][-KEPT:])
            return done

        def hold(self, version: VersionId) -> None:
            self._version = version
            for parameter, kept in zip(self._model.parameters(), self.kept[version], strict=True):
                parameter.data.copy_(kept)

        def draw(self, jobs: Sequence[Job]) -> list[Sampled]:
            return [*super().generate(Generate(jobs=tuple(jobs)), lambda: None).samples]

        def generate(self, command: Generate, progress: Told) -> Generated:
            drawn, jobs = super().generate(command, progress), command.jobs
            places = [at for at, job in enumerate(jobs) if (job.rules.temperature == 0) == deviation.held_out]
            is_early = self._version is None or self._version.version < deviation.since
            if not (deviation.answers and places) or is_early or FAILED.finish in {one.finish for one in drawn.samples}:
                return drawn
            given = deviation.answers(self, [jobs[at] for at in places], [drawn.samples[at] for at in places])
            other = dict(zip(places, given, strict=True))
            return replace(drawn, samples=tuple(other.get(at, one) for at, one in enumerate(drawn.samples)))

    return Threaded(Dishonest())


def main() -> None:
    """Run an attacker's node, or, with the attack as the only argument, its engine."""
    attack = sys.argv.pop(1)
    if len(sys.argv) == 1:
        from swarm.sampler.engine_child import serve

        channel = ChildChannel()
        serve(engine_of(attack), channel)
        return
    from swarm.__main__ import main as join

    if attack in ENGINES:
        worker.Child = lambda name, module, kind, *secrets, **rest: Child(name, __spec__.name, attack, **rest)  # type: ignore
    for kind, name, change in (NODES | RELAYS).get(attack, ()):
        setattr(kind, name, partialmethod(change, getattr(kind, name)))
    join()


if __name__ == "__main__":
    main()
