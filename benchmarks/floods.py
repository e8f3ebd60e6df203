"""What a stranger's floods do to a swarm that learns: a learner and two samplers in namespaces, one attacker. Root.

    sudo bin/python -m benchmarks.floods [--only NAME,NAME] [--seconds 20] [--to FILE.jsonl] [--json]

Learner, samplers, attacker and an honest prober are Linux network namespaces with an address each; all calls go over
TLS. The swarm learns the copy task with a tiny model. The attacker floods for --seconds, rests for as long, and goes on
with the next flood. Meanwhile the prober, a node that shares its address with a sampler, sends a signed beat every
BEAT_S. Each flood gives a line: beats and steps in its window next to those of the two quiet windows around it, as
medians and 95th percentiles in seconds, and `beats`, `steps` as ratios of the medians. `lost` are beats that failed,
`did` is what the attacker got through with, as it counts itself. The last line says whether all floods meet the target,
a median of MAX_RATIO times the quiet one at most; exit status 1 if not.

All of them share this machine's cores. The attacker is niced, or it would measure what its own CPU costs the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.learning_swarm import POLL_S, RunFailed
from swarm.errors import EchoError
from swarm.gossip.records import GOSSIP_BODY_BYTES, Exchange, Profile, Record, pack_digest, prefix_of, sign_record
from swarm.net.client import PeerClient
from swarm.net.signing import Sealed, SigningKey, node_id_of
from swarm.node.bootstrap import read_join_line
from swarm.sampler.client import RolloutClient
from swarm.types import Address, VersionId
from swarm.wire import PROTOCOL, PROTOCOL_HEADER, encode
from tests.netns.hosts import Host, hosts

PORT, PAGE_PORT = 7700, 7701
BEAT_S = 0.1
MAX_RATIO = 2.0
WARM_STEPS = 20  # The first steps wait for engines to start
START_S = 180.0
CONNECTIONS, CROWD = 8, 48
RECORDS = 299  # As many as fit one body with their ages
NICE = 10
SETTINGS = """\
[learn]
steps = 100000
seed = 0
[eval]
eval_every_steps = 100000
[swarm]
dashboard = 'off'
audit_share = 0.0
"""


class Target:
    """The learner as an attacker sees it: its address and key, from the join line."""

    def __init__(self, line: str) -> None:
        found = read_join_line(line)
        self.address: Address = found.addresses[0]
        self.swarm, self.key = found.swarm, found.learner_key
        self.did: Counter[str] = Counter()

    def peer(self, key: SigningKey | None = None) -> PeerClient:
        return PeerClient(self.address, key=key, server=node_id_of(self.key))

    async def newest(self) -> VersionId:
        key = SigningKey.generate()
        async with self.peer(key) as peer:
            reply = await RolloutClient(peer, key.node_id, engine_class="").beat(None, 0, 0.0)
        assert reply.newest is not None
        return reply.newest

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return await asyncio.open_connection(self.address.host, self.address.port, ssl=context)

    async def again(self, work: Callable[[], Awaitable[str]]) -> None:
        """Do it for ever. What was refused or cut counts as such; without a pause for a refusal it would only spin."""
        while True:
            try:
                self.did[await work()] += 1
            except (EchoError, OSError, aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError) as error:
                self.did[type(error).__name__] += 1
                await asyncio.sleep(0.01)


async def many(target: Target, times: int, work: Callable[[], Awaitable[str]]) -> None:
    await asyncio.gather(*(target.again(work) for _ in range(times)))


def records(keys: list[SigningKey], swarm: str, sequence: int, *, forged: bool) -> tuple[bytes, tuple[bytes, ...]]:
    """Return a digest and sealed records of invented publics, each in a network of its own, heard just now."""
    publics = [
        Record(
            key=key.public_bytes,
            swarm=swarm,
            generation=1,
            sequence=sequence,
            role="relay",
            reachability="public",
            addresses=(Address(host=f"11.{number // 200}.{number % 200}.9", port=PORT),),
            protocol=PROTOCOL,
            profile=Profile(),
        )
        for number, key in enumerate(keys)
    ]
    digest = pack_digest((prefix_of(node_id_of(one.key)), one.order, 0.0) for one in publics)
    if forged:
        return digest, tuple(encode(Sealed(body=encode(one), signature=os.urandom(64))) for one in publics)
    return digest, tuple(sign_record(one, key).sealed for one, key in zip(publics, keys, strict=True))


async def gossip(target: Target, *, forged: bool) -> None:
    """Tell of the same publics each time, with records newer than any before."""
    keys = [SigningKey.generate() for _ in range(RECORDS)]
    sequences = count()

    async def tell(peer: PeerClient) -> str:
        digest, sealed = records(keys, target.swarm, next(sequences), forged=forged)
        body = encode(Exchange(digest=digest, records=sealed, asks=0))
        await peer.post("/v1/gossip", body, cap_bytes=GOSSIP_BODY_BYTES, timeout_s=10.0)
        return "told"

    async with target.peer(SigningKey.generate()) as one, target.peer(SigningKey.generate()) as other:
        await asyncio.gather(*(target.again(lambda peer=peer: tell(peer)) for peer in (one, other)))  # type: ignore[misc]


async def status(target: Target) -> None:
    async with target.peer() as peer:

        async def ask() -> str:
            await peer.get("/v1/status", cap_bytes=1 << 24, timeout_s=10.0)
            return "answered"

        await many(target, CONNECTIONS, ask)


async def hang_ups(target: Target) -> None:
    version = await target.newest()

    async def hang_up() -> str:
        _, writer = await target.open()
        path = f"/v1/versions/{version}/regions/{random.randrange(4)}"
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n{PROTOCOL_HEADER}: {PROTOCOL}\r\n\r\n".encode())
        await writer.drain()
        writer.transport.abort()
        return "hung up"

    await many(target, CROWD, hang_up)


async def downloads(target: Target) -> None:
    async with target.peer(SigningKey.generate()) as peer:

        async def fetch() -> str:
            version = await target.newest() if random.random() < 0.02 else known
            await peer.get(f"/v1/versions/{version}/regions/0", cap_bytes=1 << 24, timeout_s=10.0)
            return "fetched"

        known = await target.newest()
        await many(target, CONNECTIONS, fetch)


async def malformed(target: Target) -> None:
    async def write() -> str:
        reader, writer = await target.open()
        try:
            writer.write(b"GET \x01 /\0 HTTP/9\r\nContent-Length: -1\r\n\r\n" * 20)
            await writer.drain()
            await reader.read()
        finally:
            writer.transport.abort()
        return "written"

    await many(target, CONNECTIONS, write)


async def handshakes(target: Target) -> None:
    async def begin() -> str:
        _, writer = await asyncio.open_connection(target.address.host, target.address.port)
        writer.write(b"\x16\x03\x01\x02\x00\x01")
        await writer.drain()
        writer.transport.abort()
        return "begun"

    await many(target, CONNECTIONS, begin)


async def polls(target: Target) -> None:
    """Poll with a new key each time, as a leaf that wants a home."""

    async def poll() -> str:
        async with target.peer(SigningKey.generate()) as peer:
            message = Exchange(hold_s=0.01, asks=0)
            await peer.post("/v1/gossip", encode(message), cap_bytes=GOSSIP_BODY_BYTES, timeout_s=10.0)
        return "polled"

    await many(target, CONNECTIONS, poll)


async def page(target: Target) -> None:
    """Ask for the page for volunteers, and for its figures, on connections that stay open."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CROWD)) as session:

        async def ask() -> str:
            path = random.choice(("/", "/public/state.json"))
            async with session.get(f"http://{target.address.host}:{PAGE_PORT}{path}") as answer:
                await answer.read()
                return f"status {answer.status}"

        await many(target, CROWD, ask)


async def bombs(target: Target) -> None:
    """Send what nests, and what promises or brings many small objects, to a route that asks for no session."""
    bodies = [b"\x91" * 1000, b"\xdd" + struct.pack(">I", 2**31), b"\xdc\x03\xe0" + b"\xc0" * 992]
    url, headers = f"{target.address.url}/v1/session", {PROTOCOL_HEADER: str(PROTOCOL)}
    connector = aiohttp.TCPConnector(limit=CONNECTIONS, ssl=aiohttp.Fingerprint(target.address.fingerprint))
    async with aiohttp.ClientSession(connector=connector) as session:

        async def throw() -> str:
            async with session.post(url, data=random.choice(bodies), headers=headers) as answer:
                return f"status {answer.status}"

        await many(target, CONNECTIONS, throw)


FLOODS: dict[str, Callable[[Target], Awaitable[None]]] = {
    "records": lambda target: gossip(target, forged=True),
    "renewals": lambda target: gossip(target, forged=False),
    "status": status,
    "hang-ups": hang_ups,
    "downloads": downloads,
    "malformed": malformed,
    "handshakes": handshakes,
    "polls": polls,
    "bombs": bombs,
    "page": page,
}


async def attack(name: str, line: str, seconds: float) -> None:
    """Flood, and print what came of it."""
    os.nice(NICE)
    target = Target(line)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await FLOODS[name](target)
    print(json.dumps(target.did))


async def probe(line: str) -> None:
    """Send beats until killed, and print when each was sent and how long its answer took (None if it failed)."""
    target, key = Target(line), SigningKey.generate()
    async with target.peer(key) as peer:
        client = RolloutClient(peer, key.node_id, engine_class="")
        while True:
            sent_at, began = time.time(), time.monotonic()
            took_s: float | None = None
            with suppress(EchoError):
                await client.beat(None, 0, 0.0)
                took_s = time.monotonic() - began
            print(json.dumps([sent_at, took_s]), flush=True)
            await asyncio.sleep(BEAT_S)


def shape(values: list[float]) -> dict[str, float | int | None]:
    """Return median, 95th percentile, largest and count. Without values, there is no median."""
    if not values:
        return {"median": None, "p95": None, "largest": None, "count": 0}
    ordered = sorted(values)
    tail = {"p95": ordered[int(0.95 * (len(ordered) - 1))], "largest": ordered[-1]}
    return {"median": statistics.median(ordered), **tail, "count": len(ordered)}


def ratio(flooded: list[float], quiet: list[float]) -> float | None:
    return round(statistics.median(flooded) / statistics.median(quiet), 2) if flooded and quiet else None


class Watched:
    """What the prober and the run directory have written so far, by time."""

    def __init__(self, beats: Path, metrics: Path) -> None:
        self._beats, self._metrics = beats, metrics

    def beats(self, start: float, end: float) -> list[float | None]:
        lines = [json.loads(line) for line in self._beats.read_text().splitlines()[:-1]]
        return [took_s for at, took_s in lines if start <= at < end]

    def steps(self, start: float, end: float) -> list[float]:
        times = [json.loads(line)["time"] for line in self._metrics.read_text().splitlines()[:-1]]
        return [b - a for a, b in pairwise(times) if start <= a and b < end]


def row(name: str, watched: Watched, spans: list[tuple[float, float]], did: Any) -> dict[str, Any]:
    """Return the figures of a flood; `spans` are the quiet window before, its own, and the quiet one after."""
    before, own, after = spans
    beats = [took_s for took_s in watched.beats(*own) if took_s is not None]
    quiet = [took_s for span in (before, after) for took_s in watched.beats(*span) if took_s is not None]
    steps, quiet_steps = watched.steps(*own), watched.steps(*before) + watched.steps(*after)
    return {
        "flood": name,
        "beats": ratio(beats, quiet),
        "steps": ratio(steps, quiet_steps),
        "lost": len(watched.beats(*own)) - len(beats),
        "beat_s": {"flooded": shape(beats), "quiet": shape(quiet)},
        "step_s": {"flooded": shape(steps), "quiet": shape(quiet_steps)},
        "did": did,
    }


class Stage:
    """The processes, with their output under `directory`. All end with `stack`."""

    def __init__(self, network: list[Host], directory: Path, stack: ExitStack) -> None:
        self._network, self._directory, self._stack = network, directory, stack

    def start(self, host: int, name: str, module: str, *arguments: str) -> subprocess.Popen[Any]:
        out = self._stack.enter_context((self._directory / f"{name}.out").open("wb"))
        log = self._stack.enter_context((self._directory / f"{name}.log").open("wb"))
        command, env = [sys.executable, "-m", module, *arguments], {**os.environ, "OMP_NUM_THREADS": "1"}
        return self._network[host].popen(command, stdout=out, stderr=log, env=env)

    def until(self, what: str, condition: Callable[[], Any]) -> None:
        until = time.monotonic() + START_S
        while not condition():
            if time.monotonic() > until:
                raise RunFailed(f"never: {what}")
            time.sleep(POLL_S)

    def learning(self) -> str:
        """Start the swarm, wait until it takes steps, start the prober, and return the join line."""
        settings, run_dir, address = self._directory / "lead.toml", self._directory / "run", self._network[0].address
        settings.write_text(SETTINGS)
        where = ("--host", address, "--port", str(PORT), "--advertise", f"{address}:{PORT}", "--lan", "--tls")
        what = ("--config", str(settings), "--run-dir", str(run_dir), "--public-page", f"{address}:{PAGE_PORT}")
        self.start(0, "learner", "swarm", "lead", *where, *what)
        node, metrics = run_dir / "node.json", run_dir / "metrics.jsonl"
        self.until("the learner listens", lambda: node.exists() and node.read_text().endswith("\n"))
        line: str = json.loads(node.read_text())["join"]
        for number in (1, 2):
            state = str(self._directory / f"state-{number}")
            self.start(number, f"sampler-{number}", "swarm", "join", "--lan", "--bootstrap", line, "--state-dir", state)
        self.until("steps", lambda: metrics.exists() and len(metrics.read_text().splitlines()) > WARM_STEPS)
        self.start(1, "prober", "benchmarks.floods", "--probe", line)
        return line


def run(names: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="floods-") as path, ExitStack() as stack, hosts(4) as network:
        directory = Path(path)
        stage = Stage(list(network), directory, stack)
        line = stage.learning()
        watched = Watched(directory / "prober.out", directory / "run" / "metrics.jsonl")
        spans = [rest(seconds)]
        for name in names:
            flood = stage.start(3, name, "benchmarks.floods", "--attack", name, "--at", line, "--seconds", f"{seconds}")
            began = time.time()
            flood.wait(seconds + START_S)
            spans += [(began, time.time()), rest(seconds)]
            out = (directory / f"{name}.out").read_text() or "{}"
            time.sleep(1.0)
            yield row(name, watched, spans[-3:], json.loads(out))


def rest(seconds: float) -> tuple[float, float]:
    began = time.time()
    time.sleep(seconds)
    return began, time.time()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(FLOODS))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--to", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--at", help=argparse.SUPPRESS)
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.probe or given.attack:
        asyncio.run(probe(given.probe) if given.probe else attack(given.attack, given.at, given.seconds))
        return 0
    rows = []
    for found in run(given.only.split(","), given.seconds):
        rows.append(found)
        if given.to:
            with given.to.open("a") as file:
                file.write(json.dumps(found) + "\n")
        ratios = f"beats x{found['beats']}, steps x{found['steps']}"
        print(f"{found['flood']:12} {ratios}, lost {found['lost']}; {found['did']}", flush=True)
    met = all(one[kind] is not None and one[kind] <= MAX_RATIO for one in rows for kind in ("beats", "steps"))
    print(json.dumps({"met": met, "floods": rows}) if given.json else f"met: {met}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
