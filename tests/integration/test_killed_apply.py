"""SIGKILL at random bytes and times of an apply: the next start finishes it, bit for bit."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swarm.broadcast.store.store import VersionStore
from swarm.broadcast.store.weight_map import open_weights
from tests.builders import KEY, layout
from tests.publishers import Publisher, hand_over, receiver_store

pytestmark = pytest.mark.slow

MODEL = layout(("embed", "BF16", (1024, 1024)), ("scale", "F32", (70_000,)))
KILLS = 24
LIMIT_S = 60.0


class Receiver:
    """A store with the chunks of four versions: in full, a sparse delta, in full again, a dense delta."""

    def __init__(self, directory: Path, *, in_memory: bool) -> None:
        self.memory = directory / "memory" if in_memory else None
        self.forget_memory()
        publisher = Publisher(directory / "learner", MODEL)
        store = receiver_store(directory / "store", MODEL)
        for number in range(4):
            publisher.changed_words = 60_000 if number == 3 else 3000
            hand_over(store, publisher.publish(number, full=number == 2))
        self.newest = max(publisher.history)
        self.wanted = publisher.history[self.newest]
        self.directory = store.directory

    def forget_memory(self) -> None:
        """As a power cut does."""
        if self.memory is not None:
            shutil.rmtree(self.memory, ignore_errors=True)
            self.memory.mkdir()

    def forget_map(self) -> None:
        self.forget_memory()
        for path in self.directory.glob("weights.*"):
            path.unlink()

    def start(self, *die_at: int) -> subprocess.Popen[str]:
        """A process that begins to apply when this returns."""
        command = [
            sys.executable,
            "-m",
            "tests.integration.killed_apply",
            str(self.directory),
            str(self.memory or "-"),
            *map(str, die_at),
        ]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    def check(self) -> None:
        weights = open_weights(VersionStore(self.directory, KEY.public_bytes), memory=self.memory)
        assert weights.version == self.newest
        assert weights.unfinished is None
        assert weights.path.read_bytes() == self.wanted
        weights.close()
        self.forget_memory()


def killed(child: subprocess.Popen[str]) -> bool:
    """True if the process was killed; it fails in no other way."""
    child.communicate(timeout=LIMIT_S)
    assert child.returncode in (0, -9)
    return child.returncode == -9


@pytest.mark.parametrize(
    "in_memory", [pytest.param(False, id="disk", marks=pytest.mark.long), pytest.param(True, id="memory")]
)
def test_an_apply_that_is_killed_anywhere_is_finished_at_the_next_start(tmp_path: Path, in_memory: bool) -> None:
    receiver, draw = Receiver(tmp_path, in_memory=in_memory), random.Random(1)
    began = time.monotonic()
    told, _ = receiver.start().communicate(timeout=LIMIT_S)
    whole_s, whole_bytes = time.monotonic() - began, int(told)
    assert whole_bytes > MODEL.total_bytes
    receiver.check()
    receiver.forget_map()
    kills = 0
    while kills < KILLS:
        at_byte = kills % 2 == 0
        child = receiver.start(*([draw.randrange(whole_bytes)] if at_byte else []))
        if not at_byte:
            time.sleep(draw.uniform(0.0, whole_s / 4))
            child.kill()
        if killed(child):
            kills += 1
            if kills % 3 == 0:
                receiver.forget_memory()
        else:
            receiver.check()
            receiver.forget_map()
    receiver.check()
