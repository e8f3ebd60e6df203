"""What a user may set, and the one line that says what is wrong with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import UserError
from swarm.sampler.engine import EngineOptions
from swarm.settings import JoinConfig, LeadConfig, headings, sections
from swarm.settings_file import as_toml, line_of, load_config, read_settings


def fault(kind: type[LeadConfig | JoinConfig], file: Path | None = None, **flags: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_config(kind, file, flags)
    line = str(caught.value)
    assert line
    assert "\n" not in line
    return line


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "swarm.toml"


def test_a_flag_overrides_the_file_and_a_flag_not_given_does_not(file: Path) -> None:
    file.write_text("[learn]\nsteps = 7\nseed = 3\n")
    config = load_config(LeadConfig, file, {"steps": 9, "seed": None})
    assert (config.steps, config.seed) == (9, 3)


@pytest.mark.parametrize("name", ["dashboard", "public_page"])
def test_a_page_has_an_address_or_is_off(name: str) -> None:
    for given in ("[::1]:8080", "off"):
        assert load_config(LeadConfig, None, {name: given}).model_dump()[name] == given
    for wrong in ("8080", "here:x", ":1"):
        assert "give HOST:PORT, such as 127.0.0.1:0, or off" in fault(LeadConfig, None, **{name: wrong})


def test_an_unknown_setting_is_refused_with_the_one_that_was_meant_or_all(file: Path) -> None:
    file.write_text("# mine\n[swarm]\nmax_stalenes = 2\n")
    said = f"{file}, line 3: swarm.max_stalenes is no setting: did you mean max_staleness, in [swarm]?"
    assert fault(LeadConfig, file) == said
    file.write_text("[eval]\nquux = 2\n")
    assert fault(LeadConfig, file).endswith("known: target, eval_every_steps, eval_prompts, eval_samples")
    file.write_text("[quuxes]\nred = 2\n")
    assert "line 1: quuxes is no setting; known: [model], [task], [learn], " in fault(LeadConfig, file)


def test_a_setting_outside_its_section_is_told_the_right_one(file: Path) -> None:
    for text, line, name, section in (
        ("max_staleness = 4\n", 1, "max_staleness", "swarm"),
        ("[learn]\nmax_staleness = 4\n", 2, "max_staleness", "swarm"),
        ("[rewards]\nnumeric = 1.0\n", 1, "rewards", "task"),
    ):
        file.write_text(text)
        said = f"{file}, line {line}: {name} belongs in [{section}]: write [{section}] {name} = ..."
        assert fault(LeadConfig, file) == said


def test_every_setting_has_one_section_and_what_is_written_is_read_back(file: Path) -> None:
    for kind in (LeadConfig, JoinConfig):
        assert sections(kind).keys() == kind.model_fields.keys()
        assert len(headings(kind)) <= 9
    written = {"steps": 7, "rewards": {"numeric": 1.0}, "stop": ["\n"], "chat": False, "model": "x"}
    file.write_text(as_toml(LeadConfig, written))
    assert read_settings(LeadConfig, file) == written


def test_a_bad_value_of_a_file_is_named_with_file_key_and_line(file: Path) -> None:
    file.write_text('[task]\ntask = "copy"\n[learn]\nsteps = 0\n[task.rewards]\nexact = "much"\n')
    assert fault(LeadConfig, file) == (
        f"{file}, line 4: learn.steps = 0: input should be greater than or equal to 1; "
        "line 6: task.rewards.exact = 'much': input should be a valid number, unable to parse string as a number"
    )
    assert fault(LeadConfig, file, steps=-1).startswith(f"{file}, line 6: task.rewards.exact")
    assert fault(LeadConfig, file, steps=-1).endswith("--steps -1: input should be greater than or equal to 1")


@pytest.mark.parametrize(
    ("place", "line"),
    [
        (("steps",), 2),
        (("stop", 1), 3),
        (("quoted key",), 6),
        (("chat", "on"), 9),
        (("net", "far", "a"), 10),
        (("more", "net", "b"), 13),
        (("more", "net", "missing"), 11),
        (("fleet", 0, "name"), 15),
        (("fleet", 1, "name"), 18),
        (("fleet", 1, "price"), 17),
        (("fleet", 1, "line", "up"), 20),
        (("nowhere",), 0),
    ],
)
def test_the_line_of_a_key_is_found_in_tables_lists_and_dotted_keys(place: tuple[str | int, ...], line: int) -> None:
    text = """# steps = 9
steps = 1
stop = [
  "a = 1",
  "b"]
"quoted key" = '''
steps = 3
[fleet]'''
chat = { on = 1 }
net.far.a = 1
[more.net]

b = 2
[[fleet]]
name = "x"

[[fleet]]
name = "y"
[fleet.line]
up = 1
"""
    assert line_of(text, place) == line


OUT_OF_RANGE: dict[type[LeadConfig | JoinConfig], dict[str, list[Any]]] = {
    LeadConfig: {
        **{"max_staleness": [-1], "publish_every_steps": [0], "steps": [0], "port": [65_536, "seven", "a\nb"]},
        **{"group_size": [1], "temperature": [0.0, math.nan], "learning_rate": [-1.0], "target": [1.5], "seed": [-1]},
        **{"beat_s": [math.inf], "cost_per_hour": [-1.0, math.nan, 2e6], "traffic_cost_per_gb": [-1.0, math.inf]},
        **{"adapter": [0], "trainer_machines": [2, "2", "2@nowhere", "10.0.0.1:29500"]},
    },
    JoinConfig: {
        **{"engine": ["sglang"], "precision": ["int2"], "tensor_parallel_size": [0, 65], "max_model_len": [15]},
        **{"gpu_memory_share": [0.0, 1.1], "role": ["king"]},
    },
}


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [(kind, name, value) for kind, own in OUT_OF_RANGE.items() for name, values in own.items() for value in values],
)
def test_a_value_out_of_range_names_its_flag(kind: type[LeadConfig | JoinConfig], setting: str, value: object) -> None:
    given: dict[str, Any] = {setting: value} | ({"bootstrap": "127.0.0.1"} if kind is JoinConfig else {})
    assert fault(kind, **given).startswith("--" + setting.replace("_", "-"))


def test_a_setting_that_has_to_be_given_is_named_as_its_flag() -> None:
    assert fault(JoinConfig) == "--bootstrap has to be given"
    both = fault(LeadConfig, adapter=8, trainer_ranks=2)
    assert "an adapter is trained by one rank: leave --trainer-ranks" in both
    assert load_config(LeadConfig, None, {"trainer_machines": "2@10.0.0.1:29500"})


def test_a_file_that_is_missing_or_broken_is_named(file: Path) -> None:
    assert str(file) in fault(LeadConfig, file)
    for content in (b"steps = = 3\n", b"model = '\xff'\n", b"steps = 1\nsteps = 2\n"):
        file.write_bytes(content)
        assert f"{file} is not valid TOML" in fault(LeadConfig, file)


def test_a_real_model_without_a_task_is_asked_for_one(file: Path) -> None:
    """It would learn to copy digits otherwise."""
    model = "Qwen/Qwen3-0.6B"
    file.write_text(f'[model]\nmodel = "{model}"\n')
    for line in (fault(LeadConfig, model=model), fault(LeadConfig, file)):
        assert line.startswith(f"what is {model} to learn? Say it with --task ")
        assert [line.count(f"--task {kind}:") for kind in ("jsonl", "hf")] == [1, 1]
        assert line.count("--task gym:leg_counting") == 1
    file.write_text('[task]\ntask = "copy"\n')
    assert load_config(LeadConfig, file, {"model": model}).task == "copy"
    assert {load_config(LeadConfig, None, {"model": tiny}).task for tiny in ("tiny", "tiny-warm")} == {"copy"}


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        ({}, 1e-3),
        ({"model": "some/model", "task": "copy"}, 1e-6),
        ({"model": "tiny-warm"}, 3e-4),
        ({"model": "tiny-warm", "adapter": 8}, 3e-3),
        ({"adapter": 8, "learning_rate": 0.5}, 0.5),
    ],
)
def test_the_learning_rate_suits_the_model_unless_it_is_given(given: dict[str, Any], rate: float) -> None:
    assert load_config(LeadConfig, None, given).resolved_learning_rate == rate


def test_an_engine_is_chosen_unless_one_is_named_and_gets_its_options(file: Path) -> None:
    plain = load_config(JoinConfig, None, {"bootstrap": "127.0.0.1"})
    assert (plain.engine, plain.engine_options) == ("auto", EngineOptions())
    file.write_text(
        '[swarm]\nbootstrap = "127.0.0.1"\n[engine]\nengine = "vllm"\nmax_model_len = 4096\n'
        "[engine.engine_arguments]\nblock_size = 32\n"
    )
    options: dict[str, Any] = {"tensor_parallel_size": 2, "gpu_memory_share": 0.5}
    kept: dict[str, Any] = {**options, "max_model_len": 4096, "arguments": {"block_size": 32}}
    asked = load_config(JoinConfig, file, {**options, "precision": "bfloat16"}).engine_options
    assert asked == EngineOptions(**kept, dtype="bfloat16")
    rounded = load_config(JoinConfig, file, {**options, "precision": "int8"}).engine_options
    assert rounded == EngineOptions(**kept, precision="int8")


QUESTIONS = {"task": "jsonl:x"}


@pytest.mark.parametrize(
    ("kind", "ignored", "changed", "words"),
    [
        (LeadConfig, {"lenient": True, "task": "gym:x"}, QUESTIONS, "rewards of their own"),
        (LeadConfig, {"rewards": {"exact": 1.0}}, QUESTIONS, "rewards of their own"),
        (LeadConfig, {"columns": ("x", "y"), "task": "frozen-lake"}, {"task": "hf:x"}, "questions"),
        (LeadConfig, {"task_options": {"a": 1}}, {"task": "gym:x"}, "a task gym:NAME"),
        (LeadConfig, {"max_turns": 3}, {"task": "python:x:Y"}, "a task of several turns"),
        (LeadConfig, {"max_turns": 3, **QUESTIONS}, {"task": "frozen-lake"}, "turns"),
        (LeadConfig, {"turn_discount": 0.5}, {"credit": "turn", "task": "frozen-lake"}, "credit"),
        (LeadConfig, {"system_prompt": "Go", "chat": False}, {"chat": None}, "in a chat"),
        (LeadConfig, {"clip": (0.1, 0.1), "objective": "tis"}, {"objective": "cispo"}, "that clips"),
        (LeadConfig, {"base_precision": "nf4"}, {"adapter": 8}, "give a rank with --adapter"),
        (JoinConfig, {"batch_samples": 2, "role": "relay"}, {"role": "sampler"}, "--role sampler"),
        (JoinConfig, {"base": "x", "role": "relay"}, {"role": "sampler"}, "--role sampler"),
        (JoinConfig, {"tensor_parallel_size": 2, "engine": "mlx"}, {"engine": "auto"}, "--engine vllm"),
        (JoinConfig, {"engine_arguments": {"a": 1}}, {"engine": "vllm"}, 'engine = "vllm"'),
        (JoinConfig, {"gpu_memory_share": 0.5, "engine": "transformers"}, {"engine": "auto"}, "vllm or mlx"),
    ],
)
def test_a_setting_that_would_have_no_effect_is_refused(
    kind: type[LeadConfig | JoinConfig], ignored: dict[str, Any], changed: dict[str, Any], words: str
) -> None:
    """What is changed beside it lets it have one."""
    there: dict[str, Any] = {"bootstrap": ("127.0.0.1",)} if kind is JoinConfig else {}
    line = fault(kind, **there, **ignored)
    name = next(iter(ignored))
    assert line.startswith((name, f"--{name.replace('_', '-')}"))
    assert "has no effect here, only " in line
    assert words in line
    assert load_config(kind, None, {**there, **ignored, **changed})
    resumed = kind(**there).model_dump()
    assert kind(**resumed), "what is at its default was not asked for"


def test_arguments_of_vllm_have_names_that_it_could_have() -> None:
    flags: dict[str, Any] = {"bootstrap": "127.0.0.1", "engine_arguments": {"block_size": 32}}
    flags["engine"] = "vllm"
    assert "write block_size for --block-size" in fault(JoinConfig, **{**flags, "engine_arguments": {"--a": 1}})


def test_every_option_of_an_engine_is_in_the_guide_for_owners_of_gpus() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    asked = {"arguments": "engine_arguments", "places": "batch_samples"}
    fields = set(EngineOptions.__struct_fields__) - {"sample_tokens", "hang_s", "dtype"}
    names = [asked.get(name, name) for name in fields]
    assert [n for n in names if n not in guide and f"--{n.replace('_', '-')}" not in guide] == []
