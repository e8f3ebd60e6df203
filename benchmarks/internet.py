"""A real model learns sums as over the internet: a learner, and two samplers at home, of which one dies half-way.

    sudo bin/python -m benchmarks.internet --model DIR --to FILE.jsonl [--local]

Each node is a Linux network namespace of its own, whose line is a token bucket of UP_MBIT and DOWN_MBIT. Nobody can
open a connection to a sampler. What a sampler opens to the learner goes through a proxy in its own namespace that adds
a round trip of ROUND_TRIP_MS and loses LOSS of the packets (`python -m benchmarks.links`). The learner is known by that
proxy's address alone, so there is no other way. The settings are those of examples/smollm2.toml; at half of --steps one
sampler is killed. With --local there are neither lines nor proxies nor shields, and all else is the same.

All nodes share this machine's cores. Each run is a line of --to: held-out accuracy by version, shares and means of the
steps after the first ten, the bytes of a version and the seconds until every sampler had it, and what the learner's
line carried.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks import Figures
from benchmarks.learning_swarm import POLL_S, Nodes, RunFailed, lines_of, nodes_in
from swarm.settings import LeadConfig
from swarm.settings_file import as_toml, read_settings
from tests.integration.processes import Node
from tests.netns.hosts import Host, Hosts, hosts

UP_MBIT, DOWN_MBIT = 20.0, 100.0
ROUND_TRIP_MS, LOSS = 80.0, 0.005
PORT = 7700
WARM_UP_STEPS = 10
EXAMPLE = Path(__file__).parents[1] / "examples" / "smollm2.toml"
START_S, STEP_LIMIT_S = 1200.0, 120.0  # A run that takes longer has hung
NOT_ENOUGH = ("learner", 1)  # How it ends if it did not learn enough


def make_lines(network: Hosts, nodes: Nodes) -> None:
    """Lines as at home, and before each sampler the proxy that stands for the way to the learner."""
    learner, *samplers = network
    for host in network:
        network.shape(host, up_mbit=UP_MBIT, down_mbit=DOWN_MBIT)
    for host in samplers:
        network.shield(host)
        ends = ("--listen", f"127.0.0.1:{PORT}", "--to", f"{learner.address}:{PORT}")
        way = ("--delay-ms", str(ROUND_TRIP_MS / 2), "--loss", str(LOSS))
        nodes.start(f"proxy-{host.number}", *ends, *way, module="benchmarks.links", host=host, is_node=False)


def lead(nodes: Nodes, host: Host, directory: Path, advertised: str, **own: object) -> Node:
    settings = read_settings(LeadConfig, EXAMPLE) | own
    settings |= {"dashboard": "off", "task": f"jsonl:{EXAMPLE.parent / 'sums.jsonl'}"}
    del settings["target"]
    (directory / "lead.toml").write_text(as_toml(LeadConfig, settings))
    listen = ("--host", host.address, "--port", str(PORT), "--advertise", f"{advertised}:{PORT}", "--lan", "--tls")
    files = ("--config", str(directory / "lead.toml"), "--run-dir", str(directory / "run"))
    return nodes.start("learner", "lead", *listen, *files, host=host)


def carried_bytes(host: Host) -> dict[str, int]:
    """What the host's line has sent and received."""
    found = host.run(["ip", "-s", "-j", "link", "show", "dev", "eth0"])
    stats = json.loads(found.stdout)[0]["stats64"]
    return {"sent": stats["tx"]["bytes"], "received": stats["rx"]["bytes"]}


def run(model: Path, *, steps: int, seed: int, local: bool) -> Figures:
    """The figures of a run. RunFailed if a process does."""
    with tempfile.TemporaryDirectory(prefix="internet-") as path, hosts(3) as network, nodes_in(Path(path)) as nodes:
        run_dir, learner_host, began = Path(path, "run"), network.host(1), time.monotonic()
        if not local:
            make_lines(network, nodes)
        advertised = learner_host.address if local else "127.0.0.1"
        own = {"model": str(model.resolve()), "steps": steps, "seed": seed}
        learner, node = lead(nodes, learner_host, Path(path), advertised, **own), run_dir / "node.json"
        has_samplers, killed_at = False, 0
        while learner.process.poll() is None:
            done = len(lines_of(run_dir / "metrics.jsonl"))
            if not has_samplers and node.exists() and node.read_text().endswith("\n"):
                for number in (2, 3):
                    told = ("--lan", "--bootstrap", json.loads(node.read_text())["join"])
                    state, host = ("--state-dir", str(Path(path, f"sampler-{number}"))), network.host(number)
                    nodes.start(f"sampler-{number}", "join", *told, *state, host=host)
                has_samplers = True
            if not killed_at and done >= steps // 2:
                nodes.kill("sampler-2")
                killed_at = done
            nodes.check(NOT_ENOUGH)
            if time.monotonic() - began > START_S + STEP_LIMIT_S * steps:
                raise RunFailed("the run did not end in time")
            time.sleep(POLL_S)
        nodes.check(NOT_ENOUGH)
        wall_s = round(time.monotonic() - began, 1)
        return figures(run_dir, killed_at) | {"learner_line_bytes": carried_bytes(learner_host), "wall_s": wall_s}


def figures(run_dir: Path, killed_at: int) -> Figures:
    steps = lines_of(run_dir / "metrics.jsonl")
    events = lines_of(run_dir / "events.jsonl")
    prepared = next(event["time"] for event in events if event["kind"] == "prepared")
    late = steps[WARM_UP_STEPS:] or steps
    sizes = [file.stat().st_size for file in (run_dir / "versions").glob("*.chunks")]
    spread_s = [step["broadcast_s"] for step in late if step["broadcast_s"] is not None]
    return {
        "held_out": {event["version"]: event["exact_match"] for event in events if event["kind"] == "evaluated"},
        "steps": len(steps),
        "killed_at": killed_at,
        "first_step_after_s": round(steps[0]["time"] - prepared, 1),
        "step_s": round((steps[-1]["time"] - late[0]["time"]) / max(1, len(late) - 1), 2),
        "idle_share": round(statistics.fmean(step["idle_share"] or 0.0 for step in late), 3),
        "staleness": round(statistics.fmean(step["staleness/mean"] for step in late), 2),
        "version_bytes": round(statistics.fmean(sizes)),
        "version_s": [round(value, 2) for value in (statistics.median(spread_s), max(spread_s))] if spread_s else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local", action="store_true", help="the same without lines, proxies and shields")
    options = parser.parse_args()
    found = run(options.model, steps=options.steps, seed=options.seed, local=options.local)
    line = json.dumps({"local": options.local, "seed": options.seed, "load": os.getloadavg()[0], **found})
    with options.to.open("a") as file:
        file.write(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
