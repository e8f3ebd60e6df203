"""A task whose reward does what the completion says, for better or worse. Its class is loaded by the reward process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm.tasks.base import Task
from swarm.tasks.digits import CopyTask
from swarm.types import Prompt, Score


class OddTask(Task):
    """The first character of a completion is what to do; a prompt's text is a directory for what has to be told."""

    name = "odd"
    description = "rewards that go wrong"
    max_new_tokens = 8

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        return Prompt(prompt_id=f"odd-{index}", text="", answer="")

    def held_out(self, count: int) -> Sequence[Prompt]:
        return []

    def score(self, prompt: Prompt, completion: str) -> Score:
        do = getattr(self, f"_do_{completion[:1]}", None)
        found: Any = do(Path(prompt.text)) if do is not None else Score(reward=1.0, exact=True)
        return found  # type: ignore[no-any-return]

    def _do_0(self, directory: Path) -> Score:
        raise ValueError("this reward\nraises")

    def _do_1(self, directory: Path) -> Score:
        while True:
            time.sleep(60)

    def _do_2(self, directory: Path) -> Score:
        """Where it is given a directory it leaves a program of its own."""
        if directory.name:
            (directory / "left.pid").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        print("about to go", file=sys.stderr)
        os._exit(3)

    def _do_3(self, directory: Path) -> Score:
        return Score(reward=float("nan"), exact=False)

    def _do_4(self, directory: Path) -> Any:
        return "a fine answer"

    def _do_5(self, directory: Path) -> Score:
        return Score(reward=float(len(bytearray(4096 << 20))), exact=False)

    def _do_6(self, directory: Path) -> Score:
        """Killed the first time only, as by the kernel."""
        if not (directory / "killed").exists():
            (directory / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Score(reward=0.25, exact=False, parts={"style": 0.5, "answer": 0.0})

    def _do_7(self, directory: Path) -> Score:
        """What it finds in its process."""
        print("a reward that prints does not speak to the pool")
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
        found = {
            "environment": dict(os.environ),
            "descriptors": links,
            "modules": sorted({name.partition(".")[0] for name in sys.modules}),
            "session": os.getsid(0),
        }
        (directory / "found.json").write_text(json.dumps(found))
        return Score(reward=1.0, exact=False)

    def _do_8(self, directory: Path) -> Score:
        return Score(reward=1.0, exact=False, parts={f"part {i}": 0.0 for i in range(17)})


def _is_open(fd: str) -> bool:
    return Path(f"/proc/self/fd/{fd}").is_symlink() and os.path.lexists(f"/proc/self/fd/{fd}")


class BrittleCopy(CopyTask):
    """Its reward raises for what begins with a 7: for enough of all answers that an alarm goes off."""

    def score(self, prompt: Prompt, completion: str) -> Score:
        if completion.startswith("7"):
            raise ValueError("a seven")
        return super().score(prompt, completion)
