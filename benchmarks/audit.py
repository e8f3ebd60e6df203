"""What honest engines and some dishonest ones look like to the audit, and how often it is wrong.

bin/python -m benchmarks.audit --engines transformers/float32 transformers/bfloat16 vllm/float32 --json

A copy task is trained in one process, its weights are kept at three steps, and each engine draws with them; the audit
draws again, in float32. `missed_share`: tokens that miss the best one under their noise by more than the margin of
`swarm/audit/classes.toml` (of no class: 0.1 nats). `distance`: nats a token in the mean, of a rollout. Rows named after
a lie are drawn by transformers: another temperature, or older weights called newer.

`--hours` feeds honest samplers of each class to the auditor that ships, as many node-hours, each handing in a rollout a
second of which 5 % are audited: `as_measured` draws rollouts of the rows above with replacement, `as_allowed` misses
tokens as often as the class may at most. Both count samplers that were caught.

`--deep` measures only how bfloat16 differs from float32 in models deeper than the copy task's: random Qwen3 models, the
spread of whose logits grows with the scale of their weights.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import inspect
import json
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.learning_forced import OneProcess, sums_of
from swarm.audit.auditor import Auditor, Calibration, Finding
from swarm.learner.checkpoint.model_files import stored_weights
from swarm.learner.draws import gumbel
from swarm.learner.messages import AuditRollout
from swarm.learner.replay import replay, row_of
from swarm.node.auditing import measured_classes
from swarm.sampler.engine import EngineOptions, Generate, Install, Job, Sampled, Start
from swarm.settings import LeadConfig, load_config
from swarm.types import NodeId, SamplingRules, VersionId

KEPT_STEPS = (20, 40, 55, 58, 60)  # The task is learnt between steps 30 and 70; entropy falls from 2.3 to 0.3 nats
HONEST_STEPS = (20, 40, 60)
PROMPTS, GROUP = 200, 4
OF_NO_CLASS = Calibration(margin=0.1, missed=1.0, distance=0.3)
ROLLOUTS_PER_S, SHARE = 1.0, 0.05
BESIDE, AUDITED_BEFORE = 3, {40: 440, 60: 560}
"""Honest samplers beside one, and how many of their rollouts were audited before these steps: newcomers' 64 each, and
three quarters of what `bin/demo` audits beyond (522 and 682 in all, one run)."""
DEEP: dict[str, Any] = {
    **{"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1536, "head_dim": 64},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256},
}
DEEP_MODELS = ((2.0, 12), (4.0, 12), (8.0, 12), (12.0, 12), (16.0, 12), (8.0, 28))
DEEP_ROWS, DEEP_PROMPT, DEEP_TOKENS = 64, 8, 48
LYING = ("transformers/float32", "transformers/bfloat16")

Measured = dict[str, list[Finding]]


class Copies(OneProcess):
    """The copy task, with the weights after some steps kept in files."""

    def __init__(self, directory: Path, steps: int) -> None:
        given = {"max_staleness": 0, "steps": steps, "eval_prompts": 1, "checkpoint_every_steps": steps, "seed": 0}
        super().__init__(load_config(LeadConfig, None, given), directory)
        self.files: dict[int, Path] = {}

    def learn(self) -> None:
        for number in range(max(KEPT_STEPS) + 1):
            if number in KEPT_STEPS:
                self.files[number] = self._directory / f"kept-{number}.bin"
                shutil.copyfile(self._staging, self.files[number])
            self.step(number)

    def jobs(self, temperature: float) -> tuple[Job, ...]:
        rules = SamplingRules(
            temperature=temperature, max_new_tokens=self._max_new_tokens, stop_token_ids=self._stop_token_ids
        )
        return tuple(
            Job(prompt_token_ids=tokens, seed=10**6 + GROUP * place + index, rules=rules, time_limit_s=600.0)
            for place in range(PROMPTS)
            for tokens in [self._token_ids(self._task.prompt(10_000 + place))]
            for index in range(GROUP)
        )

    async def drawn_by(self, engine: Any, step: int, temperature: float = 1.0) -> tuple[Sampled, ...]:
        """`engine` has started."""
        path = self.files[step]
        install = Install(
            version=VersionId(incarnation=0, version=step), path=str(path), tensor_sums=sums_of(path, self._layout)
        )
        await _answer(engine.install(install, _quietly))
        samples = (await _answer(engine.generate(Generate(jobs=self.jobs(temperature)), _quietly))).samples
        assert not any(sample.fault for sample in samples)
        return tuple(samples)

    async def started(self, name: str) -> Any:
        kind, dtype = name.split("/")
        engine: Any
        if kind == "vllm":
            from swarm.sampler.vllm.engine import VllmEngine

            engine = VllmEngine()
        else:
            from swarm.sampler.transformers import TransformersEngine

            engine = TransformersEngine()
        options = EngineOptions(device="cpu", dtype=dtype)  # type: ignore[arg-type]
        start = Start(directory=str(self._directory / "model"), layout=self._layout, options=options)
        await _answer(engine.start(start, _quietly))
        return engine

    def found(self, samples: Sequence[Sampled], step: int, known: Calibration) -> tuple[list[Finding], list[float]]:
        """Return what the audit finds of samples that claim the weights of `step`, and all margins above 0."""
        jobs = self.jobs(1.0)
        weights = stored_weights(self._trainer._tensors, self.files[step])
        pairs = zip(jobs, samples, strict=True)
        rows = [row_of(AuditRollout(j.prompt_token_ids, s.token_ids, s.logprobs, j.seed, 0.0)) for j, s in pairs]
        policy, rules = self._trainer._policy, self._trainer._compute
        looked = replay(policy, rows, [job.seed for job in jobs], rules, torch.device("cpu"), weights)
        findings = [
            Finding(
                rollout_id=f"t{number}/0",
                tokens=len(one.margins),
                missed=int((one.margins > known.margin).sum()),
                distance=float((one.logprobs - row.behaviour).abs().mean()),
            )
            for number, (one, row) in enumerate(zip(looked, rows, strict=True))
        ]
        return findings, [float(margin) for one in looked for margin in one.margins if margin > 0]


async def _answer(found: Any) -> Any:
    """Of an engine that is asynchronous or not."""
    return await found if inspect.isawaitable(found) else found


def _quietly(*said: object) -> None:
    pass


def row(name: str, findings: Sequence[Finding], margins: Sequence[float], caught: int | None) -> dict[str, Any]:
    tokens, off = sum(one.tokens for one in findings), sorted(one.distance for one in findings)
    return {
        "name": name,
        "tokens": tokens,
        "missed_share": round(sum(one.missed for one in findings) / tokens, 5),
        "largest_margin": round(max(margins, default=0.0), 5),
        "distance_p50": round(off[len(off) // 2], 5),
        "distance_max": round(off[-1], 5),
        "caught_after_rollouts": caught,
    }


def caught_after(
    findings: Sequence[Finding], class_name: str, classes: dict[str, Calibration], honest: Sequence[Finding] = ()
) -> int | None:
    """Return after how many of these rollouts a sampler is caught, beside BESIDE others that handed in `honest`."""
    auditor = Auditor(classes, secret=b"", share=SHARE)
    for number, finding in enumerate(honest):
        auditor.note(NodeId(f"{1 + number % BESIDE:032x}"), class_name, finding)
    auditor.settle()
    for number, finding in enumerate(findings):
        if auditor.note(NodeId("0" * 32), class_name, finding) is not None:
            return number + 1
    return None


def false_alarms(pool: Sequence[Finding], class_name: str, hours: float, seed: int = 0) -> int:
    """Return how many samplers were caught in so many hours of each, four in a swarm; `pool` are their rollouts."""
    draw, classes, caught = random.Random(seed), measured_classes(), 0
    nodes = [NodeId(f"{number:032x}") for number in range(1 + BESIDE)]
    for _ in range(round(hours / len(nodes))):
        auditor = Auditor(classes, secret=b"", share=SHARE)
        for _ in range(64 + round(3600 * ROLLOUTS_PER_S * SHARE)):
            auditor.settle()
            caught += sum(auditor.note(node, class_name, draw.choice(pool)) is not None for node in nodes)
    return caught


def as_allowed(pool: Sequence[Finding], known: Calibration, seed: int = 0) -> list[Finding]:
    """Return as many rollouts that are as long, and miss each token with the largest allowed probability."""
    draw = random.Random(seed)
    return [
        Finding(
            rollout_id="t0/0",
            tokens=one.tokens,
            missed=sum(draw.random() < known.missed for _ in range(one.tokens)),
            distance=0.0,
        )
        for _ in range(25)
        for one in pool
    ]


async def measure(engines: Sequence[str], directory: Path) -> tuple[list[dict[str, Any]], Measured]:
    classes, task = measured_classes(), Copies(directory, max(KEPT_STEPS) + 1)
    task.learn()
    rows, pools = list[dict[str, Any]](), Measured()
    for name in engines:
        class_name, engine = f"{name}/cpu", await task.started(name)
        known = classes.get(class_name, OF_NO_CLASS)
        pools[class_name] = []
        for step in HONEST_STEPS:
            findings, margins = task.found(await task.drawn_by(engine, step), step, known)
            rows.append(
                row(f"{class_name}, step {step}", findings, margins, caught_after(findings, class_name, classes))
            )
            pools[class_name] += findings
        if name in LYING:
            for what, drawn, claimed, temperature in (
                ("temperature 0.8", 60, 60, 0.8),
                ("temperature 0.8, step 40", 40, 40, 0.8),
                ("2 steps older", 58, 60, 1.0),
                ("5 steps older", 55, 60, 1.0),
                ("20 steps older, step 40", 20, 40, 1.0),
            ):
                findings, margins = task.found(await task.drawn_by(engine, drawn, temperature), claimed, known)
                seen = random.Random(0).sample(pools[class_name], AUDITED_BEFORE[claimed])
                alone, caught = (caught_after(findings, class_name, classes, beside) for beside in ((), seen))
                rows.append(
                    {**row(f"{class_name}, {what}", findings, margins, caught), "caught_alone_after_rollouts": alone}
                )
        print(json.dumps(rows[-1]), flush=True)
    return rows, pools


def deep(scale: float, layers: int, seed: int) -> dict[str, Any]:
    """Draw with a random model in bfloat16, and again with the same weights in float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    untyped: Any = Qwen3ForCausalLM
    config = Qwen3Config(**DEEP, num_hidden_layers=layers, initializer_range=0.02 * scale, tie_word_embeddings=False)
    half = untyped(config).eval().to(torch.bfloat16)
    exact = copy.deepcopy(half).float()
    tokens, seeds = torch.randint(0, config.vocab_size, (DEEP_ROWS, DEEP_PROMPT)), torch.arange(DEEP_ROWS)
    with torch.no_grad():
        past, new = None, tokens
        for _ in range(DEEP_TOKENS):
            out = half(new, past_key_values=past, use_cache=True)
            past, at = out.past_key_values, torch.full((DEEP_ROWS,), tokens.shape[1] - 1)
            noised = out.logits[:, -1].float().log_softmax(-1) + gumbel(seeds, at, config.vocab_size)
            new = noised.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, new], dim=1)
        logits = exact(tokens).logits[:, DEEP_PROMPT - 1 : -1]
        at = torch.arange(DEEP_PROMPT - 1, DEEP_PROMPT - 1 + DEEP_TOKENS).repeat(DEEP_ROWS)
        noised = logits.log_softmax(-1).flatten(0, 1)
        entropy = float(-(noised.exp() * noised).sum(-1).mean())
        noised = noised + gumbel(seeds.repeat_interleave(DEEP_TOKENS), at, config.vocab_size)
        drawn = tokens[:, DEEP_PROMPT:].flatten()[:, None]
        margins = noised.max(-1).values - noised.gather(1, drawn)[:, 0]
    return {
        "layers": layers,
        "logit_std": round(float(logits.std(-1).mean()), 2),
        "entropy": round(entropy, 2),
        "tokens": len(margins),
        "missed_by_more": {str(m): round(float((margins > m).float().mean()), 5) for m in (0.1, 0.3, 0.5, 1.0)},
        "largest_margin": round(float(margins.max()), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["transformers/float32", "transformers/bfloat16"])
    parser.add_argument("--hours", type=float, default=10_000)
    parser.add_argument("--deep", action="store_true", help="only how bfloat16 differs in deeper models")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.deep:
        found = [deep(scale, layers, seed) for scale, layers in DEEP_MODELS for seed in range(3)]
        for one in found:
            print(json.dumps(one))
        if given.json:
            print(json.dumps({"deep": found}))
        return
    with tempfile.TemporaryDirectory() as directory:
        rows, pools = asyncio.run(measure(given.engines, Path(directory)))
    for one in rows:
        print(json.dumps(one))
    alarms = {}
    for class_name, pool in pools.items():
        if (known := measured_classes().get(class_name)) is not None:
            allowed = as_allowed(pool, known)
            alarms[class_name] = {
                "node_hours": given.hours,
                "as_measured": false_alarms(pool, class_name, given.hours),
                "as_allowed": false_alarms(allowed, class_name, given.hours),
            }
            print(class_name, json.dumps(alarms[class_name]), flush=True)
    if given.json:
        print(json.dumps({"rows": rows, "false_alarms": alarms}))


if __name__ == "__main__":
    main()
