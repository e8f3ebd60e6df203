"""What a turn of a long episode costs: bytes on the line in both directions, and time of the learner's loop.

bin/python -m benchmarks.episodes --turns 64 --json

A learner's service with its journal in this process, and a sampler in another that plays EPISODES episodes side by side
over a proxy that counts. It draws at once: what it says are random tokens, as are the environment's answers.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import tempfile
import time
from array import array
from contextlib import suppress
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path

from aiohttp import web

from benchmarks import Figures, parser_of, said
from swarm.net.client import PeerClient, guard, session_route
from swarm.net.sessions import ServerSessions
from swarm.net.signing import SigningKey
from swarm.rollout.api import RolloutService
from swarm.rollout.journal.journal import Journal
from swarm.rollout.messages import Answer
from swarm.rollout.plane.effects import ScoreWanted, StepWanted
from swarm.rollout.plane.episodes import EpisodeRules
from swarm.rollout.plane.plane import PlaneRules, RolloutPlane
from swarm.sampler.client import RolloutClient
from swarm.sampler.engine import Job, Sampled
from swarm.sampler.feeding import games_of
from swarm.sampler.handing import Handing
from swarm.sampler.playing import Game
from swarm.types import Address, NodeId, Observed, Prompt, SamplingRules, Score, Span, VersionId

EPISODES = 16  # Side by side: a group
DRAWN, SAID = 256, 512  # Tokens of a turn, and of what the environment says to it
VOCABULARY, STOP = 150_000, 1
ZERO = VersionId(incarnation=0, version=0)


def random_tokens(draw: random.Random, count: int) -> array[int]:
    return array("i", (draw.randrange(2, VOCABULARY) for _ in range(count)))


class Counted:
    """A TCP proxy on loopback to `port`; `nbytes` went through it in both directions."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.nbytes = 0

    async def start(self) -> int:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        with suppress(asyncio.CancelledError):  # At the end
            await asyncio.gather(self._pass(reader, back), self._pass(there, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            self.nbytes += len(data)
            writer.write(data)
            await writer.drain()
        writer.close()


def plane_of(turns: int) -> RolloutPlane:
    rules = PlaneRules(
        run_seed=0,
        max_staleness=1,
        groups_per_step=1,
        group_size=EPISODES,
        rules=SamplingRules(temperature=1.0, max_new_tokens=DRAWN, stop_token_ids=(STOP,)),
        vocab_size=VOCABULARY,
        beat_s=60.0,
        lease_time_limit_s=600.0,
        episodes=EpisodeRules(max_turns=turns, max_tokens=(turns + 1) * (DRAWN + SAID)),
    )
    return RolloutPlane(rules, prompts=lambda number: Prompt(prompt_id="p", text="", answer="", token_ids=(7,)))


async def learner(turns: int, directory: Path) -> Figures:
    over, key = asyncio.Event(), SigningKey.generate()
    says = cycle([random_tokens(random.Random(number), SAID).tobytes() for number in range(100)])
    sessions, journal = ServerSessions(key, b""), Journal(directory, group_size=EPISODES)
    service = RolloutService(sessions=sessions, journal=journal, emit=lambda kind, **fields: None)

    async def scorer(wanted: object) -> list[Score]:
        raise AssertionError(ScoreWanted)

    async def step(wanted: StepWanted) -> Observed:
        return Observed(token_ids=next(says), done=len(wanted.drawn) == turns)

    await journal.start()
    service.open(plane_of(turns), scorer, stepper=step)
    await service.published(ZERO)
    app = web.Application(middlewares=[guard])
    app.add_routes([session_route(sessions), *service.routes()])
    runner = web.AppRunner(app, auto_decompress=False)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    given = runner.addresses[0][1], key.node_id, theirs
    process = multiprocessing.get_context("spawn").Process(target=_sampler, args=given)
    process.start()
    asyncio.get_running_loop().add_reader(ours.fileno(), over.set)
    assert await asyncio.to_thread(ours.recv) == "begun"
    over.clear()
    spent_s = time.thread_time()
    await over.wait()
    spent_s = time.thread_time() - spent_s
    nbytes = ours.recv()
    process.join()
    await runner.cleanup()
    await journal.close()
    count = turns * EPISODES
    return {
        "turns": count,
        "bytes_over_tokens": nbytes / (count * (DRAWN + SAID)),
        "loop_ms_per_turn": 1000 * spent_s / count,
    }


def _sampler(port: int, server: NodeId, pipe: Connection) -> None:
    asyncio.run(_play_all(port, server, pipe))


async def _play_all(port: int, server: NodeId, pipe: Connection) -> None:
    draw, key, proxy = random.Random(1), SigningKey.generate(), Counted(port)
    address = Address(host="127.0.0.1", port=await proxy.start())
    async with PeerClient(address, key=key, server=server) as peer:
        client = RolloutClient(peer, key.node_id)
        await client.beat(ZERO, 0, 1.0)
        pipe.send("begun")
        leases = await client.ask(ZERO, EPISODES, 1.0, holding=())
        assert isinstance(leases, list)
        handing = Handing(client.submit, print)
        running = asyncio.create_task(handing.run())
        await asyncio.gather(*(_play(game, handing, draw) for game in games_of(leases)))
        running.cancel()
        pipe.send(proxy.nbytes)


async def _play(game: Game, handing: Handing, draw: random.Random) -> None:
    while game.goes_on(await handing.hand_in(_drawn(game, game.job(), draw))):
        pass


def _drawn(game: Game, job: Job, draw: random.Random) -> Answer:
    count = job.rules.max_new_tokens
    logprobs = array("f", (-draw.expovariate(1.0) for _ in range(count))).tobytes()
    spans = (Span(version=ZERO, start=0, end=count),)
    return game.answer(Sampled(random_tokens(draw, count).tobytes(), logprobs, spans, "length"))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, default=64, help="of an episode")
    with tempfile.TemporaryDirectory(prefix="episodes-") as directory:
        said(asyncio.run(learner(parser.parse_args().turns, Path(directory))))


if __name__ == "__main__":
    main()
