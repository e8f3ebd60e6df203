"""A run that learns nothing says so: when, why it may be, and three completions to look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from swarm.lead.signal import (
    EVENT_CHARACTERS,
    FLAT_GROUPS,
    FLAT_STEPS,
    FLOOR_STEPS,
    GROUPS_READ,
    SAMPLES_READ,
    SAY_AGAIN_STEPS,
    TOKENS_READ,
    AlarmLog,
    Answer,
    LearningSignal,
    cut,
    likely_causes,
    rewards_failed,
)
from swarm.learner.messages import Alarm
from swarm.rollout.plane.groups import Group, Sample
from swarm.types import GroupId, Score
from tests.builders import RULES, STOP, prompt, rollout, v

FLAT = {"frac_reward_zero_std": 1.0}


def group(rewards: Sequence[float], tokens: Sequence[int] = (3, 4, STOP), *, exact: bool = False) -> Group:
    samples = [
        Sample(
            seed=index,
            rollout=rollout(index=index, tokens=tokens),
            score=Score(reward=reward, exact=exact, parts={"exact": reward}),
        )
        for index, reward in enumerate(rewards)
    ]
    return Group(
        group_id=GroupId("t0"),
        order=0,
        purpose="train",
        prompt=prompt(),
        rules=RULES,
        min_version=v(0),
        bound=0,
        samples=samples,
    )


def new_signal() -> LearningSignal:
    return LearningSignal(lambda ids: "".join(chr(94 + token) for token in ids), 8)


def answer(completion: str = "no", **values: Any) -> Answer:
    given: dict[str, Any] = {"reward": 0.0, "exact": False, "tokens": 2, "truncated": False, "parts": {"exact": 0.0}}
    return Answer(prompt="2+2=", wanted="4", completion=completion, **{**given, **values})


def test_steps_without_variance_go_off_after_some_of_them() -> None:
    signal, batch = new_signal(), [group([0.0, 0.0])] * FLAT_GROUPS
    for _ in range(FLAT_STEPS - 1):
        assert signal.stepped(batch, FLAT) is None
    alarm = signal.stepped(batch, FLAT)
    assert alarm is not None
    assert (alarm.kind, alarm.reaction, alarm.value) == ("no_variance", "none", FLAT_STEPS)
    assert "no group of the last 5 steps had two different rewards" in alarm.text
    assert signal.stepped(batch, {"frac_reward_zero_std": 0.99}) is None
    assert signal.stepped(batch, FLAT) is None, "one group that teaches begins the count again"


def test_of_small_batches_more_steps_are_waited_for() -> None:
    signal = new_signal()
    raised = [signal.stepped([group([1.0, 1.0])], FLAT) is not None for _ in range(FLAT_GROUPS)]
    assert raised == [False] * (FLAT_GROUPS - 1) + [True]


@pytest.mark.parametrize(("low", "high", "kind"), [(199, 1, "reward_floor"), (190, 10, None)])
def test_rewards_at_their_lowest_go_off(low: int, high: int, kind: str | None) -> None:
    signal, batch = new_signal(), [group([-1.0] * low + [0.5] * high)]
    raised = [signal.stepped(batch, {"frac_reward_zero_std": 0.5}) for _ in range(FLOOR_STEPS)]
    assert raised[:-1] == [None] * (FLOOR_STEPS - 1)
    assert (raised[-1].kind if raised[-1] else None) == kind


def test_rewards_that_were_lower_before_are_not_at_their_lowest() -> None:
    signal = new_signal()
    signal.stepped([group([-1.0, 0.0])], {})
    assert [signal.stepped([group([0.0] * 200)], {}) for _ in range(2 * FLOOR_STEPS)] == [None] * 2 * FLOOR_STEPS


def test_the_lowest_reward_of_solved_completions_is_no_floor() -> None:
    signal = new_signal()
    batch = [group([1.0] * 200, exact=True)]
    assert [signal.stepped(batch, {}) for _ in range(2 * FLOOR_STEPS)] == [None] * 2 * FLOOR_STEPS


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (
            [answer(truncated=True), answer("so", truncated=True)],
            ["100% end at the limit of 8 tokens: raise --max-new"],
        ),
        ([answer(" "), answer("<think>4")], ["100% say nothing, or nothing after their thoughts"]),
        ([answer("The answer is 4."), answer("four")], ["50% hold the wanted answer and are not right"]),
        ([answer(parts={"exact": 0.0, "boxed": 0.0}), answer("x")], ["0 for all of them: exact, boxed; say in"]),
        ([answer("a"), answer("a")], ["the completions of a prompt are all the same: raise temperature"]),
        ([answer("a", exact=True), answer("b", exact=True)], ["all of them are solved"]),
        ([answer("a", reward=0.5), answer("b", reward=0.5)], ["all of them get 0.5: the reward may not look at"]),
        ([answer("14"), answer("b4")], ["they end by themselves and are wrong"]),
        (
            [answer("4 or", truncated=True), answer("4, so", truncated=True)],
            ["100% end at the limit", "100% hold the wanted answer"],
        ),
    ],
)
def test_causes_follow_from_the_completions(answers: list[Answer], words: list[str]) -> None:
    found = likely_causes([answers], 8)
    assert len(found) == len(words), found
    for cause, wanted in zip(found, words, strict=True):
        assert cause.startswith(wanted)


def test_the_best_and_the_worst_completions_are_shown() -> None:
    batch = [group(rewards, (3, 4)) for rewards in ([0.0, 0.0], [0.0, 1.0], [0.5, 0.25])]
    causes, shown = new_signal().explain(batch)
    assert [one.reward for one in shown] == [1.0, 0.0, 0.0]
    assert {one.completion for one in shown} == {"ab"}
    assert causes[0].startswith("the completions of a prompt are all the same")


def test_few_tokens_of_few_completions_are_decoded() -> None:
    decoded: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return ""

    signal = LearningSignal(decode, 8)
    signal.explain([group([0.0] * 9, range(3, 3 + 5 * TOKENS_READ))] * 100)
    assert sum(decoded) <= 2 * TOKENS_READ * GROUPS_READ * SAMPLES_READ
    assert max(decoded) == TOKENS_READ


def test_an_alarm_that_lasts_is_told_now_and_then_with_causes_and_completions() -> None:
    events: list[dict[str, Any]] = []
    said: list[str] = []
    log = AlarmLog(emit=lambda kind, **fields: events.append({"kind": kind, **fields}), say=said.append)
    alarm = Alarm(kind="no_variance", reaction="none", value=5.0, limit=5.0, text="nothing was learned")
    hostile = answer("\x1b[31m\u202e" + "long " * 1000)
    for step in range(5, 6 + SAY_AGAIN_STEPS):
        log.explained(alarm, lambda: (["too short"], [hostile, answer(), answer()]), step=step)
    assert [event["step"] for event in events] == [5, 5 + SAY_AGAIN_STEPS]
    assert events[0]["causes"] == ["too short"]
    assert [len(one["completion"]) <= EVENT_CHARACTERS + 5 for one in events[0]["completions"]] == [True] * 3
    assert events[0]["completions"][1]["wanted"] == "4"
    assert said[:2] == ["step 5: alarm no_variance (5, limit 5): nothing was learned", "  likely: too short"]
    assert said[3] == "  reward 0 for 'no', asked '2+2='"
    assert all(line.isprintable() and len(line) < 300 for line in said)
    assert log.last is not None
    assert (log.last["causes"], log.last["text"]) == (["too short"], "nothing was learned")
    assert "completions" not in log.last, "status is for everybody, and only the reward sees the wanted answer"
    assert not log.stopped_by


def test_a_text_that_is_cut_keeps_both_ends() -> None:
    assert cut("abc", 4) == "abc"
    assert cut("abcdefgh", 4) == "ab ... gh"


def test_rewards_that_fail_now_and_then_are_an_alarm() -> None:
    assert rewards_failed(0.01, "it hung") is None
    alarm = rewards_failed(0.02, "it hung")
    assert alarm is not None
    assert (alarm.kind, alarm.reaction) == ("reward_failed", "none")
    assert alarm.text.startswith("2.0% of the rewards failed")
    assert alarm.text.endswith("Last: it hung")
