"""The model of a run as others load it: what is in the directory, and what is refused with one line."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from swarm.cli.runs import export_model as command
from swarm.errors import UserError
from swarm.learner.adapter import targets_of
from swarm.learner.checkpoint.export import export_model
from swarm.learner.checkpoint.files import TENSORS, commit, link_best
from swarm.learner.checkpoint.model_files import save_model
from swarm.learner.messages import Train
from swarm.learner.tiny import tiny_model
from swarm.models.device import as_streamed
from swarm.report.card import model_card
from swarm.report.figures import Figures
from swarm.run.directory import create_run_directory, forked_config, ran_on
from swarm.run.log import RunLog
from swarm.settings import LeadConfig
from swarm.settings_file import load_config
from tests.unit.models import frozen, published
from tests.unit.trainers import group, saved, trainer_in

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}="
IDS = torch.tensor([[1, 3, 4, 5, 13, 3, 4]])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run with checkpoints of steps 2 and 4 and a best model of step 2, and the model; not to be changed."""
    run_dir = tmp_path_factory.mktemp("made") / "run"
    create_run_directory(run_dir, LeadConfig(run_dir=run_dir, groups_per_step=8, system_prompt='say "é"', port=1234))
    trainer = trainer_in(run_dir)
    trainer._tokenizer.chat_template = TEMPLATE
    for step in (2, 4):
        trainer.steps_taken = step
        saved(trainer, run_dir / f"checkpoints/step-{step:06}", step)
    link_best(run_dir / "checkpoints", 2)
    log = RunLog(run_dir)
    for version, exact in [(0, 0.0), (2, 0.75), (4, 0.5)]:
        log.event("evaluated", version=version, exact_match=exact, prompts=8)
    log.event("prepared", step=0, device="cpu", **ran_on())
    log.close()
    return run_dir, trainer._model


@pytest.fixture
def run_dir(made: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(made[0], tmp_path / "run", symlinks=True))


def exported(run_dir: Path, to: Path, **which: Any) -> int:
    return export_model(run_dir, to, lambda step: f"after {step}", **which)


def test_what_is_exported_loads_and_generates(made: tuple[Path, Any], tmp_path: Path) -> None:
    to = tmp_path / "deeper" / "model"
    command(made[0], to)
    model: Any = AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(to)
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=IDS).logits, published(made[1])(input_ids=IDS).logits)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "3141"}], return_tensors="pt", return_dict=False)
    assert tokenizer.decode(chat[0]).startswith("3141=")
    assert model.generate(chat, max_new_tokens=3).shape[1] > chat.shape[1]
    assert GenerationConfig.from_pretrained(to).eos_token_id == made[1].generation_config.eos_token_id
    files = {"README.md", "chat_template.jinja", "model.safetensors"}
    files |= {f"{name}.json" for name in ("config", "generation_config", "tokenizer", "tokenizer_config")}
    assert {path.name for path in to.iterdir()} == files
    assert list(tmp_path.rglob("*.partial")) == []
    assert json.loads((to / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(to).dtype == torch.bfloat16
    # One mode, that of any file that is made here: the checkpoint's own files have one too.
    checkpoint = made[0] / "checkpoints/step-000004"
    (tmp_path / "any").touch()
    modes = {path.stat().st_mode for directory in (to, checkpoint) for path in directory.iterdir()}
    assert modes == {(tmp_path / "any").stat().st_mode}


def test_the_card_says_what_it_is_and_no_address(made: tuple[Path, Any], tmp_path: Path) -> None:
    command(made[0], tmp_path / "model", step=2)
    card = (tmp_path / "model/README.md").read_text()
    assert "| trained for | 2 learner steps |" in card
    assert "| held-out exact_match | 0.75 (version 2) |" in card
    assert f"torch {torch.__version__}" in card
    assert "groups_per_step = 8\n" in card
    assert 'system_prompt = "say \\"é\\""\n' in card
    assert "1234" not in card
    assert str(made[0]) not in card
    assert card.startswith("---\nlibrary_name: transformers\n")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"task": "hf:/data/of/me/sums:main@train"}, {"task": "hf:sums:main@train"}),
        (
            {"task": "jsonl:~/me/sums.jsonl", "model": "/data/me/a:b/base"},
            {"task": "jsonl:sums.jsonl", "model": "base"},
        ),
        ({"task": "hf:sums", "rewards": {"numeric": 1.0, "boxed": 0.1}, "chat_arguments": {"a": True}}, {}),
        ({"max_staleness": 4, "system_prompt": '```\n"x"'}, {}),
        (
            {"task": "hf:sums", "rewards": {"/data/me/judge.py:score": 1.0, "numeric": 0.5}},
            {"rewards": {"judge.py:score": 1.0, "numeric": 0.5}},
        ),
    ],
)
def test_the_settings_of_a_card_are_a_configuration_without_places(
    tmp_path: Path, given: dict[str, Any], shown: dict[str, Any]
) -> None:
    config = LeadConfig(**given, state_dir=Path("/data/me"), advertise="me.example", port=1234)
    card = model_card(Figures(config=config.model_dump(mode="json"), summary=None), 1)
    (toml,) = re.findall(r"```toml\n(.*?)\n```\n", card, re.DOTALL)
    (tmp_path / "lead.toml").write_text(toml)
    assert load_config(LeadConfig, tmp_path / "lead.toml", {}) == LeadConfig(**{**given, **shown})
    assert "me" not in re.findall(r"\w+", card)


def test_a_card_says_what_it_is_for_and_what_was_changed_on_the_way_until_then() -> None:
    config = LeadConfig(about="sums | differences", learning_rate=1e-6).model_dump(mode="json")
    changes = [(83.0, "learning_rate=0.0001"), (90.0, "paused=True"), (120.0, "max_staleness=3")]
    found = Figures(config=config, summary=None, marked={"set": deque(changes)})
    rows = [line for line in model_card(found, 100).splitlines() if line.startswith("| ")]
    assert "| about | sums / differences |" in rows
    assert "| changed while it ran | learning_rate=0.0001 after step 83 |" in rows
    assert "changed while it ran" not in model_card(found, 83)


def test_a_directory_is_not_taken_for_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = Figures(config={"model": "some/base", "task": "copy"}, summary=None)
    assert 'base_model: "some/base"' in model_card(found, 1)
    (tmp_path / "some/base").mkdir(parents=True)
    assert "base_model:" not in model_card(found, 1)


def test_the_card_of_an_adapter_loads_its_base_as_it_was_trained_with() -> None:
    configured = {"model": "some/base", "task": "copy", "adapter": 8, "base_precision": "nf4"}
    found = Figures(config=configured, summary=None)
    (code,) = re.findall(r"```python\n(.*?)\n```\n", model_card(found, 1, alone=True), re.DOTALL)
    compile(code, "card", "exec")
    assert 'from_pretrained("some/base", quantization_config=BitsAndBytesConfig(' in code
    assert "BitsAndBytesConfig" not in model_card(found, 1)


@pytest.mark.parametrize(("which", "step"), [({}, 4), ({"step": 2}, 2), ({"best": True}, 2)])
def test_newest_named_or_best(made: tuple[Path, Any], tmp_path: Path, which: dict[str, Any], step: int) -> None:
    assert exported(made[0], tmp_path / "model", **which) == step
    assert (tmp_path / "model/README.md").read_text() == f"after {step}"
    # A copy of its own: to change it changes nothing of the run.
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "model").iterdir())


def test_large_models_are_exported_with_all_shards_and_their_index(
    made: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, model = made
    partial, directory = tmp_path / "partial", tmp_path / "run/checkpoints/step-000004"
    shutil.copytree(run_dir / "checkpoints/step-000004", partial, ignore=shutil.ignore_patterns("model*", "digests*"))
    tokenizer = AutoTokenizer.from_pretrained(partial)
    whole = type(model).save_pretrained
    monkeypatch.setattr(
        type(model), "save_pretrained", lambda self, to, **given: whole(self, to, max_shard_size="100KB", **given)
    )
    names = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_model(model, tokenizer, partial, {name: as_streamed(tensor) for name, tensor in names.items()})
    directory.parent.mkdir(parents=True)
    commit(partial, directory)
    exported(tmp_path / "run", tmp_path / "model")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=IDS).logits, published(model)(input_ids=IDS).logits)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("damage", [_cut, _flip, os.unlink])
def test_a_torn_checkpoint_is_passed_over_or_refused(
    run_dir: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    damage(run_dir / "checkpoints/step-000004/model.safetensors")
    with pytest.raises(UserError, match=r"step-000004/model.safetensors is (torn|missing)"):
        exported(run_dir, tmp_path / "model", step=4)
    assert not (tmp_path / "model").exists()
    assert exported(run_dir, tmp_path / "model") == 2
    damage(run_dir / "checkpoints/step-000002/config.json")
    with pytest.raises(UserError, match=r"no checkpoint .* is whole"):
        exported(run_dir, tmp_path / "other")
    with pytest.raises(UserError, match=r"step-000002/config.json is (torn|missing)"):
        exported(run_dir, tmp_path / "other", best=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]


def test_a_step_that_is_not_there_is_refused_and_what_the_trainer_alone_needs_may_be_damaged(
    run_dir: Path, tmp_path: Path
) -> None:
    (run_dir / "checkpoints/step-000006").mkdir()
    for step, fault in ((3, "step 3 is not there; .* of: 2, 4"), (6, "step 6 is torn; .* of: 2, 4")):
        with pytest.raises(UserError, match=fault):
            exported(run_dir, tmp_path / "model", step=step)
    _cut(run_dir / "checkpoints/step-000004" / TENSORS)
    assert exported(run_dir, tmp_path / "model") == 4


def test_a_run_without_a_model_is_refused(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    create_run_directory(run_dir, LeadConfig(run_dir=run_dir))
    with pytest.raises(UserError, match="has no checkpoint yet"):
        exported(run_dir, tmp_path / "model")
    with pytest.raises(UserError, match="there is no best model"):
        exported(run_dir, tmp_path / "model", best=True)
    with pytest.raises(UserError, match="is not a run directory"):
        command(tmp_path, tmp_path / "model")
    with pytest.raises(UserError, match="give one of them"):
        command(run_dir, tmp_path / "model", step=1, best=True)


def test_a_target_that_holds_anything_or_that_one_is_in_is_refused(
    made: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    faults = {"full": "not empty", "file": "not a directory", "link": "not a directory", "file/x": "Not a"}
    for name, fault in faults.items():
        with pytest.raises(UserError, match=fault):
            exported(made[0], tmp_path / name)
    (tmp_path / "empty").mkdir()
    with monkeypatch.context() as inside:
        inside.chdir(tmp_path / "empty")
        with pytest.raises(UserError, match="the directory you are in"):
            exported(made[0], tmp_path / "empty")
    assert exported(made[0], tmp_path / "empty") == 4
    assert json.loads((tmp_path / "empty/config.json").read_text())["dtype"] == "bfloat16"


# -- an adapter ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run that trains an adapter of the tiny model, with a checkpoint of step 1, and its model."""
    run_dir = tmp_path_factory.mktemp("adapted") / "run"
    create_run_directory(run_dir, LeadConfig(run_dir=run_dir, adapter=4))
    trainer = trainer_in(run_dir, adapter=4, learning_rate=3e-2)
    trainer.step(Train(step=0, groups=(group([1.0, 0.0, 0.0]), group([0.0, 1.0, 0.5]))))
    saved(trainer, run_dir / "checkpoints/step-000001", 1)
    return run_dir, trainer._model


def test_an_adapter_is_exported_as_peft_loads_it(adapted: tuple[Path, Any], tmp_path: Path) -> None:
    run_dir, model = adapted
    command(run_dir, tmp_path / "adapter")
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    assert names == {"README.md", "adapter_config.json", "adapter_model.safetensors", *tokenizer}
    base: Any = frozen(tiny_model(0))
    with torch.no_grad():
        before = base(input_ids=IDS).logits
        found = PeftModel.from_pretrained(base, tmp_path / "adapter")(input_ids=IDS).logits
        assert torch.equal(found, published(model)(input_ids=IDS).logits)
    assert not torch.allclose(found, before, atol=1e-2)
    card = (tmp_path / "adapter/README.md").read_text()
    assert "library_name: peft" in card
    assert "PeftModel.from_pretrained" in card
    shown = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert shown["target_modules"] == targets_of(tiny_model(0))


def test_a_merged_adapter_is_a_model_as_any_other(adapted: tuple[Path, Any], tmp_path: Path) -> None:
    run_dir, model = adapted
    command(run_dir, tmp_path / "merged", merge=True)
    assert not any("adapter" in path.name for path in (tmp_path / "merged").iterdir())
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        found, wanted = loaded.eval()(input_ids=IDS).logits, published(model)(input_ids=IDS).logits
        before = frozen(tiny_model(0))(input_ids=IDS).logits
    # W + B A is rounded to bf16 once more.
    assert (found - wanted).abs().max() < 0.1 * (wanted - before).abs().max()
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")("12=").input_ids


def test_a_run_begins_with_a_merged_adapter(adapted: tuple[Path, Any], tmp_path: Path) -> None:
    config, origin = forked_config(adapted[0], {"run_dir": tmp_path / "fork"})
    create_run_directory(tmp_path / "fork", config, origin)
    assert (tmp_path / "fork/base/model.safetensors").is_file()
    assert config.adapter == 4
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "fork/base").dtype == torch.bfloat16


def test_an_adapter_is_not_merged_into_another_model(adapted: tuple[Path, Any], tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(adapted[0], tmp_path / "run"))
    config = run_dir / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "seed": 1}))
    with pytest.raises(UserError, match="is not the model that this adapter was trained with"):
        command(run_dir, tmp_path / "merged", merge=True)
    assert not (tmp_path / "merged").exists()
