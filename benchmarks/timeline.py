"""What the timeline takes of the learner's event loop, in CPU time: beats, the file, a page's question.

bin/python -m benchmarks.timeline --samplers 1000 --json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import msgspec

from swarm.rollout.messages import MAX_DID, Beat, Did
from swarm.run.timeline import MAX_ASKED, RECENT_S, Timeline
from swarm.types import NodeId, VersionId
from swarm.wire import CONTROL_BODY_BYTES, decode, encode

BEAT_S = 2.0
BEGAN = 1_750_000_000.0
FILLED_S = 900.0  # More than spans are kept, so that old ones go as new ones come
MEASURED_S = 60.0
ORDINARY: tuple[Did, ...] = (("draw", 2.0, 1.2), ("wait", 0.8, 0.1), ("install", 0.7, 0.1), ("draw", 0.6, 0.6))
WORST: tuple[Did, ...] = tuple(
    ("wait" if i % 2 else "draw", BEAT_S * (1 - i / MAX_DID), BEAT_S / MAX_DID) for i in range(MAX_DID)
)


def cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def decode_s(did: tuple[Did, ...]) -> float:
    """CPU seconds to read one beat that tells `did`."""
    version = VersionId(incarnation=0, version=1)
    beat = encode(Beat(node=NodeId("0" * 32), installed=version, samples=8, rollouts_per_s=1.0, did=did))
    return (
        median(cpu_s(lambda: [decode(beat, Beat, cap_bytes=CONTROL_BODY_BYTES) for _ in range(1000)]) for _ in "12345")
        / 1000
    )


def measure(samplers: int, did: tuple[Did, ...]) -> dict[str, float]:
    timeline, now = Timeline(BEGAN), BEGAN
    nodes = [f"{number:032x}" for number in range(samplers)]
    rounds = []
    while now < BEGAN + FILLED_S + MEASURED_S:
        now += BEAT_S
        began = time.process_time()
        for node in nodes:
            timeline.heard(node, did, state="wait", now=now)
        if now > BEGAN + FILLED_S:
            rounds.append(time.process_time() - began)
    beat_s = median(rounds) / samplers + decode_s(did) - decode_s(())
    kept = timeline.kept(now=now)
    recent, whole = now - RECENT_S, BEGAN
    return {
        "beat_us": beat_s * 1e6,
        "share_of_a_core": beat_s * samplers / BEAT_S,
        "kept_ms": 1e3 * cpu_s(lambda: timeline.kept(now=now)),
        "encoded_ms": 1e3 * cpu_s(lambda: msgspec.json.encode(kept)),
        "kept_mb": len(msgspec.json.encode(kept)) / 1e6,
        "spans_ms": 1e3 * cpu_s(lambda: timeline.answer(nodes[:MAX_ASKED], recent, now, now=now)),
        "buckets_ms": 1e3 * cpu_s(lambda: timeline.answer(nodes[:MAX_ASKED], whole, now, now=now)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samplers", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {name: measure(options.samplers, did) for name, did in (("ordinary", ORDINARY), ("worst", WORST))}
    for name, figures in found.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in figures.items()), flush=True)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
