"""What a sampler does after its sessions break: again, anew, a pause, or farewell."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs

from swarm.broadcast.store.disk import DiskFull
from swarm.errors import ChildFailed, EchoError, ProtocolError, UserError
from swarm.join import joining, sampler
from swarm.join.sampler import MAX_FAULTS, SamplerNode
from swarm.node.identity import load_or_create_key, load_or_create_tls
from swarm.rollout.messages import Answer
from swarm.sampler.choice import ChosenEngine
from swarm.sampler.session import refused, verdicts_of
from swarm.sampler.worker import ProofFailed
from swarm.settings import JoinConfig
from swarm.types import VersionId
from tests.builders import failed_rollout, rollout

DIED = ChildFailed("the engine died")
THANKS = "the run is finished; thank you"
UNPROVEN = ProofFailed("model.norm.weight differs")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "FAULT_PAUSE_S", 0.0)
    monkeypatch.setattr(sampler, "PAUSE_S", 0.0)


class Broken(SamplerNode):
    """Its sessions break with `faults` in turn, "accepted" stands for one in which a rollout was; then the run ends."""

    def __init__(self, *faults: EchoError | str) -> None:
        self.said: list[str] = []
        self.states: list[str] = []
        self.now = 0.0
        super().__init__(JoinConfig(bootstrap=("127.0.0.1",)), self.said.append, clock=lambda: self.now)
        self._faults = list(faults)

    async def _session(self, *_: Any) -> bool:
        self.states.append(self._status.state)
        self._status.state = "sampling"
        self.now += 1000.0
        if not self._faults:
            return True
        fault = self._faults.pop(0)
        if isinstance(fault, str):
            self._status.verdicts["accepted"] += 1
            fault = DIED
        raise ExceptionGroup("a session", [fault])

    async def serve(self) -> bool:
        return await self._serve(cast(Any, None), cast(Any, None))


async def test_an_engine_that_died_is_started_anew_and_after_five_faults_in_a_row_after_a_pause() -> None:
    node = Broken(*[DIED] * MAX_FAULTS)
    node._status.has_started = True
    assert await node.serve()
    assert node.said[:2] == [f"the engine died; starting again ({count} of 5 faults in a row)" for count in (1, 2)]
    assert node.said[-1].endswith("after 5 faults in a row, the last: the engine died")
    assert node.states[-1] == "paused: the engine died"


async def test_an_engine_that_never_starts_ends_the_node_with_the_reason() -> None:
    with pytest.raises(UserError, match="the engine failed to start 5 times in a row, the last: the engine died"):
        await Broken(*[DIED] * MAX_FAULTS).serve()


async def test_faults_are_counted_from_the_last_accepted_rollout() -> None:
    node = Broken(*[DIED] * (MAX_FAULTS - 1), "accepted", *[DIED] * (MAX_FAULTS - 2))
    assert await node.serve()
    assert not any("paused" in line for line in node.said)


def test_news_of_a_failed_generation_is_no_accepted_rollout() -> None:
    """Else an engine that fails every sample and dies would be started anew for ever."""
    answers = [Answer(rollout(index=0)), Answer(failed_rollout(index=1))]
    accepted = [structs.replace(refused(one), verdict="accepted") for one in answers]
    assert verdicts_of(answers, accepted) == {("t0", 0): "accepted", ("t0", 1): "failed"}
    assert verdicts_of(answers, [refused(answers[1])]) == {("t0", 1): "malformed"}


@pytest.mark.parametrize(
    ("standby", "installed", "syncing", "told"),
    [
        ("", None, {"version": "0.17", "share": 0.43}, "syncing: 43% of version 0.17"),
        ("", None, None, "looking for the learner"),
        ("", VersionId(incarnation=0, version=16), {"version": "0.17", "share": 0.43}, "looking for the learner"),
        ("cheaper ones suffice", None, {"version": "0.17", "share": 0.43}, "standby: cheaper ones suffice"),
    ],
)
def test_a_node_that_draws_nothing_says_why(
    standby: str, installed: VersionId | None, syncing: dict[str, Any] | None, told: str
) -> None:
    node = Broken()
    node._status.state, node._status.standby = "looking for the learner", standby
    node._engine = cast(Any, SimpleNamespace(installed=installed))
    assert node._state(syncing) == told


@pytest.mark.parametrize("between", [(), ("accepted", DIED)])
async def test_an_engine_whose_weights_are_not_proven_is_started_anew_once(between: tuple[EchoError | str]) -> None:
    """But a proof that failed long ago is forgiven."""
    with pytest.raises(ProofFailed, match=r"^leaving: a new engine .*: model\.norm\.weight differs$"):
        await Broken(UNPROVEN, *between, UNPROVEN).serve()
    assert await Broken(UNPROVEN, "accepted", "accepted", "accepted", UNPROVEN).serve()


async def test_a_lease_that_cannot_be_read_is_a_fault_too_but_what_the_user_has_to_mend_ends_the_node() -> None:
    assert await Broken(ProtocolError("the learner's lease is not for us")).serve()
    with pytest.raises(UserError, match="no such device"):
        await Broken(UserError("no such device")).serve()


def private_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.stat().st_mode & 0o077 == 0)


async def test_an_engine_is_told_what_it_must_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {}

    def worker(*_: Any, **options: Any) -> None:
        given.update(options)
        raise DIED

    monkeypatch.setattr(sampler, "EngineWorker", worker)
    node = SamplerNode(JoinConfig(bootstrap=("127.0.0.1",)), lambda line: None)
    node._directory, node._chosen = tmp_path, ChosenEngine(kind="transformers", why="")
    load_or_create_key(tmp_path)
    load_or_create_tls(tmp_path)
    with pytest.raises(ChildFailed):
        await node._session(cast(Any, None), cast(Any, None))
    assert sorted(given["secrets"]) == private_files(tmp_path)


FULL = DiskFull("the disk of /state has no room for weights: free 7 MB there")
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


class Crowded(Broken):
    """Taking part ends with `faults` in turn, then the run is over. At each look the disk has `free` bytes in turn."""

    def __init__(self, tmp_path: Path, *faults: Exception) -> None:
        super().__init__()
        self._directory = tmp_path
        self._ends = list(faults)
        learner = SimpleNamespace(record=SimpleNamespace(round_s=1.0))
        hello = SimpleNamespace(learner_key=b"", card=b"", swarm="s1")
        found = SimpleNamespace(hello=hello, learner=learner)

        async def find() -> Any:
            return found

        network = SimpleNamespace(find=find, trust_line=lambda: "trusted", swarm=lambda *_: nullcontext(), card=b"")
        self._network = cast(Any, network)
        self._data = cast(Any, SimpleNamespace(receiving=lambda *_: nullcontext(), status=dict))

    async def _take_part(self, *_: Any) -> bool:
        if self._ends:
            raise ExceptionGroup("a receiver", [self._ends.pop(0)])
        return True


@pytest.mark.parametrize("fault", [FULL, NO_SPACE], ids=["weights", "any file"])
async def test_a_full_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    free = [0, 0, 100, joining.FREED_BYTES]
    states: list[str] = []

    def free_bytes(_: Path) -> int:
        states.append(node._state(None))
        return free.pop(0)

    monkeypatch.setattr(joining, "free_bytes", free_bytes)
    monkeypatch.setattr(joining, "ROOM_S", 0.001)
    node = Crowded(tmp_path, fault)
    await node._swarms()
    assert node.said == ["trusted", f"paused: {fault}", "there is room again: going on", "trusted", THANKS]
    assert free == []
    assert set(states) == {f"paused: {fault}"}


@pytest.mark.parametrize("leaves", [True, False])
async def test_an_owner_ends_a_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: bool) -> None:
    node, looks = Crowded(tmp_path, FULL), Counter[str]()

    def free_bytes(_: Path) -> int:
        looks["made"] += 1
        if looks["made"] == 3 and leaves:
            loop.call_soon_threadsafe(node._stop.set)
        elif looks["made"] == 3:
            node._config = node._config.model_copy(update={"max_disk": 5.0})
        return 0

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(joining, "free_bytes", free_bytes)
    monkeypatch.setattr(joining, "ROOM_S", 0.001)
    await node._swarms()
    assert node.said[-1] == (f"paused: {FULL}" if leaves else THANKS)


async def test_another_fault_of_a_file_still_ends_the_node(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup):
        await Crowded(tmp_path, PermissionError(errno.EACCES, "Permission denied"))._swarms()
