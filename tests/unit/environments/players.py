"""Players by rule, and what they earn: `python -m tests.unit.environments.players` prints the table of the document."""

from __future__ import annotations

import re
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from random import Random

from examples.environments.puzzles import KnightsAndKnaves, Sokoban
from swarm.environments.base import Environment, Step
from swarm.environments.frozen_lake import EDGE, HOLE, FrozenLake

Player = Callable[[str], str]
"""What a player says to the last message that it read."""


def play(environment: Environment, seed: int, player: Player) -> Iterator[Step]:
    """The steps of an episode."""
    read = environment.reset(seed)[-1][1]
    for _ in range(environment.max_turns):
        step = environment.step(player(read))
        yield step
        if step.done:
            return
        read = step.messages[-1][1]


def earned(environment: Environment, seed: int, player: Player) -> tuple[float, bool]:
    """An episode's return, and whether it was solved."""
    steps = list(play(environment, seed, player))
    return sum(step.rewards[0] for step in steps), steps[-1].solved


def random_of(choices: str, length: int, seed: int) -> Player:
    draw = Random(seed)
    return lambda read: "".join(draw.choices(choices, k=length))


def local_walker(read: str) -> str:
    """Right if there is no hole, else down, and so on: it sees only what is around it."""
    around = read.rstrip("=")[-4:]
    return next((str(move) for move in (2, 1, 3, 0) if around[move] not in HOLE + EDGE), "0")


def shortest_walker() -> Player:
    """It keeps the board that it read first, and goes the shortest way."""
    board = ""

    def say(read: str) -> str:
        nonlocal board
        first, _, rest = read.partition("=")
        board = first or board
        size = round(len(board) ** 0.5)
        return _first_move(board, size, size * int(rest[0]) + int(rest[1]))

    return say


def _first_move(board: str, size: int, place: int) -> str:
    queue, seen = deque([(place, "")]), {place}
    while queue:
        at, said = queue.popleft()
        if at == size * size - 1:
            return said[0]
        for move, (row, column) in enumerate(((0, -1), (1, 0), (0, 1), (-1, 0))):
            beside = (at // size + row, at % size + column)
            to = size * beside[0] + beside[1]
            if all(0 <= one < size for one in beside) and to not in seen and board[to] != HOLE:
                seen.add(to)
                queue.append((to, said + str(move)))
    raise AssertionError("the board has no way")


def sokoban_solver(read: str) -> str:
    """Up to four moves of a shortest plan, by a search of its own; nothing if there is none."""
    rows = [line for line in read.splitlines() if line.startswith("+")]
    width, board = len(rows[0]), "".join(rows)
    ways = {"L": -1, "R": 1, "U": -width, "D": width}
    goals = frozenset(at for at, look in enumerate(board) if look in "X$%")
    player = next(at for at, look in enumerate(board) if look in "*%")
    boxes = frozenset(at for at, look in enumerate(board) if look in "@$")
    queue, seen = deque([(player, boxes, "")]), {(player, boxes)}
    while queue:
        here, there, said = queue.popleft()
        if there == goals:
            return said[:4]
        for move, way in ways.items():
            to, pushed = here + way, there
            if to in there:
                pushed = there - {to} | {to + way}
                if board[to + way] == "+" or to + way in there:
                    continue
            if board[to] != "+" and (to, pushed) not in seen:
                seen.add((to, pushed))
                queue.append((to, pushed, said + move))
    return ""


def guesser(seed: int, *, listens: bool) -> Player:
    """Guesses who lies without reading what they said; if it listens, only what fits what it was told."""
    draw = Random(seed)
    names: list[str] = []
    terms: list[str] = []
    tried: list[tuple[int, ...]] = []
    told: list[int] = []

    def say(read: str) -> str:
        if match := re.search(r"\(Format your answer like: \"(.*)\"\)", read):
            found = re.findall(r"(\w+) is an? (\w+)/(\w+)", match[1])
            names[:], terms[:] = [name for name, _, _ in found], found[0][1:]
            tried.clear()
            told.clear()
        else:
            told.append(int(read.split()[0]))
        options = [tuple(number >> at & 1 for at in range(len(names))) for number in range(2 ** len(names))]
        fits = [
            one
            for one in options
            if not listens
            or all(sum(a == b for a, b in zip(one, t, strict=True)) == n for t, n in zip(tried, told, strict=True))
        ]
        tried.append(draw.choice(fits))
        return ", ".join(f"{name} is a {terms[role]}" for name, role in zip(names, tried[-1], strict=True))

    return say


def main(episodes: int = 1000) -> None:
    lake, sokoban, knights = FrozenLake(), Sokoban(), KnightsAndKnaves()
    rows: list[tuple[str, Environment, Player]] = [
        ("frozen-lake, nothing said", lake, lambda read: ""),
        ("frozen-lake, random", lake, random_of("0123", 1, 0)),
        ("frozen-lake, right and down at random", lake, random_of("12", 1, 0)),
        ("frozen-lake, right or down by what is around", lake, local_walker),
        ("frozen-lake, shortest way", lake, shortest_walker()),
        ("sokoban, nothing said", sokoban, lambda read: ""),
        ("sokoban, always RRRR", sokoban, lambda read: "RRRR"),
        ("sokoban, random", sokoban, random_of("LRUD", 4, 0)),
        ("sokoban, search", sokoban, sokoban_solver),
        ("knights-and-knaves, nothing said", knights, lambda read: ""),
        ("knights-and-knaves, random", knights, guesser(0, listens=False)),
        ("knights-and-knaves, random among what fits", knights, guesser(0, listens=True)),
    ]
    for words, environment, player in rows:
        found = [earned(environment, seed, player) for seed in range(episodes)]
        mean, solved = (statistics.fmean(column) for column in zip(*found, strict=True))
        print(f"{words:48} return {mean:6.3f}  solved {solved:5.3f}", flush=True)


if __name__ == "__main__":
    main()
