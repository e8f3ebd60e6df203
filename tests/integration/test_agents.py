"""Agents in their own process, against the real endpoint: the official client and two frameworks, unchanged, and what
an agent may not do. What is drawn is the test's."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from array import array
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from swarm.errors import UserError
from swarm.inference.episodes import ExternalEpisodes
from swarm.inference.server import ADDRESS, Endpoint, serving
from swarm.rollout.plane.effects import StepWanted
from swarm.tasks import programs
from swarm.tasks.base import TaskOptions
from swarm.tasks.programs import ProgramBegin, ProgramRuns, agent_task
from swarm.types import GroupId, Observed, Prompt, Rollout, SamplingRules, Unscored
from tests.chats import CONTROLS, end_of, tokenizer_of, turn_text
from tests.integration.processes import run_command

pytestmark = pytest.mark.integration

NAME = "qwen2_5"
RULES = SamplingRules(temperature=1.0, max_new_tokens=64, stop_token_ids=(end_of(NAME),))
AGENTS = Path(__file__).with_name("players.py")
EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"

Draw = Callable[[str], str]
"""What the model says after all that it has read."""


class Swarm:
    """An endpoint, and what plays the agents of tests/integration/players.py."""

    def __init__(self, endpoint: Endpoint, place: Any, directory: Path) -> None:
        self._endpoint, self._place, self.directory = endpoint, place, directory
        self.runs: list[ProgramRuns] = []

    async def playing(self, function: str, **options: Any) -> str:
        """Have this agent play from now on. Return what is said about its limits."""
        file = shutil.copy(AGENTS, self.directory / "players.py")
        begin = ProgramBegin(what=f"{file}:{function}", url=self._place.url, socket=self._place.socket, **options)
        runs = ProgramRuns("swarm.tasks.agent_child", begin, self._endpoint.key_of, self.directory / "log")
        self.runs.append(runs)
        self._endpoint.episodes = ExternalEpisodes(runs.run, turn_text(NAME))
        return await runs.begin()

    async def play(self, draw: Draw, number: int = 4) -> tuple[Observed | Unscored, dict[int, str]]:
        """Play an episode as the plane does. Return its end, and the text of each stream."""
        assert self._endpoint.episodes is not None
        prompt = Prompt(prompt_id=f"train-{number}", text="", answer="")
        wanted = StepWanted(group_id=GroupId(f"t{number}"), index=0, episode=f"t{number}/0.1", prompt=prompt, drawn=())
        streams: dict[int, list[int]] = {}
        while True:
            observed = await self._endpoint.episodes.step(wanted)
            if isinstance(observed, Unscored) or observed.done:
                return observed, {seat: text_of(ids) for seat, ids in streams.items()}
            stream = streams.setdefault(observed.seat, [])
            stream += array("i", observed.token_ids)
            ids = array("i", [*tokenizer_of(()).encode(draw(text_of(stream))).ids, end_of(NAME)])
            stream += ids
            logprobs = array("f", [-0.5] * len(ids)).tobytes()
            turn = Rollout("t", 0, ids.tobytes(), logprobs, (), "stop")
            wanted = StepWanted(
                **{name: getattr(wanted, name) for name in ("group_id", "index", "episode", "prompt")},
                drawn=(b"",),
                newest=turn,
            )


def text_of(ids: list[int]) -> str:
    return str(tokenizer_of(CONTROLS[NAME]).decode(ids, skip_special_tokens=False))


@asynccontextmanager
async def swarm(directory: Path) -> Any:
    endpoint = Endpoint(cast(Any, None), turn_text(NAME), RULES, context=4096)
    async with serving(endpoint, directory) as place:
        found = Swarm(endpoint, place, directory)
        try:
            yield found
        finally:
            for runs in found.runs:
                await runs.close()


def adds(read: str) -> str:
    """A model that calls the tool, spaced as no JSON of ours is, and then says what it returned."""
    if "<tool_response>" not in read:
        return '<tool_call>\n{"name":  "add", "arguments": {"b": 3, "a": 4}}\n</tool_call>'
    return read.rpartition("<tool_response>")[2].strip().partition("\n")[0]


@pytest.mark.parametrize("function", ["plain", "pydantic", "agents_sdk"])
async def test_an_agent_with_a_tool_is_one_conversation(tmp_path: Path, function: str) -> None:
    if function != "plain":
        pytest.importorskip({"pydantic": "pydantic_ai", "agents_sdk": "agents"}[function], reason="not installed")
    async with swarm(tmp_path) as swarmed:
        assert await swarmed.playing(function) == ""
        end, streams = await swarmed.play(adds)
    assert isinstance(end, Observed), end
    total = 1.25 if function == "plain" else 1.0
    assert (end.exact, end.rewards) == (True, (0.0, 1.0 if function == "plain" else total))
    assert "forks" not in end.parts
    assert end.parts.get("messages") == (4.0 if function == "pydantic" else None)
    (stream,) = streams.values()
    assert stream.count('{"name":  "add", "arguments": {"b": 3, "a": 4}}') == 1, "it stays as it was drawn"
    assert stream.endswith("7<|im_end|>")


async def test_answers_side_by_side_are_branches_and_a_seed_is_the_learner_s(tmp_path: Path) -> None:
    answers = iter("abcde")
    async with swarm(tmp_path) as swarmed:
        await swarmed.playing("many")
        end, streams = await swarmed.play(lambda read: next(answers))
    assert isinstance(end, Observed), end
    assert end.parts == {"forks": 3.0, "seeds_ignored": 1.0}
    assert end.rewards == (0.0, *(2.0,) * 4)
    assert [text.count("<|im_start|>assistant") for text in streams.values()].count(2) == 1
    assert "onced<|im_end|>" in streams.values() or "oncec<|im_end|>" in streams.values()


async def test_many_episodes_are_played_side_by_side_in_one_process(tmp_path: Path) -> None:
    async with swarm(tmp_path) as swarmed:
        await swarmed.playing("plain")
        ends = await asyncio.gather(*(swarmed.play(adds, number) for number in range(64)))
    assert sum(isinstance(end, Observed) and end.exact for end, _ in ends) == len(range(4, 64, 7))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", "it raised KeyError: 'where' (.*players.py, line"),
        ("models", "no model 'gpt-5' is trained here"),
        ("plain", "AssertionError"),
        ("gives_up", "CancelledError"),
        ("quotes", "ValueError: bad answer ?"),
        ("returns_nothing", "it returned None"),
    ],
)
async def test_an_agent_that_fails_costs_its_episode_and_says_where(tmp_path: Path, function: str, words: str) -> None:
    async with swarm(tmp_path) as swarmed:
        await swarmed.playing(function)
        end, _ = await swarmed.play(lambda read: "no call")
        assert isinstance(end, Unscored)
        assert words.partition(" (")[0] in end.reason
        assert ("players.py, line" in end.reason) == (function != "returns_nothing")
        again, _ = await swarmed.play(lambda read: "no call", 5)
        assert isinstance(again, Unscored)
        assert "ended" not in again.reason, "its process goes on"


@pytest.mark.parametrize("network", [False, True])
async def test_an_agent_reaches_the_endpoint_alone_unless_the_owner_says_more(tmp_path: Path, network: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        (tmp_path / "port").write_text(str(other.getsockname()[1]))
        async with swarm(tmp_path) as swarmed:
            line = await swarmed.playing("elsewhere", network=network, secrets=(str(tmp_path / ADDRESS),))
            if "no user namespace" in line:
                pytest.skip("this system allows no namespaces")
            end, _ = await swarmed.play(lambda read: "")
    # Nothing was drawn, so nobody is credited; what it found is in the exactness of a reward. Secrets stay hidden.
    assert isinstance(end, Observed), end
    assert (end.exact, end.parts) == (network, {"reached": float(network), "token": 0.0})


async def test_an_agent_that_holds_up_its_process_is_ended_and_another_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "HANG_S", 4.0)
    async with swarm(tmp_path) as swarmed:
        await swarmed.playing("hangs")
        for _ in range(2):
            end, _ = await swarmed.play(adds)
            assert isinstance(end, Unscored)
            assert "made no progress for 4 s" in end.reason


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def play(row, client): ...", "write `async def play"),
        ("async def play(row, client): ...", "has no data"),
        ("import nowhere", "ModuleNotFoundError"),
    ],
)
async def test_an_agent_that_cannot_be_loaded_is_a_line_before_anybody_joins(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "mine.py").write_text(text)
    begin = ProgramBegin(what=f"{tmp_path / 'mine.py'}:play", url="", network=True)
    runs = ProgramRuns("swarm.tasks.agent_child", begin, str, tmp_path / "log")
    try:
        with pytest.raises(UserError, match=words):
            await runs.begin()
    finally:
        await runs.close()


def test_rows_of_data_name_what_is_played(tmp_path: Path) -> None:
    (tmp_path / "play.py").write_text("")
    (tmp_path / "words.jsonl").write_text("".join(json.dumps({"word": f"w{n}", "n": n / 8}) + "\n" for n in range(200)))
    task = agent_task(TaskOptions(name="agent:"), f"{tmp_path}/play.py:play@jsonl:{tmp_path}/words.jsonl")
    trained, held = [task.prompt(n) for n in range(task.size or 0)], task.held_out(1000)
    rows = [json.loads(prompt.row) for prompt in (*trained, *held)]
    assert sorted(row["n"] for row in rows) == [n / 8 for n in range(200)]
    assert not {prompt.prompt_id for prompt in trained} & {prompt.prompt_id for prompt in held}
    assert all("w" not in prompt.text.replace("row", "") and not prompt.answer for prompt in trained)
    assert task.data_digest


@pytest.mark.parametrize(
    ("rest", "words"),
    [("nowhere.py:play", "needs nowhere.py"), ("play.py:play@csv", "jsonl:NAME or hf:NAME")],
)
def test_a_task_that_names_nothing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "play.py").write_text("")
    with pytest.raises(UserError, match=words):
        agent_task(TaskOptions(name=f"agent:{rest}"), rest)
    with pytest.raises(UserError, match="no option colour"):
        agent_task(TaskOptions(name="agent:", task_options={"colour": 1}), "play.py:play")
    monkeypatch.setattr(programs, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="the extra `agents`"):
        agent_task(TaskOptions(name="agent:"), "play.py:play")


@pytest.mark.slow
def test_an_agent_is_tried_before_it_is_trained(tmp_path: Path) -> None:
    """With an engine of this machine alone; four tokens of two calls are as many as it asks for."""
    done = run_command("eval", f"agent:{EXAMPLES}/copy_twice.py:play", "--model", "tiny", "--prompts", "4", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["prompts"], found["reward_failed"], found["tokens_max"]) == (4, 0, 4)


@pytest.mark.long
def test_a_game_of_textarena_is_played(tmp_path: Path) -> None:
    pytest.importorskip("textarena", reason="textarena (with nltk and others) is not installed")
    done = run_command("eval", f"agent:{EXAMPLES}/guess.py:play", "--model", "tiny", "--prompts", "4", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["reward_failed"] == 0


@pytest.mark.long
@pytest.mark.parametrize("function", ["many", "pydantic", "agents_sdk"])
def test_the_official_client_and_frameworks_ask_a_real_model(function: str) -> None:
    """SmolLM2-135M-Instruct: whatever it says, nobody's client stumbles over it."""
    from examples.smollm2 import make_model

    if function != "many":
        pytest.importorskip({"pydantic": "pydantic_ai", "agents_sdk": "agents"}[function], reason="not installed")
    try:
        model = make_model()
    except UserError as fault:
        pytest.skip(f"no package index: {fault}")
    task = f"agent:{AGENTS}:{function}"
    done = run_command(
        "eval", task, "--model", str(model), "--prompts", "3", "--max-new-tokens", "48", "--json", timeout_s=580
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["prompts"], found["reward_failed"]) == (3, 0), done.stderr[-3000:]
    assert found["tokens_mean"] > 1
