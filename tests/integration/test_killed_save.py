"""A trainer that is killed while it saves: the checkpoint before is what the run goes on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.errors import ChildFailed
from swarm.learner.checkpoint.files import checkpoint_path, newest_whole, prune
from swarm.learner.messages import Saved
from swarm.learner.process import TrainerProcess
from swarm.settings import LeadConfig
from tests.unit.trainers import group

pytestmark = pytest.mark.long

HANG_S = 120.0
LINEAGE = b"\1" * 32


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.is_dir()}


async def save(trainer: TrainerProcess, directory: Path, step: int) -> Saved:
    await trainer.save(directory, step)
    return await trainer.flush()


@pytest.mark.parametrize(
    ("function", "path"),
    [
        pytest.param("fsync", "step-000002.partial/trainer.safetensors", id="among its files"),
        pytest.param("rename", "step-000002.partial", id="before the commit"),
    ],
)
async def test_a_trainer_killed_while_saving_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, path: str
) -> None:
    monkeypatch.setenv("DIE_IN", function)
    monkeypatch.setenv("DIE_AT", path)
    config, root = LeadConfig(device="cpu"), tmp_path / "checkpoints"
    dying = TrainerProcess(tmp_path, hang_s=HANG_S)
    dying._module = "tests.integration.killed_save"
    await dying.prepare(config, 6)
    await dying.train(0, [group([1.0, 0.0])], LINEAGE)
    await dying.stage()
    assert await save(dying, checkpoint_path(root, 1), 1) == Saved(step=1, fault="")
    weights = dying.staging.read_bytes()
    await dying.train(1, [group([0.0, 1.0])])
    with pytest.raises(ChildFailed):
        await save(dying, checkpoint_path(root, 2), 2)
    assert names(root) == {"step-000001", "step-000002.partial"}

    newest = newest_whole(root)
    assert newest is not None
    prune(root, 1)
    assert names(root) == {"step-000001"}
    resumed = TrainerProcess(tmp_path, hang_s=HANG_S)
    try:
        prepared = await resumed.prepare(config, 6, resume=newest.path)
        assert (prepared.step, prepared.lineage) == (newest.step, newest.lineage) == (1, LINEAGE)
        assert resumed.staging.read_bytes() == weights
        trained = await resumed.train(1, [group([0.0, 1.0])])
        assert trained.saved.step is None
        with pytest.raises(ChildFailed, match="step 5 does not follow the 2 steps taken"):
            await resumed.train(5, [group([0.0, 1.0])])
    finally:
        await resumed.stop()
