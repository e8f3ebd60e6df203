"""How closely a running node keeps to caps that its owner changes, counted on its network interface. Root only.

bin/python -m benchmarks.caps --json
bin/python -m benchmarks.caps upload

A learner and three relays, each in a network namespace of its own. The version is of random bytes, which no codec makes
smaller. The first relay's owner changes its cap with `echo-node limits` while weights flow. Counted are bytes at its
interface without Ethernet's headers, as the cap means them, in a window that begins SETTLE_S after the change.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from tests.integration.processes import Publisher, command, eventually, fetch_status, swarm_in
from tests.netns.hosts import Host, hosts

CAPS_MBIT = (24.0, 6.0, 40.0)
SETTLE_S = 3.0  # A second until the node looks, and what is on its way
WINDOW_S = 8.0
SIZE_BYTES = {"download": 160_000_000, "upload": 400_000_000}
LEARNER_MBIT = 90.0  # Its uplink while an upload is measured: more than relays pass on under any cap, and not at once
ETHERNET_BYTES = 14
WAYS = {"download": "rx", "upload": "tx"}  # And what the kernel calls them


def counted(host: Host, way: str) -> int:
    """Bytes of IP packets that have passed a host's interface."""
    names = (f"/sys/class/net/eth0/statistics/{way}_{what}" for what in ("bytes", "packets"))
    nbytes, packets = (int(host.run(["cat", name]).stdout) for name in names)
    return nbytes - ETHERNET_BYTES * packets


def measure(host: Host, state: Path, way: str) -> list[tuple[float, float]]:
    """Caps, and the rates that were seen under them, in Mbit/s."""
    seen = []
    for cap in CAPS_MBIT:
        changed = command("limits", "--state-dir", str(state), f"max-{way}={cap:g}")
        assert changed.returncode == 0, changed.stderr
        time.sleep(SETTLE_S)
        before, began = counted(host, WAYS[way]), time.monotonic()
        time.sleep(WINDOW_S)
        after, ended = counted(host, WAYS[way]), time.monotonic()
        seen.append((cap, (after - before) * 8e-6 / (ended - began)))
    return seen


def run(way: str, directory: Path) -> list[tuple[float, float]]:
    with hosts(4) as network, swarm_in(directory) as swarm:
        learner, *others = network
        if way == "upload":
            network.shape(learner, up_mbit=LEARNER_MBIT)
        publisher = Publisher(
            *(directory, "publisher", 7700), size=SIZE_BYTES[way], host=learner.address, place=learner.command([])
        )
        swarm.nodes.append(publisher)
        line = str(publisher.event("listening")["join"])
        relays = [
            swarm.relay(line, "--lan", "--weights", "disk", "--port", "7701", name=f"relay-{n}", place=host.command([]))
            for n, host in enumerate(others)
        ]

        def linked() -> bool:
            with others[0].inside():
                return bool(fetch_status(relays[0].url())["streams"] >= len(relays))

        eventually(linked, relays[0], "everybody is linked")
        publisher.publish()
        return measure(others[0], directory / "state-relay-0", way)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", default=list(WAYS), help=" or ".join(WAYS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {}
    for name in options.ways:
        with tempfile.TemporaryDirectory() as directory:
            found[name] = run(name, Path(directory))
        for cap, rate in found[name]:
            print(f"{name} capped at {cap:g} Mbit/s: {rate:.2f} Mbit/s, {rate / cap - 1:+.1%}", flush=True)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
