"""Puzzles of reasoning-gym in several turns: Sokoban move by move, and Knights and Knaves with more than one try."""

from __future__ import annotations

import re
from random import Random
from typing import Literal

from swarm.environments.base import Environment, Messages, Step
from swarm.errors import UserError
from swarm.extras import require

SOKOBAN = """Push every box (@) onto a goal (X). You are *, or % on a goal; $ is a box on a goal, + a wall and - floor.
Each turn, say up to 4 moves in one word of L (left), R (right), U (up) and D (down), such as RRU.
"""
LEFT, WITH_BOX, WITH_PLAYER = (str.maketrans(*pair) for pair in (("@$*%", "-X-X"), ("-X", "@$"), ("-X", "*%")))
KNIGHTS = "\nYou have 3 tries. After a wrong answer you are told how much of it is right; the next earns a fifth."
DECLINE = 0.2  # With it, to guess and use what is told earns little more than to guess once


class Sokoban(Environment):
    """Each box pushed onto a goal gives its share of 1, and takes it back when it is pushed off. There are walls around
    `size` x `size` cells. The generator solved each board."""

    name = "sokoban"
    description = "push boxes onto goals, some moves a turn, on boards of reasoning-gym"
    max_new_tokens = 256

    def __init__(self, *, size: int = 4, boxes: int = 1) -> None:
        require("tasks", self.name)
        if not 1 <= boxes <= size - 2 <= 8:
            raise UserError(f"sokoban: size is from 3 to 10, not {size}, and boxes from 1 to size - 2, not {boxes}")
        self.max_turns, self._size, self._count = 10 * boxes, size + 2, boxes

    def reset(self, seed: int) -> Messages:
        from reasoning_gym.games.contrib.sokoban.src.generator import generate

        draw, size, count, self._board = Random(f"sokoban/{seed}"), self._size, self._count, list[str]()
        # Some of the generator's boards are solved already.
        while "@" not in self._board:
            text, _, _ = generate(draw, False, size, size, size, size, count, count, max_depth=80)
            self._board = list("".join(text.split()))
        self._share = 1 / self._board.count("@")
        return [("user", SOKOBAN + self._drawn())]

    def step(self, text: str) -> Step:
        """The last word of moves counts. A move that cannot be done ends the turn."""
        words, left = re.findall(r"\b[LRUD]+\b", text.upper()), self._board.count("@")
        is_move = bool(words) and all(self._push(move) for move in words[-1][:4])
        reward, solved = self._share * (left - self._board.count("@")), "@" not in self._board
        messages = [("user", ("" if is_move else "That cannot be done.\n") + self._drawn())]
        parts = {"invalid_moves": float(not is_move)}
        return Step(messages=messages, rewards=(reward,), done=solved, solved=solved, parts=parts)

    def _push(self, move: str) -> bool:
        """Take a step and push the box that is there. False if it cannot be done, or if the board is solved."""
        board, way = self._board, {"L": -1, "R": 1, "U": -self._size, "D": self._size}[move]
        here = next(at for at, look in enumerate(board) if look in "*%")
        ahead, beyond = here + way, here + 2 * way
        if "@" in board and board[ahead] in "@$" and board[beyond] in "-X":
            board[ahead], board[beyond] = board[ahead].translate(LEFT), board[beyond].translate(WITH_BOX)
        if is_free := "@" in board and board[ahead] in "-X":
            board[here], board[ahead] = board[here].translate(LEFT), board[ahead].translate(WITH_PLAYER)
        return is_free

    def _drawn(self) -> str:
        return "".join("".join(self._board[at : at + self._size]) + "\n" for at in range(0, self._size**2, self._size))


class KnightsAndKnaves(Environment):
    """Who lies? A right answer gives 1 at the first try, and DECLINE times as much at each later one."""

    name = "knights-and-knaves"
    description = "find out who lies; a wrong answer is told how much of it is right"
    max_turns = 3
    max_new_tokens = 1024

    def __init__(self, *, people: Literal[2, 3, 4, 5, 6] = 3) -> None:
        require("tasks", self.name)
        self._people = people

    def reset(self, seed: int) -> Messages:
        import reasoning_gym

        entry = reasoning_gym.create_dataset("knights_knaves", n_people=self._people, seed=seed, size=1)[0]
        known, terms = entry["metadata"], entry["metadata"]["knight_knave_terms"]
        self._worth, self._terms = 1.0, (terms["knave"], terms["knight"])
        self._truth = {n: self._terms[bool(role)] for n, role in zip(known["names"], known["solution"], strict=True)}
        return [("user", entry["question"] + KNIGHTS)]

    def step(self, text: str) -> Step:
        """Of each person the last claim counts. An answer that leaves somebody out is wrong, and not told how much."""
        said, every = rf"\W+(?:is\W+)?(?:an?\W+)?({'|'.join(self._terms)})\b", len(self._truth)
        claims = {name: re.findall(rf"\b{name}{said}", text, flags=re.IGNORECASE)[-1:] for name in self._truth}
        right = sum([claim.lower() for claim in claims[name]] == [role] for name, role in self._truth.items())
        told = f"{right} of {every} are right."
        if [] in claims.values():
            told = f"Say of each of {', '.join(claims)}: NAME is a {' or a '.join(self._terms)}."
        reward, self._worth = self._worth * (right == every), self._worth * DECLINE
        return Step(messages=[("user", told)], rewards=(reward,), done=right == every, solved=right == every)
