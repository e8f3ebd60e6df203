"""A node where /dev/shm is small, as in a container: its map lies on the disk, and survives a SIGKILL there."""

from __future__ import annotations

from pathlib import Path

from tests.integration.processes import Node, Publisher, eventually, free_port, swarm_in

SIZE = 48 << 20
IN_A_CONTAINER = (
    *("unshare", "--mount", "--propagation", "private", "sh", "-c"),
    *('mount -t tmpfs -o size=64m none /dev/shm && exec "$@"', "sh"),
)
"""Docker's own size. The mount ends with the process."""


def has_chunks(node: Node, version: str) -> bool:
    return bool(node.status()["versions"].get(version, {}).get("complete_s"))


def test_with_64_mb_of_shared_memory_a_relay_keeps_its_map_on_the_disk(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        publisher = Publisher(tmp_path, "publisher-0", free_port(), size=SIZE)
        swarm.nodes.append(publisher)
        relay = swarm.relay(publisher.url(), "--lan", name="relay", place=IN_A_CONTAINER)
        eventually(lambda: relay.status().get("streams") == 1, relay, "it is linked")
        publisher.publish()
        eventually(lambda: relay.status().get("map") == "0.0", relay, "it holds the version")
        assert relay.says("the weights are kept on the disk, since 0.1 GB of memory are free")
        assert swarm.weights("relay") == swarm.published()
        publisher.publish()
        eventually(lambda: has_chunks(relay, "0.1"), relay, "it has the chunks of another")
        relay.kill()
        again = swarm.relay(publisher.url(), "--lan", name="relay", place=IN_A_CONTAINER)
        eventually(lambda: again.status().get("map") == "0.1", again, "what was cut off is finished")
        assert swarm.weights("relay") == swarm.published()
