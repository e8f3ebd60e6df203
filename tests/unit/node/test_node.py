"""What a node keeps on disk, the addresses it understands, and its small pure parts."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from swarm.errors import ChildFailed, ProtocolError, UserError, first_fault
from swarm.join.joining import weights_directory
from swarm.lead.answering import control_seed
from swarm.lead.check import check_model
from swarm.lead.training import train_group
from swarm.node.bootstrap import read_bootstrap
from swarm.node.identity import MAX_GENERATION, StateDirectory, load_or_create_key, next_generation, raise_generation
from swarm.rollout.plane.groups import sample_seed
from swarm.types import GroupId, Score
from tests.builders import ALICE, prompt, ready_group


def test_a_key_is_made_once_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        first = load_or_create_key(tmp_path / "identity")
    finally:
        os.umask(old)
    path = tmp_path / "identity" / "node.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_create_key(tmp_path / "identity").node_id == first.node_id
    assert load_or_create_key(tmp_path / "another").node_id != first.node_id
    path.write_bytes(b"short")
    with pytest.raises(UserError, match="is not a node key"):
        load_or_create_key(tmp_path / "identity")
    assert path.read_bytes() == b"short", "it is not overwritten"


def test_each_start_is_a_new_generation(tmp_path: Path) -> None:
    assert [next_generation(tmp_path / "identity") for _ in range(3)] == [1, 2, 3]
    assert raise_generation(tmp_path / "identity", 9) == 9
    assert raise_generation(tmp_path / "identity", 4) == 9
    assert next_generation(tmp_path / "identity") == 10
    (path,) = (tmp_path / "identity").iterdir()
    assert (path.name, stat.S_IMODE(path.stat().st_mode)) == ("generation", 0o600)


def test_generations_end(tmp_path: Path) -> None:
    assert raise_generation(tmp_path, MAX_GENERATION - 1) == MAX_GENERATION - 1
    assert next_generation(tmp_path) == MAX_GENERATION
    with pytest.raises(UserError, match=r"remove node\.key and generation"):
        next_generation(tmp_path)
    assert raise_generation(tmp_path, 1) == MAX_GENERATION


@pytest.mark.parametrize(
    "content", [b"", b"-1", b"one", b"9" * 6, "\u00b2".encode()], ids=["empty", "minus", "word", "long", "square"]
)
def test_a_file_that_is_no_generation_is_not_overwritten(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "generation").write_bytes(content)
    with pytest.raises(UserError, match="is not a number of starts"):
        next_generation(tmp_path)
    assert (tmp_path / "generation").read_bytes() == content


def test_a_state_directory_has_one_holder_at_a_time(tmp_path: Path) -> None:
    first = StateDirectory.claim(tmp_path / "state")
    with pytest.raises(UserError, match=r"another node uses .*--state-dir"):
        StateDirectory.claim(tmp_path / "state")
    first.release()
    StateDirectory.claim(tmp_path / "state").release()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot use the state directory"):
        StateDirectory.claim(tmp_path / "file")


def test_without_a_wish_a_node_takes_the_next_free_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("swarm.node.identity.MAX_DEFAULT_STATES", 3)
    held = [StateDirectory.claim(None) for _ in range(3)]
    assert [state.path for state in held] == [tmp_path / "echo-node" / f"sampler-{i}" for i in range(3)]
    with pytest.raises(UserError, match="pass --state-dir"):
        StateDirectory.claim(None)
    held[1].release()
    held[1] = StateDirectory.claim(None)
    assert held[1].path.name == "sampler-1"
    for state in held:
        state.release()


@pytest.mark.parametrize(
    ("text", "host", "port", "scheme"),
    [
        ("learner", "learner", 7700, ""),
        ("10.0.0.7:7701", "10.0.0.7", 7701, ""),
        ("http://learner", "learner", 7700, "http"),
        ("https://learner:1/", "learner", 1, "https"),
        ("[::1]:7700", "::1", 7700, ""),
    ],
)
def test_an_address_is_a_host_a_host_and_port_or_a_url(text: str, host: str, port: int, scheme: str) -> None:
    found = read_bootstrap(text)
    assert (found.host, found.port, found.scheme) == (host, port, scheme)


@pytest.mark.parametrize(
    "text", ["", ":7700", "learner:port", "learner:99999", "ftp://learner", "http://", "learner/path", "[::1", "a b"]
)
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match="is not an address like host or host:7700"):
        read_bootstrap(text)


def test_a_path_that_holds_no_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        check_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check_model(str(tmp_path))
    check_model("tiny")
    check_model("Qwen/Qwen3-4B")


def test_the_trainer_gets_every_rollout_with_its_reward_and_its_age() -> None:
    group = ready_group(3, 0, samples=2)
    group.samples[1].score = Score(reward=0.25, exact=False)
    answers = [(sample.rollout, sample.score, ALICE) for sample in group.samples if sample.rollout]
    trained = train_group(group.prompt, answers, 5)
    assert trained.prompt_token_ids == prompt().token_ids
    assert [(r.reward, r.staleness) for r in trained.rollouts] == [(0.5, 2), (0.25, 2)]
    answer = group.samples[0].rollout
    assert answer is not None
    sent = trained.rollouts[0]
    assert sent.sampler == ALICE
    assert (sent.token_ids, sent.logprobs) == (answer.token_ids, answer.logprobs)


def test_the_control_reward_of_a_rollout_depends_on_its_name_alone() -> None:
    """On nothing of the process: a resumed run gives the same rewards."""
    seed = control_seed(7, GroupId("t0"), 0)
    assert seed == 2296641481132332793
    others = [(7, "t0", 1), (7, "t1", 0), (8, "t0", 0)]
    assert seed not in {control_seed(run, GroupId(group), index) for run, group, index in others}
    assert seed != sample_seed(7, GroupId("t0"), 0), "what a sample is drawn from says nothing about its reward"


def test_the_first_plain_fault_of_a_group_is_found() -> None:
    inner = ExceptionGroup("inner", [ChildFailed("first"), ProtocolError("second")])
    assert str(first_fault(ExceptionGroup("outer", [inner, ValueError()]))) == "first"
    assert str(first_fault(ProtocolError("alone"))) == "alone"


def test_only_weights_of_swarms_that_were_left_are_removed(tmp_path: Path) -> None:
    for kept in ("swarms/now", "swarm-photos"):
        (tmp_path / kept).mkdir(parents=True)
    (tmp_path / "swarms" / "before").mkdir()
    assert weights_directory(tmp_path, "now") == tmp_path / "swarms" / "now"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["now", "swarm-photos", "swarms"]
