"""A calculator and Python: questions that take a tool. Calls are answered in the next message. The first answer
ends the episode, with 1 for the right one and else 0. A call that fails costs a turn and no more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from random import Random

from swarm.environments.base import Environment, Messages, Step
from swarm.errors import UserError

SANDBOX = str(Path(__file__).with_name("confined.py"))
ROLE = "user"  # Of a tool's result: every chat template takes it; many refuse "tool" without a call in their own form
VARIABLES = {"PYTHONUTF8": "1", "PYTHONHASHSEED": "0"}  # All that a program gets. Sets have one order.
WALL_S = 2.5  # For a program, which may wait too: other episodes wait for it. A quarter of reward_timeout_s.
_SUM = re.compile(r"(?!.*\*\*)[0-9 .+*/%()-]{1,200}")  # Without powers no result is longer than the call


class ToolEpisode(Environment):
    """A question about three numbers. Calls in <`tag`> go to `use`, which raises ValueError if they are wrong."""

    max_turns = 8
    max_new_tokens = 512
    tag: str
    manual: str
    questions: Sequence[tuple[str, Callable[[int, int, int], int]]]

    def use(self, call: str) -> str:
        raise NotImplementedError

    def reset(self, seed: int) -> Messages:
        random = Random(seed)
        question, answer = random.choice(self.questions)
        a, b, c = random.choices(range(10_000, 100_000), k=3)
        self._answer = str(answer(a, b, c))
        return (("user", f"{question.format(a, b, c)}\n{self.manual} Give the answer as <answer>...</answer>."),)

    def step(self, text: str) -> Step:
        # What follows the first call was said before the tool had answered. None has another in it: in linear time.
        call = rf"(?s)<({self.tag}|answer)>((?:(?!<\1>).)*?)</\1>"
        said = re.search(call, text.rpartition("</think>")[2])
        if said and said[1] == "answer":
            is_right = said[2].replace(",", "").strip(" .\n") == self._answer
            return Step(rewards=(float(is_right),), done=True, solved=is_right)
        try:
            if not said:
                raise ValueError("there is no whole call and no answer in this.")
            return Step(messages=((ROLE, self.use(said[2].strip())),))
        except ValueError as error:
            return Step(messages=((ROLE, f"Error: {error}\n{self.manual}"),), parts={"tool_errors": 1.0})


class Calculator(ToolEpisode):
    """Sums of numbers that are too large to do in the head."""

    name = "calculator"
    description = "sums in words, with a calculator"
    tag = "tool"
    manual = "Compute with <tool>12 * (3 + 4)</tool>, and wait for the result."
    questions = (
        ("{} crates hold {} screws each, and {} lie loose. How many are there?", lambda a, b, c: a * b + c),
        ("{} children and {} adults pay {} cents each. How many cents do they pay?", lambda a, b, c: (a + b) * c),
    )

    def use(self, call: str) -> str:
        from swarm.tasks.expressions import evaluate

        try:
            return str(evaluate(call if _SUM.fullmatch(call) else ""))
        except (ValueError, ArithmeticError, TypeError) as error:
            raise ValueError(f"only numbers, + - * / % and parentheses can be computed ({error}).") from error


class PythonTool(ToolEpisode):
    """Computations that take a program. Each call is a program of its own, of which nothing stays."""

    name = "python-tool"
    description = "questions that take a program, with Python in a sandbox"
    tag = "python"
    manual = "Run a program with <python>print(6 * 7)</python>, and wait for what it prints."
    questions = (
        ("x is {}. A hundred times x becomes (x * x + {}) % {}. What is x then?",
         lambda a, b, c: reduce(lambda x, _: (x * x + b) % c, range(100), a)),
        ("For how many n from 1 to {} is (n * n + {}) % 101 less than n * {} % 101?",
         lambda a, b, c: sum((n * n + b) % 101 < n * c % 101 for n in range(1, a + 1))),
    )  # fmt: skip

    has_sandbox = False  # Seen once a process: to start one takes a quarter of a second

    def __init__(self) -> None:
        try:
            if not PythonTool.has_sandbox:
                self.use("print()")
            PythonTool.has_sandbox = True
        except ValueError as error:
            why = " ".join(str(error).split())
            raise UserError(f"{self.name} runs programs that samplers send, which needs a sandbox: {why}") from error

    def use(self, call: str) -> str:
        command = (os.path.realpath(sys.executable), "-SsP", SANDBOX)
        # Files: a pipe would have to be read, and could bring more than the memory holds.
        with tempfile.TemporaryFile() as program, tempfile.TemporaryFile() as said:
            program.write(call.encode(errors="replace"))
            program.seek(0)
            try:
                status = subprocess.call(
                    command, stdin=program, stdout=said, stderr=said, env=VARIABLES, timeout=WALL_S
                )
            except subprocess.TimeoutExpired:
                status = -1
            said.seek(0)
            printed = said.read().decode(errors="replace").strip()
        if status:
            raise ValueError(printed if status > 0 else f"{printed}\nIt took too long and was stopped.")
        return printed or "(it printed nothing)"
