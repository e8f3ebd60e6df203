"""What honest engines look like to the audit on a real model: how far off their log-probs and their draws are.

    bin/python -m benchmarks.audit --engines transformers/float32 mlx/int8 --model DIR --out DIR
    bin/python -m benchmarks.audit --summary DIR

An engine is named KIND/PRECISION, or KIND/PRECISION/DTYPE where rounded weights are to be computed in a certain type.
Without --model, the model is the one that examples/smollm2.py makes. Every engine draws the same samples at temperature
1, with the same seeds: chats that answer open questions, and sums that the model continues as a text. The learner then
replays them, in float32 and in bfloat16 autocast, and two figures of each token are saved in DIR, in a file per engine:
`error`, the log-prob that the engine claims, less the one that the learner finds, and `margin`, by how much the token
misses being the best under its noise.

The summary prints a line of JSON for each engine and learner, with limits in the form of swarm/audit/classes.toml: how
large errors and margins are, and after how many audited tokens a lie is caught at the limits that hold for the class.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks import Figures, parser_of, said
from benchmarks.sampler_models import running
from swarm.audit.auditing import measured_classes
from swarm.audit.auditor import ANY, HALF, Auditor, ErrorLimits, Finding
from swarm.learner.checkpoint.model_files import layout_of, load_model, save_small_files, stream_tensors, write_staging
from swarm.learner.messages import AuditRollout, TrainerConfig
from swarm.learner.policy import Policy
from swarm.learner.ranks import Ranks
from swarm.learner.replay import audit
from swarm.learner.trainer import stop_token_ids_of
from swarm.models.device import pick_device
from swarm.sampler.engine import EngineKind, EngineOptions, Generate, Install, Job, Sampled, Start
from swarm.types import NodeId, SamplingRules, VersionId
from tests.unit.models import sums_of

SUMS = Path(__file__).parents[1] / "examples" / "sums.jsonl"
SUBJECTS = ("the sea", "an old clock", "trains", "bread", "honesty")
ASKED = (
    "Write a short story about {}.",
    "Explain {} to a child.",
    "What are three interesting facts about {}?",
    "Write a poem about {}.",
    "What would the world be like without {}?",
    "Give me some advice that has to do with {}.",
    "Write a letter to a friend about {}.",
    "Why do people care about {}?",
)
CHAT_SAMPLES, CHAT_TOKENS = 4, 64
SUM_SAMPLES, SUM_TOKENS = 8, 6
PROMPTS = len(SUBJECTS) * len(ASKED)  # Of either kind
CONTEXT_TOKENS = 256  # Of a sample with its prompt: an engine is to reserve no more
TIME_LIMIT_S = 1800.0  # For one sample: more than any of them takes
TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 16_384}  # In one pass of the learner
THREADS = 2  # Of torch, on a CPU
FIRST_SEED = 10**6
LEARNERS = ("float32", "bfloat16")
MISSES = (0.3, 1.0)  # Nats
FACTOR = 5.0  # Between what honest engines do and a limit
SHIFTS = (0.02, 0.05, 0.1, 0.27, 1.0)  # Nats that every claim is too high by
REPLACED = (0.01, 0.02, 0.05, 0.1, 0.2)  # Shares of tokens that are drawn with other noise than that of their seed
RUNS = 20  # Orders of the rollouts
SAMPLER = NodeId("sampler")

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A sample to draw. `prompt` numbers the prompts, chats first."""

    job: Job
    prompt: int
    is_chat: bool


class Learner:
    """The model in float32, as the learner holds it, and its weights in a file, as engines install them."""

    def __init__(self, name: str, directory: Path, device: str) -> None:
        self.device = pick_device(device)
        model, self.tokenizer = load_model(name, seed=0)
        self._stops = stop_token_ids_of(model, self.tokenizer)
        self.directory, self.files = directory, directory / "model"
        tensors = stream_tensors(model)
        self.layout = layout_of(tensors, save_small_files(model, self.tokenizer, self.files))
        self.weights = directory / "weights.bin"
        write_staging(tensors, self.weights)
        self._rules = TrainerConfig(packing=False, tokens_per_micro_batch=TOKENS_AT_ONCE[self.device.type])
        self._policy = Policy(model.to(self.device).eval(), self._rules, temperature=1.0)

    def asked(self, prompts: int) -> list[Asked]:
        """All samples of `prompts` prompts of either kind, those of a prompt together. A smaller number gives a part of
        the same samples, with the same seeds."""
        chat = SamplingRules(temperature=1.0, max_new_tokens=CHAT_TOKENS, stop_token_ids=self._stops)
        text = SamplingRules(temperature=1.0, max_new_tokens=SUM_TOKENS, stop_token_ids=self._stops, stop=("\n",))
        open_ones = [line.format(subject) for line in ASKED for subject in SUBJECTS]
        sums = Random(0).sample([json.loads(line)["prompt"] for line in SUMS.read_text().splitlines()], PROMPTS)
        wanted = [(self._chat(one), CHAT_SAMPLES, chat) for one in open_ones]
        wanted += [(self._text(one), SUM_SAMPLES, text) for one in sums]
        places = [(number, one) for number, (_, samples, _) in enumerate(wanted) for one in range(samples)]
        return [
            Asked(
                job=Job(prompt_token_ids=tokens, seed=FIRST_SEED + at, rules=rules, time_limit_s=TIME_LIMIT_S),
                prompt=number,
                is_chat=rules is chat,
            )
            for at, (number, _) in enumerate(places)
            for tokens, _, rules in [wanted[number]]
            if number % PROMPTS % (PROMPTS // prompts) == 0
        ]

    def _chat(self, question: str) -> tuple[int, ...]:
        turns = [{"role": "user", "content": question}]
        return self._text(str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)))

    def _text(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    def figures(self, asked: Sequence[Asked], samples: Sequence[Sampled]) -> dict[str, Array]:
        pairs = list(zip(asked, samples, strict=True))
        claims = [
            AuditRollout(one.job.prompt_token_ids, drawn.token_ids, drawn.logprobs, one.job.seed)
            for one, drawn in pairs
        ]
        counts = [len(drawn.token_ids) // 4 for _, drawn in pairs]
        claimed = np.concatenate([array("f", drawn.logprobs) for _, drawn in pairs])
        found: dict[str, Array] = {
            "token": np.concatenate([array("i", drawn.token_ids) for _, drawn in pairs]),
            "rollout": np.repeat([one.job.seed - FIRST_SEED for one, _ in pairs], counts),
            "position": np.concatenate([np.arange(count) for count in counts]),
            "prompt": np.repeat([one.prompt for one, _ in pairs], counts),
            "claimed": claimed,
        }
        for learner in LEARNERS:
            half = learner == "bfloat16"
            looked = audit(self._policy, claims, self._rules, self.device, None, ranks=Ranks(), half=half)
            errors, margins = (np.frombuffer(b"".join(one), np.float32) for one in (looked.errors, looked.margins))
            found[f"logprob_{learner}"] = claimed - errors
            found[f"error_{learner}"] = errors
            found[f"margin_{learner}"] = margins
        return found


def options_of(name: str, device: str) -> tuple[EngineKind, EngineOptions]:
    told, held_as, *computed_in = name.split("/")
    kind = msgspec.convert(told, EngineKind)
    is_rounded = held_as not in ("float32", "bfloat16")
    options: Figures = {
        "device": device if kind == "transformers" else "auto",
        "dtype": computed_in[0] if computed_in else "auto" if is_rounded else held_as,
        "precision": held_as if is_rounded else "none",
    }
    return kind, EngineOptions(**options, max_model_len=CONTEXT_TOKENS, hang_s=TIME_LIMIT_S)


async def drawn_by(name: str, learner: Learner, asked: Sequence[Asked], device: str) -> tuple[list[Sampled], str]:
    kind, options = options_of(name, device)
    start = Start(directory=str(learner.files), layout=learner.layout, options=options)
    install = Install(
        version=VersionId(incarnation=0, version=0),
        path=str(learner.weights),
        tensor_sums=sums_of(learner.weights, learner.layout),
    )
    samples = list[Sampled]()
    async with running(kind, learner.directory) as engine:
        started = await engine.launch(start)
        await engine.install(install)
        for batch in _batches(asked, started.places):
            samples += (await engine.draw(Generate(jobs=tuple(one.job for one in batch)))).samples
    assert not any(sample.fault for sample in samples)
    return samples, started.engine_class


def _batches(asked: Sequence[Asked], places: int) -> Iterator[Sequence[Asked]]:
    """Of one kind, as many as the engine has places for."""
    for kind in (True, False):
        own = [one for one in asked if one.is_chat is kind]
        yield from (own[at : at + places] for at in range(0, len(own), places))


def measure(engines: Sequence[str], model: str, device: str, prompts: int, out: Path) -> None:
    """Draw with each engine and save what the learner finds, as soon as it is known."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        learner = Learner(model, Path(directory), device)
        asked = learner.asked(prompts)
        for name in engines:
            began = time.monotonic()
            samples, engine_class = asyncio.run(drawn_by(name, learner, asked, device))
            drawn_s = time.monotonic() - began
            found: Figures = learner.figures(asked, samples)
            file = out / f"{name.replace('/', '-')}.npz"
            np.savez_compressed(file, engine=np.array(name), engine_class=np.array(engine_class), **found)
            told = {"engine": name, "class": engine_class, "tokens": len(found["token"]), "drawn_s": round(drawn_s, 1)}
            said(told | {"replayed_s": round(time.monotonic() - began - drawn_s, 1)})


# -- the summary -------------------------------------------------------------------------------------------------


def summary(directory: Path) -> Iterator[Figures]:
    for path in sorted(directory.glob("*.npz")):
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        for learner in LEARNERS:
            yield figures(arrays, learner) | caught(arrays, learner)


def figures(arrays: Arrays, learner: str) -> Figures:
    error, margin = (arrays[f"{name}_{learner}"].astype(np.float64) for name in ("error", "margin"))
    is_early = early(arrays)
    bias = max(abs(float(error[where].mean())) for where in (is_early, ~is_early))
    size, missed = float(np.abs(error).mean()), float(np.minimum(margin, 1.0).mean())
    return {
        "engine": str(arrays["engine"]),
        "class": str(arrays["engine_class"]),
        "learner": learner,
        "tokens": len(error),
        "error_mean": float(error.mean()),
        "error_mean_se": _error_of_mean(error, arrays["rollout"]),
        "error_sd": float(error.std()),
        "bias": bias,
        "size": size,
        "mismatch_kl": float((np.expm1(-error) + error).mean()),
        **{f"margin >{least:g}": float((margin > least).mean()) for least in MISSES},
        "margin": missed,
        "margin_max": float(margin.max()),
        # Of the largest sum of honest evidence against it, the limit `sum` is chosen by hand.
        "largest_sum": largest_sum(arrays, learner),
        "limits": {"bias": FACTOR * bias, "size": FACTOR * size, "margin": FACTOR * missed},
    }


def _error_of_mean(error: Array, rollout: Array) -> float:
    """The standard error of the mean, as if only whole rollouts were independent."""
    _, place = np.unique(rollout, return_inverse=True)
    sums = np.bincount(place, error - error.mean())
    return float(np.sqrt((sums**2).sum()) / len(error))


def early(arrays: Arrays) -> Array:
    """Return which tokens are in the first half of their answer."""
    _, place, counts = np.unique(arrays["rollout"], return_inverse=True, return_counts=True)
    found: Array = arrays["position"] < counts[place] / 2
    return found


def better(arrays: Arrays) -> Array:
    """Return which rollouts are in the better half of their prompt's answers: the likelier one, by the float32
    learner's sum of log-probs, which stands in for a reward."""
    rollouts, first, place = np.unique(arrays["rollout"], return_index=True, return_inverse=True)
    sums, prompts = np.bincount(place, arrays["logprob_float32"]), arrays["prompt"][first]
    found = np.zeros(len(rollouts), dtype=bool)
    for prompt in np.unique(prompts):
        group = np.flatnonzero(prompts == prompt)
        found[group[np.argsort(-sums[group])[: len(group) // 2]]] = True
    return found


def limits_for(engine_class: str, learner: str) -> ErrorLimits:
    found = measured_classes().get(engine_class, ANY)
    return found if learner == "float32" else found.widened(HALF)


def findings(arrays: Arrays, learner: str) -> list[Finding]:
    starts = np.flatnonzero(np.diff(arrays["rollout"], prepend=-1))
    errors, margins = (np.split(arrays[f"{name}_{learner}"], starts[1:]) for name in ("error", "margin"))
    sides = np.where(better(arrays), 1, -1)
    return [Finding(errors=e, margins=m, side=int(s)) for e, m, s in zip(errors, margins, sides, strict=True)]


def largest_sum(arrays: Arrays, learner: str) -> float:
    """The largest evidence that comes up against this honest engine, as a share of what convicts."""
    limits = limits_for(str(arrays["engine_class"]), learner)
    auditor, largest = Auditor({}, secret=b"", share=1.0), 0.0
    for finding in findings(arrays, learner):
        auditor.add(SAMPLER, limits, finding)
        largest = max(largest, *(one.score for one in auditor._known[SAMPLER].sums.values()))
    return largest / limits.sum


def caught(arrays: Arrays, learner: str) -> dict[str, dict[str, list[int] | None]]:
    """Return audited tokens until a lie is caught: the median and the most of RUNS; None if not all of them did."""
    limits, found = limits_for(str(arrays["engine_class"]), learner), findings(arrays, learner)
    nll = np.split(-arrays[f"logprob_{learner}"], np.cumsum([len(one.errors) for one in found])[:-1])
    return {
        "tokens_until_shift": {f"{shift:g}": until_caught(found, nll, limits, shift=shift) for shift in SHIFTS},
        "tokens_until_replaced": {f"{one:g}": until_caught(found, nll, limits, replaced=one) for one in REPLACED},
    }


def until_caught(
    found: Sequence[Finding], nll: Sequence[Any], limits: ErrorLimits, *, shift: float = 0.0, replaced: float = 0.0
) -> list[int] | None:
    taken = []
    for seed in range(RUNS):
        draw, auditor, tokens = np.random.default_rng(seed), Auditor({}, secret=b"", share=1.0), 0
        for at in draw.permutation(len(found)):
            finding = found[at]
            tokens += len(finding.errors)
            margins = np.where(draw.random(len(nll[at])) < replaced, other_margins(nll[at], draw), finding.margins)
            lie = dataclasses.replace(finding, errors=finding.errors + np.float32(shift), margins=margins)
            if auditor.add(SAMPLER, limits, lie) is not None:
                taken.append(tokens)
                break
    return [int(np.median(taken)), max(taken)] if len(taken) == RUNS else None


def other_margins(nll: Any, draw: np.random.Generator) -> Any:
    """Margins of tokens as likely as these that were drawn with other noise: the Gumbel noise of the best other token
    against theirs is logistic around the log-odds against them."""
    odds = np.log(np.maximum(np.expm1(nll), 1e-9))
    return np.maximum(0.0, draw.logistic(odds, 1.0)).astype(np.float32)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--engines", nargs="+", default=["transformers/float32", "transformers/bfloat16"])
    parser.add_argument("--device", default="cpu", help="of transformers, and of the learner: cpu or cuda")
    parser.add_argument("--model", help="directory of a model with a chat template")
    parser.add_argument("--out", type=Path, help="directory for the figures, a file per engine")
    parser.add_argument("--summary", type=Path, help="only print what is in this directory")
    parser.add_argument("--prompts", type=int, choices=(40, 20, 10, 5), default=PROMPTS, help="of either kind")
    given = parser.parse_args()
    if given.summary is None:
        if given.out is None:
            parser.error("--out DIR says where the figures go")
        from examples.smollm2 import make_model

        torch.set_num_threads(THREADS)
        measure(given.engines, given.model or str(make_model()), given.device, given.prompts, given.out)
    for row in summary(given.summary or given.out):
        said(row)


if __name__ == "__main__":
    main()
