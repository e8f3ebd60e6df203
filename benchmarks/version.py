"""A version's whole way, from the end of the optimiser's step to the first token that is drawn with it. Root.

bin/python -m benchmarks.version --size-mib 1024 --receivers 4 --json

A learner and receivers as real processes (version_nodes.py), each in a network namespace with shaped links: masters of
normal weights moved by a real AdamW step (gradients of noise), the broadcast as shipped, with TLS, and an engine
(transformers, bf16, on the CPU) that installs each version and draws a token. The first version only loads the engines.
Then come one full version and --deltas deltas, each after the one before is installed everywhere; each gives a line of
JSON. Figures, for `delta` (medians, and each run) and `full` (one run):
installed_over_wire  from the step's end to the last install, over the wire's own bound for the bytes that were sent
trainer_held_s       for how long the trainer could not go on (cast and copy)
encode_s             staged until signed: compare, encode, digests, sums
stages               seconds from the step's end until each stage was reached, at the median and the last receiver
disk_bytes_per_received_byte  what all receivers wrote to their disks, over the encoded bytes that they received
cpu_s_per_gb         CPU of learner (trainer left out) and receivers, over raw gigabytes of the model times receivers
pss_over_weights     memory of a receiver's node, without its engine's, over the weights; shared pages count once
memcpy_s             one copy of the model in memory, for comparison
All processes share the cores of this machine; `receivers` 1 is nearest to receivers with machines of their own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks import ended, links, parser_of, said
from benchmarks.links import LEARNER, Profile, Speaker, TransferFailed, poll, shaped
from tests.integration.processes import fetch_status
from tests.netns.hosts import Host, Hosts

MIB = 1 << 20
UP_MBIT, DOWN_MBIT = 50.0, 100.0
MAKE_S = 1200.0  # Making the masters, loading the engines, or installing a version: more than any of them takes
READY_S = 180.0
STAGES = ("announced_s", "first_chunk_s", "complete_s", "applied_s", "installed_s", "drawn_s")

Event = dict[str, Any]


class Swarm:
    def __init__(self, network: Hosts, profile: Profile, options: argparse.Namespace, directory: Path) -> None:
        self._host: Host = network.host(LEARNER)
        arguments = ["--directory", str(directory / "learner"), "--host", self._host.address]
        arguments += ["--size-bytes", str(options.size_mib * MIB)]
        learner_log = directory / "learner.log"
        self.learner = Speaker(self._host, "benchmarks.version_nodes", "lead", *arguments, log=learner_log)
        listening = self.learner.expect("listening", timeout_s=MAKE_S)
        self.memcpy_s = float(listening["memcpy_s"])
        self._url = listening["url"]
        self.receivers = {
            number: Speaker(
                network.host(number),
                "benchmarks.version_nodes",
                *("receive", "--join", listening["join"], "--directory", str(directory / f"receiver-{number}")),
                log=directory / f"receiver-{number}.log",
            )
            for number in profile.peers
        }
        for receiver in self.receivers.values():
            receiver.expect("ready", timeout_s=MAKE_S)
        poll(self._linked, every_s=1.0, limit_s=READY_S, what="all receivers are linked with the learner")

    def _linked(self) -> bool:
        with self._host.inside():
            return int(fetch_status(self._url)["streams"]) == len(self.receivers)

    def publish(self, *, full: bool = False) -> tuple[Event, dict[int, Event]]:
        self.learner.tell("publish full" if full else "publish")
        published = self.learner.expect("published", timeout_s=MAKE_S)
        installed = {}
        for number, receiver in self.receivers.items():
            while True:
                event = receiver.expect("installed", timeout_s=MAKE_S)
                if event["version"] == published["version"]:
                    break
            installed[number] = event
        # Versions of a run are minutes apart: by the next one the system has written what is dirty now. Pages that are
        # still dirty would not be counted again.
        os.sync()
        return published, installed

    def cpu_s(self) -> float:
        """CPU of the learner's node, without its trainer."""
        times = psutil.Process(self.learner.process.pid).cpu_times()
        return float(times.user + times.system)


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    profile = links.equal_profile(options.receivers, UP_MBIT, DOWN_MBIT)
    runs: list[dict[str, Any]] = []
    with shaped(profile) as network:
        swarm = Swarm(network, profile, options, directory)
        raw_bytes = options.size_mib * MIB
        _, before = swarm.publish()
        cpu_s = swarm.cpu_s()
        for kind in ["full", *["delta"] * options.deltas]:
            published, installed = swarm.publish(full=kind == "full")
            run = figures(published, installed, before, links.bound_s(published["encoded_bytes"], profile))
            run["cpu_s_per_gb"] += (swarm.cpu_s() - cpu_s) / len(installed)
            run["cpu_s_per_gb"] = round(run["cpu_s_per_gb"] / (raw_bytes / 1e9), 2)
            run["kind"], run["pss_over_weights"] = kind, round(run["pss_bytes"] / raw_bytes, 2)
            runs.append(said(run))
            before, cpu_s = installed, swarm.cpu_s()
    deltas = [run for run in runs if run["kind"] == "delta"]
    return {
        "size_mib": options.size_mib,
        "receivers": options.receivers,
        "cores": os.cpu_count(),
        "links": f"{UP_MBIT:g}/{DOWN_MBIT:g} Mbit/s",
        "memcpy_s": round(swarm.memcpy_s, 3),
        "full": runs[0],
        **({"delta": summary(deltas), "deltas": deltas} if deltas else {}),
    }


def figures(published: Event, installed: dict[int, Event], before: dict[int, Event], min_s: float) -> dict[str, Any]:
    ended_s = published["ended_s"]
    by_stage = {stage: [event[stage] - ended_s for event in installed.values() if event[stage]] for stage in STAGES}
    spent = {name: sum(e[name] - before[n][name] for n, e in installed.items()) for name in ("disk_bytes", "cpu_s")}
    last_s = max(by_stage["installed_s"])
    received = published["encoded_bytes"] * len(installed)
    return {
        "encoded_bytes": published["encoded_bytes"],
        "bound_s": round(min_s, 3),
        "installed_s": round(last_s, 3),
        "installed_over_wire": round(last_s / min_s, 3),
        "trainer_held_s": round(published["held_s"], 3),
        "encode_s": round(published["encoded_s"] - published["staged_s"], 3),
        "stages": {
            "staged_s": round(published["staged_s"] - ended_s, 3),
            "encoded_s": round(published["encoded_s"] - ended_s, 3),
            **{s: {"median": round(statistics.median(t), 3), "last": round(max(t), 3)} for s, t in by_stage.items()},
        },
        "disk_bytes_per_received_byte": round(spent["disk_bytes"] / received, 3),
        "cpu_s_per_gb": spent["cpu_s"] / len(installed),
        "pss_bytes": max(e["pss_bytes"] for e in installed.values()),
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    numbers = {name for name, value in runs[0].items() if isinstance(value, int | float)}
    found: dict[str, Any] = {name: round(statistics.median(run[name] for run in runs), 3) for name in sorted(numbers)}
    ratios = [run["installed_over_wire"] for run in runs]
    found["installed_over_wire_range"] = [min(ratios), max(ratios)]
    # Bytes are averaged, not their median taken: a copy now and then must not be hidden.
    found["disk_bytes_per_received_byte"] = round(
        statistics.fmean(run["disk_bytes_per_received_byte"] for run in runs), 3
    )
    found["stages"] = runs[len(runs) // 2]["stages"]
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--size-mib", type=int, default=256, help="of the weights in bf16, about")
    parser.add_argument("--receivers", type=int, default=4)
    parser.add_argument("--deltas", type=int, default=3)
    parser.add_argument("--work-dir", type=Path, help="keep logs and states here")
    options = parser.parse_args()
    links.check_namespaces("version")
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.work_dir or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            found = measure(options, directory)
        except TransferFailed as error:
            sys.exit(f"benchmarks.version: {error}")
    ended(options, found)


if __name__ == "__main__":
    main()
