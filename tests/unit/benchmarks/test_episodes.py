"""The figures of the benchmark of episodes, its environment and its delaying link. No swarm."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from random import Random

import pytest

from benchmarks.delayed_link import CHUNK_BYTES, PACKET_BYTES, DelayingProxy, SendingWindow, delayed
from benchmarks.episodes import CASES, TOKENS_PER_S, TURN_S, Drawn, Window, away_s, figures_of, idle_share
from benchmarks.episodes_environment import TURNS, EightTurns, OneTurn

WINDOW = Window(began_s=100.0, ended_s=110.0, places=2, learner_cpu_s=0.4, environment_cpu_s=0.2, trainer_cpu_s=0.0)


def drawn(turn: int, came_s: float, ended_s: float, drawn_s: float, group: str = "t0") -> Drawn:
    return Drawn(group=group, index=0, turn=turn, came_s=came_s, ended_s=ended_s, drawn_s=drawn_s)


PLAYED = [drawn(0, 98.0, 102.0, 4.0), drawn(1, 102.5, 107.0, 4.0), drawn(2, 108.0, 114.0, 5.0)]
"""In the window places are busy from 100 to 102, 103 to 107 and 109 to 110."""


def test_a_place_is_idle_while_nothing_is_drawn_in_it_within_the_window() -> None:
    assert idle_share(PLAYED, WINDOW) == pytest.approx(1 - 7 / 20)
    assert idle_share([], WINDOW) == 1
    full = [drawn(0, 90.0, 120.0, 30.0, group) for group in ("t0", "t1")]
    assert idle_share(full, WINDOW) == pytest.approx(0)


def test_a_turn_is_away_from_its_draw_until_the_next_one_is_there() -> None:
    assert away_s(PLAYED, WINDOW) == pytest.approx([0.5, 1.0])
    # The first turn was drawn again, by another node: nobody knows which of them this one follows.
    assert away_s([*PLAYED[:2], drawn(0, 103.0, 104.0, 1.0)], WINDOW) == []


def test_the_figures_of_a_run() -> None:
    figures = figures_of(PLAYED, WINDOW)
    assert figures["turns_per_s"] == pytest.approx(0.2)
    assert figures["turn_s"] == pytest.approx(4.0)
    assert figures["queued_s"] == pytest.approx(0.25)
    assert figures["learner_cpu_s"] == pytest.approx(0.2)
    assert json.loads(json.dumps(figures, allow_nan=False))["window"]["places"] == 2
    with pytest.raises(ValueError, match="no turn ended"):
        figures_of([], WINDOW)


def test_one_turn_of_the_peer_takes_as_long_as_all_of_an_episode() -> None:
    by_turns = {case.turns: case for case in CASES}
    assert by_turns[1].max_tokens == TURNS * by_turns[TURNS].max_tokens
    assert (1 + by_turns[TURNS].max_tokens) / 2 / TOKENS_PER_S == pytest.approx(TURN_S)


@pytest.mark.parametrize("environment", [EightTurns(), OneTurn()])
def test_an_episode_has_exactly_its_turns(environment: EightTurns) -> None:
    for seed in (3, 4):
        environment.reset(seed)
        ended = [environment.step("").done for _ in range(environment.max_turns)]
        assert ended == [False] * (environment.max_turns - 1) + [True]


async def test_the_link_delays_both_ways_and_keeps_the_order() -> None:
    sent = [bytes([number]) * 10_000 for number in range(50)]

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while said := await reader.read(1 << 16):
            writer.write(said)
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        with delayed(server.sockets[0].getsockname()[1], 0.02) as port:
            began = time.monotonic()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await _round_trip(reader, writer, [b"."])
            # The proxy's own handshake was under way since the connection was made.
            assert time.monotonic() - began >= 0.08
            assert await _round_trip(reader, writer, [b"."]) >= 0.04
            assert await _round_trip(reader, writer, sent) >= 0.04
            writer.close()


async def test_the_link_takes_what_comes_while_the_rest_is_under_way() -> None:
    """All is read, and due, before any of it has arrived at the end of an hour."""
    now, reader, chunks = (
        asyncio.get_running_loop().time(),
        asyncio.StreamReader(),
        asyncio.Queue[tuple[float, bytes]](),
    )
    reader.feed_data(bytes(2 * CHUNK_BYTES + 1))
    reader.feed_eof()
    await DelayingProxy(("127.0.0.1", 0), 3600.0)._read(reader, chunks, now + 10.0)
    due = [chunks.get_nowait() for _ in range(chunks.qsize())]
    assert [len(chunk) for _, chunk in due] == [CHUNK_BYTES, CHUNK_BYTES, 1, 0]
    assert all(at >= now + 3610.0 for at, _ in due)


async def _round_trip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, parts: Sequence[bytes]) -> float:
    began = time.monotonic()
    for part in parts:
        writer.write(part)
        await writer.drain()
    assert await reader.readexactly(sum(map(len, parts))) == b"".join(parts)
    return time.monotonic() - began


def test_a_lossy_link_is_as_fast_as_tcp_is_over_it() -> None:
    """Mathis et al. (1997): about 1.2 packets a round trip by the root of the loss, here with a gentler backing off."""
    window, nbytes = SendingWindow(0.08, 0.005, Random(1)), 20_000_000
    sending_s, lost_s = window.send(nbytes)
    assert 1.2 < nbytes / PACKET_BYTES / sending_s * 0.08 * math.sqrt(0.005) < 2.2
    assert lost_s == 0.08
    assert SendingWindow(0.08, 0.0, Random(1)).send(nbytes) == (0.0, 0.0)
