"""verifiers 0.4 itself: its environment server plays our taskset through the endpoint, without a network."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer

from swarm.errors import UserError
from swarm.inference.episodes import ExternalEpisodes
from swarm.inference.server import Endpoint, serving
from swarm.rollout.plane.effects import StepWanted
from swarm.tasks.base import SEAT, TaskOptions
from swarm.tasks.programs import ProgramBegin, ProgramRuns, verifiers_task
from swarm.tasks.turns import TurnText
from swarm.types import GroupId, Observed, Prompt, Rollout, SamplingRules, Unscored
from tests.integration.processes import run_command

pytestmark = pytest.mark.integration

TASKSETS = Path(__file__).parents[2] / "examples" / "verifiers"
RULES = SamplingRules(temperature=1.0, max_new_tokens=4, stop_token_ids=(0,))


async def play(played: ExternalEpisodes, prompt: Prompt, answer: Callable[[str], list[int]], of: Tokenizer) -> Any:
    """Play an episode as the plane does: each observation is answered by a turn. Return the last one, and all read."""
    turn, read = None, list[str]()
    while True:
        group = GroupId(prompt.prompt_id)
        wanted = StepWanted(group_id=group, index=0, episode=group, prompt=prompt, drawn=(), newest=turn)
        observed = await played.step(wanted)
        assert not isinstance(observed, Unscored), observed
        if observed.done:
            return observed, read
        read.append(of.decode(list(array("i", observed.token_ids)), skip_special_tokens=False))
        ids = array("i", answer(read[-1]))
        logprobs = array("f", [-0.5] * len(ids)).tobytes()
        turn = Rollout(group_id=group, index=0, token_ids=ids.tobytes(), logprobs=logprobs, spans=(), finish="stop")


@pytest.mark.long
async def test_a_taskset_is_played_through_the_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers", reason="the extra verifiers is not installed")
    from swarm.learner.tiny import tiny_tokenizer

    # Modules are found where the learner was started.
    monkeypatch.chdir(TASKSETS)
    tiny_tokenizer().save_pretrained(tmp_path)
    letters = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    task, text = verifiers_task(TaskOptions(name="verifiers:echo_digits"), "echo_digits"), TurnText(letters, None, (0,))
    endpoint = Endpoint(cast(Any, None), text, RULES, context=512)
    async with serving(endpoint, tmp_path) as place:
        begin = ProgramBegin(what="echo_digits", url=place.url, sampling={"temperature": 1.0, "max_tokens": 4.0})
        runs = ProgramRuns("swarm.tasks.verifiers_child", begin, endpoint.key_of, tmp_path / "log")
        played = endpoint.episodes = ExternalEpisodes(runs.run, text)

        def right(said: str) -> list[int]:
            # With an id that this text would not be tokenised to: it stays as it was drawn.
            return [*letters.encode(said[-2], add_special_tokens=False).ids, 1, 0]

        def wrong(said: str) -> list[int]:
            return letters.encode("=", add_special_tokens=False).ids

        try:
            good, bad, held = await asyncio.gather(
                play(played, task.prompt(3), right, letters),
                play(played, task.prompt(4), wrong, letters),
                play(played, task.held_out(1)[0], right, letters),
            )
        finally:
            await runs.close()
    for (end, read), reward in ((good, 1.0), (bad, 0.0), (held, 1.0)):
        assert end == Observed(
            seat=SEAT, rewards=(0.0, reward), done=True, exact=reward == 1.0, parts={"right": reward}
        )
        # Two turns of one conversation: each observation is what the environment said, and no turn of the model's.
        assert [text[-1] for text in read] == ["=", "="]
        assert len(read[1]) == 2
    assert len({good[1][0], bad[1][0]}) == 2 or good[1][1] != bad[1][1]


@pytest.mark.long
def test_a_taskset_that_is_not_there_ends_the_learner_before_anybody_joins(tmp_path: Path) -> None:
    pytest.importorskip("verifiers", reason="the extra verifiers is not installed")
    place = ("--host", "127.0.0.1", "--port", "0", "--run-dir", str(tmp_path / "run"))
    done = run_command("lead", *place, "--model", "tiny", "--task", "verifiers:no_such")
    assert done.returncode == 2, done.stderr
    assert "echo-node: what plays the episodes cannot be loaded: " in done.stderr.splitlines()[-1]
    assert "'no_such' not found" in done.stderr.splitlines()[-1]


def test_a_lacking_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.tasks.programs.find_spec", lambda name: None)
    with pytest.raises(UserError, match="the extra `verifiers`"):
        verifiers_task(TaskOptions(name="verifiers:x"), "x")


def test_a_task_names_what_is_played_and_is_not_scored_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.tasks.programs.find_spec", lambda name: True)
    task = verifiers_task(TaskOptions(name="verifiers:x"), "x")
    names = [task.prompt(0).prompt_id, task.prompt(1).prompt_id, *(one.prompt_id for one in task.held_out(2))]
    assert names == ["train-0", "train-1", "heldout-0", "heldout-1"]
    played = task.environment()
    for ask in (lambda: task.score(task.prompt(0), ""), lambda: played.reset(0), lambda: played.step("")):
        with pytest.raises(UserError, match="played by a process of its own"):
            ask()
