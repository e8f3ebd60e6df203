"""What the endpoint costs that agents ask, beside its engine alone, and whether an agent learns through it.

bin/python -m benchmarks.agents --json

The engine (transformers, on the CPU) holds the model of examples/smollm2.py, and draws 64 answers of 64 tokens to
prompts of 256, each prompt of its own: first alone, in one batch from this process, then as 64 calls at once of the
official client in a process of its own, over HTTP. A pair is repeated, and pairs change their order. A call's own cost
is measured where nothing is drawn: the same endpoint with answers that are there at once, and one call after another.
Both learning runs are `lead` with one sampler and the agent of examples/agents/copy_twice.py on the tiny model, the
second with a random reward. Figures:
throughput_ratio  tokens/s of the calls over the engine's alone: median, and range of the pairs
call_ms           one call with nothing to draw, client and all, median; and with 64 at once, wall time over calls
learned           held-out accuracy after the last step, and before the first; control_learned with a random reward
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

from benchmarks import parser_of, said
from swarm.inference.server import Endpoint, serving
from swarm.lead.frozen import Drawing, drawing, lay_out
from swarm.learner.messages import SMALL_FILES
from swarm.run.prompts import open_tokenizer
from swarm.sampler.engine import EngineOptions, Job
from swarm.settings import LeadConfig
from swarm.tasks.turns import TurnText
from swarm.types import GroupId, Rollout, SamplingRules

CALLS, PROMPT_TOKENS, NEW_TOKENS = 64, 256, 64
EMPTY_CALLS = 512
AGENT = Path(__file__).parents[1] / "examples" / "agents" / "copy_twice.py"

CLIENT = """
import asyncio, json, sys, time
from openai import AsyncOpenAI

async def main():
    client = AsyncOpenAI(base_url=sys.argv[1], api_key=sys.argv[2], timeout=3600)
    prompts, most, rounds, limit = json.loads(sys.stdin.read())
    places, took = asyncio.Semaphore(limit), []

    async def call(prompt):
        async with places:
            began = time.perf_counter()
            done = await client.completions.create(model="policy", prompt=prompt, max_tokens=most)
            took.append(time.perf_counter() - began)
            return done.usage.completion_tokens

    await call(prompts[0][:8])  # Connects
    for _ in range(rounds):
        took.clear()
        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*map(call, prompts)))
        wall = time.perf_counter() - began
        print(json.dumps({"tokens": tokens, "wall_s": wall, "median_s": sorted(took)[len(took) // 2]}), flush=True)

asyncio.run(main())
"""


async def called(
    url: str, token: str, prompts: list[str], *, most: int, limit: int, rounds: int = 1
) -> dict[str, float]:
    """Return what the last round of calls took, by the official client in another process."""
    command = (sys.executable, "-c", CLIENT, f"{url}/v1", token)
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate(json.dumps((prompts, most, rounds, limit)).encode())
    assert child.returncode == 0
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    return found


async def throughput(options: argparse.Namespace) -> dict[str, Any]:
    from examples.smollm2 import make_model

    config = LeadConfig(model=str(options.model or make_model()), task="copy")
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        frozen = await lay_out(config, directory)
        tokenizer = open_tokenizer(config.model, directory / SMALL_FILES)
        rules = SamplingRules(1.0, NEW_TOKENS, stop_token_ids=())  # None stops: every answer has the same length
        texts = [f"{number} birds sit on a wall and look at the sea. " * 40 for number in range(100, 100 + CALLS)]
        prompts = [str(tokenizer.decode(tokenizer.encode(text).ids[:PROMPT_TOKENS])) for text in texts]
        engine_options = EngineOptions(device="cpu")
        async with drawing(frozen, directory, "transformers", engine_options, 0, lambda line: None) as engine:
            endpoint = Endpoint(engine.ask, TurnText(tokenizer, None, ()), rules, context=frozen.context_tokens)
            async with serving(endpoint, directory) as place:
                ids = [tuple(tokenizer.encode(prompt).ids) for prompt in prompts]
                await alone(engine, ids[:4], rules)  # Warms up
                pairs = []
                for number in range(options.pairs):
                    rates = {}
                    for kind in ("called", "alone") if number % 2 else ("alone", "called"):
                        if kind == "alone":
                            rates[kind] = await alone(engine, ids, rules)
                        else:
                            done = await called(place.url, endpoint.token, prompts, most=NEW_TOKENS, limit=CALLS)
                            rates[kind] = done["tokens"] / done["wall_s"]
                    pairs.append(rates)
    ratios = [one["called"] / one["alone"] for one in pairs]
    return {
        "throughput_ratio": round(statistics.median(ratios), 3),
        "throughput_ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "alone_tokens_per_s": [round(one["alone"], 1) for one in pairs],
        "called_tokens_per_s": [round(one["called"], 1) for one in pairs],
    }


async def alone(engine: Drawing, prompts: list[tuple[int, ...]], rules: SamplingRules) -> float:
    began = time.perf_counter()
    drawn = await asyncio.gather(*(engine.draw(Job(ids, seed, rules, 1e6)) for seed, ids in enumerate(prompts)))
    return sum(len(array("i", one.token_ids)) for one in drawn) / (time.perf_counter() - began)


async def empty_calls() -> dict[str, float]:
    """Return the cost of calls that draw nothing."""
    from tests.chats import tokenizer_of

    tokenizer = tokenizer_of(())
    tokens = array("i", tokenizer.encode("a" * NEW_TOKENS).ids).tobytes()

    async def ask(token_ids: Any, rules: Any) -> Rollout:
        return Rollout(GroupId("g"), 0, tokens, bytes(len(tokens)), (), "stop")

    rules = SamplingRules(temperature=1.0, max_new_tokens=NEW_TOKENS, stop_token_ids=())
    endpoint = Endpoint(ask, TurnText(tokenizer, None, ()), rules, context=4096)
    with tempfile.TemporaryDirectory() as made:
        async with serving(endpoint, Path(made)) as place:
            prompts = ["b" * PROMPT_TOKENS] * EMPTY_CALLS
            one = await called(place.url, endpoint.token, prompts, most=NEW_TOKENS, limit=1, rounds=2)
            many = await called(place.url, endpoint.token, prompts, most=NEW_TOKENS, limit=CALLS, rounds=2)
    return {
        "call_ms": round(1e3 * one["median_s"], 2),
        "call_ms_side_by_side": round(1e3 * many["wall_s"] / EMPTY_CALLS, 2),
    }


async def learning(steps: int, *flags: str) -> tuple[float, float]:
    """Return the held-out reward at the beginning and at the end of a run."""
    with tempfile.TemporaryDirectory() as made:
        run_dir = Path(made, "run")
        command = ("lead", "--model", "tiny", "--task", f"agent:{AGENT}:play", "--steps", str(steps), "--samplers", "1")
        place = ("--host", "127.0.0.1", "--port", "0", "--run-dir", str(run_dir))
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "swarm", *command, *place, *flags),
            stdout=sys.stderr,
            stdin=asyncio.subprocess.DEVNULL,
        )
        assert await child.wait() in (0, 1)
        held_out = json.loads((run_dir / "summary.json").read_text())["held_out"]
    return held_out[0]["exact_match"], held_out[-1]["exact_match"]


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = await empty_calls()
    found |= await throughput(options)
    if options.steps:
        before, after = await learning(options.steps)
        _, control = await learning(options.steps, "--reward", "random")
        found |= {"before": before, "learned": after, "control_learned": control, "steps": options.steps}
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150, help="of each learning run; 0 leaves them out")
    parser.add_argument("--model", type=Path, help="default: what examples/smollm2.py makes")
    options = parser.parse_args()
    said(asyncio.run(measure(options)))


if __name__ == "__main__":
    main()
