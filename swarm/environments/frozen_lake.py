"""Frozen lake: walk over the ice to the bottom right, one step a turn, and avoid the holes.

Everything is written in digits, so that the tiny model reads one token a character: first the board, then in each turn
`=`, row, column, the cells to the left, below, to the right and above, and `=`. The player starts where the shortest
way to the goal has at least as many steps as the board is wide, so that walking straight on never reaches it.
"""

from __future__ import annotations

from random import Random

from swarm.environments.base import Environment, Messages, Step
from swarm.errors import UserError

ICE, HOLE, GOAL, PLAYER, EDGE = "45678"
VIEW_LENGTH = 8  # Characters that describe what is around the player
MOVES = "0123"  # Left, down, right and up, as gymnasium numbers them
PROGRESS, PENALTY, IDLE = 0.6, 0.2, 0.05  # Of the values tried, the tiny model learned fastest with these


class FrozenLake(Environment):
    """Reaching the goal gives 1 in total. Up to PROGRESS of it is given on the way, for each step that shortens the way
    to the goal, and taken back for steps away from it. A hole ends the episode and costs PENALTY. A turn that is not a
    move, or leads over the edge, changes nothing and costs IDLE. There are `holes` holes, or one less."""

    name = "frozen-lake"
    description = "walk over a frozen lake and into no hole; the tiny model learns it from nothing"
    max_new_tokens = 1
    is_chat = False

    def __init__(self, *, size: int = 4, holes: int = 3) -> None:
        if not (2 <= size <= 9 and 0 <= holes <= size * size // 3):
            raise UserError(
                f"frozen-lake: size is from 2 to 9, not {size}, and holes a third of the cells at most, not {holes}"
            )
        self.max_turns, self._size, self._holes, self._ways = 2 * size, size, holes, (-1, size + 2, 1, -size - 2)
        self.max_tokens = self.max_turns * (1 + VIEW_LENGTH)

    def reset(self, seed: int) -> Messages:
        draw, size, count = Random(f"frozen lake/{seed}"), self._size, self._size**2
        starts: list[int] = []
        while not starts:
            holes = draw.sample(range(count - 1), draw.randint(max(0, self._holes - 1), self._holes))
            cells = "".join(HOLE if at in holes else ICE for at in range(count - 1)) + GOAL
            rows = ["", *(cells[at : at + size] for at in range(0, count, size)), ""]
            self._board = "".join(EDGE + row.ljust(size, EDGE) + EDGE for row in rows)
            self._steps = self._steps_to_goal()
            starts = [place for place, steps in self._steps.items() if size <= steps <= self.max_turns]
        self._place = self._start = draw.choice(starts)
        self._given = 0.0
        return [("user", "".join(self._rows()) + self._view())]

    def step(self, text: str) -> Step:
        ahead = self._place + dict(zip(MOVES, self._ways, strict=True)).get(text.strip(), -self._place)
        is_move = self._board[ahead] != EDGE
        self._place = ahead if is_move else self._place
        cell = self._board[self._place]
        now = 1.0 if cell == GOAL else self._given - PENALTY
        if cell == ICE:
            now = PROGRESS * max(0.0, 1 - self._steps[self._place] / self._steps[self._start])
        # Rounded, so that floating-point error does not turn no gain into a tiny one.
        reward, self._given = round(now - self._given - IDLE * (not is_move), 9), now
        messages, parts = [("user", self._view())] if cell == ICE else [], {"invalid_moves": float(not is_move)}
        return Step(messages=messages, rewards=(reward,), done=cell != ICE, solved=cell == GOAL, parts=parts)

    def board(self) -> str:
        return "\n".join(self._rows()).translate(str.maketrans(ICE + HOLE + GOAL + PLAYER, ".OG@"))

    def _rows(self) -> list[str]:
        marked = self._board[: self._place] + PLAYER + self._board[self._place + 1 :]
        width = self._size + 2
        return [marked[at + 1 : at + width - 1] for at in range(width, width * (self._size + 1), width)]

    def _view(self) -> str:
        row, column = divmod(self._place - self._size - 3, self._size + 2)
        return f"={row}{column}{''.join(self._board[self._place + way] for way in self._ways)}="

    def _steps_to_goal(self) -> dict[int, int]:
        """The number of steps to the goal from each cell that has a way to it."""
        found, edge = {self._board.index(GOAL): 0}, [self._board.index(GOAL)]
        for place in edge:
            for neighbour in (place + way for way in self._ways):
                if neighbour not in found and self._board[neighbour] == ICE:
                    found[neighbour] = found[place] + 1
                    edge.append(neighbour)
        return found
