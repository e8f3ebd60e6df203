"""Episodes in a process: many at once give what each gives alone, whatever is forgotten meanwhile."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from datetime import datetime
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from swarm.environments.base import Environment, Messages, Step
from swarm.tasks import reward_child
from swarm.tasks.base import RewardKind, TaskOptions
from swarm.tasks.episodes import EnvironmentTask
from swarm.tasks.reward_child import BeginRewards, Episodes, ScoredEpisode, StepCall, one_line
from swarm.tasks.turns import TurnText
from swarm.types import MAX_TOKENS, Observed, Prompt
from tests.integration.odd_environment import OddEnvironment

MAX_TURNS = 4
WORDS = "0123456789="
Turns = tuple[bytes, ...]
TOKENIZER = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="="))
TOKENIZER.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
TOKENIZER.decoder = decoders.Fuse()
TEXT = TurnText(TOKENIZER, None, ())
TASK = EnvironmentTask(TaskOptions(name="odd"), OddEnvironment)
PROMPTS = [TASK.prompt(index) for index in range(4)]


def tokens(text: str) -> bytes:
    return array("i", map(WORDS.index, text)).tobytes()


def words(observed: Observed) -> str:
    return "".join(WORDS[i] for i in array("i", observed.token_ids))


def opened(reward: RewardKind = "task") -> Episodes:
    begin = BeginRewards(task=TaskOptions(name="odd"), reward=reward, tokenizer="tokenizer.json")
    return Episodes(begin, datetime(2026, 1, 1), TASK, TOKENIZER)


def asked(name: int, drawn: Turns) -> StepCall:
    return StepCall(episode=f"episode {name}", prompt=PROMPTS[name], seed=name, drawn=drawn)


def played_alone(name: int, drawn: Turns, reward: RewardKind = "task") -> list[Observed]:
    """What is said to each of these turns, up to the end."""
    episodes, found = opened(reward), list[Observed]()
    while len(found) < len(drawn) and not (found and found[-1].done):
        found.append(episodes.answer(asked(name, drawn[: len(found) + 1])))
    return found


turns = st.one_of(st.text("0123456789", max_size=3), st.just("==")).map(tokens)


@settings(max_examples=100, deadline=None)
@given(
    drawn=st.lists(st.lists(turns, max_size=MAX_TURNS + 1).map(tuple), min_size=4, max_size=4),
    order=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40),
    most=st.integers(1, 4),
    reward=st.sampled_from(["task", "random"]),
)
def test_any_order_of_steps_gives_what_each_episode_gives_alone(
    drawn: list[Turns], order: list[tuple[int, bool]], most: int, reward: RewardKind
) -> None:
    """Begins without a turn, evictions, and processes that began anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reward_child, "MAX_LIVE", most)
        episodes = opened(reward)
        seen: list[list[Observed]] = [[] for _ in drawn]
        for name, begins in order:
            answered = len(seen[name])
            if answered == len(drawn[name]) or (answered and seen[name][-1].done):
                episodes = opened(reward)
                continue
            if begins and not answered:
                assert episodes.answer(asked(name, ())) == Observed()
            seen[name].append(episodes.answer(asked(name, drawn[name][: answered + 1])))
            assert len(episodes.live) <= most
    for name, observed in enumerate(seen):
        assert observed == played_alone(name, drawn[name], reward)[: len(observed)]


def test_a_turn_is_not_played_again_as_long_as_the_process_has_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_child, "MAX_LIVE", 2)
    resets: list[int] = []
    reset = OddEnvironment.reset

    def counted(self: OddEnvironment, seed: int) -> Messages:
        resets.append(seed)
        return reset(self, seed)

    monkeypatch.setattr(OddEnvironment, "reset", counted)
    episodes = opened()
    for name in (0, 1, 0):
        episodes.answer(asked(name, ()))
    for number in range(3):
        episodes.answer(asked(0, (tokens("1"),) * (number + 1)))
    assert len(resets) == 2
    episodes.answer(asked(2, ()))
    episodes.answer(asked(0, (tokens("1"),) * 4))
    assert len(resets) == 3, "the one that was not asked for the longest made room"
    episodes.answer(asked(1, (tokens("1"),)))
    assert len(resets) == 4


def test_each_player_reads_its_own_stream() -> None:
    """A player that comes to its first turn reads an opening, afterwards what follows its own last turn."""
    read: list[tuple[str, object]] = []

    class Recorded(TurnText):
        def opening(self, messages: Any, tools: Any = ()) -> list[int]:
            read.append(("opening", messages[0][1]))
            return super().opening(messages)

        def reply(self, drawn: Sequence[int], messages: Any) -> list[int]:
            read.append((self.text_of(drawn), messages[0][1]))
            return super().reply(drawn, messages)

    episode = ScoredEpisode(OddEnvironment(), Recorded(TOKENIZER, None, ()), PROMPTS[0])
    total = int(PROMPTS[0].text[:-1])
    odd = "1" if total % 2 == 0 else "2"
    first = episode.step(tokens(odd))
    assert (first.seat, words(first)) == (1, f"={total + int(odd)}=")
    assert episode.step(tokens("2")).seat == 1
    assert episode.step(tokens("1")).seat == 0
    assert [who for who, _ in read] == ["opening", "2", odd]


def test_figures_are_summed_over_the_episode_and_rewards_are_of_a_turn() -> None:
    first, second, last = played_alone(0, tuple(map(tokens, ("12", "3", "=="))))
    assert [dict(one.parts) for one in (first, second, last)] == [{"digits": 2.0}, {"digits": 3.0}, {"digits": 3.0}]
    assert [one.rewards[0] for one in (first, second, last)] == [0.5, 0.25, 1.0]
    total = int(PROMPTS[0].text[:-1]) + 6
    assert (last.done, last.exact, last.token_ids) == (True, total % 3 == 0, b"")


def test_the_control_rewards_the_first_turn_with_a_number_that_depends_on_the_seed_alone() -> None:
    """Otherwise whoever ends an episode early, at a limit of tokens or by saying nothing, would learn from it."""
    one = played_alone(0, (tokens("1"), tokens("2"), tokens("==")), "random")
    other = played_alone(0, (tokens("=="),), "random")
    assert one[0].rewards == other[0].rewards
    assert 0 < one[0].rewards[0] < 1
    assert [observed.rewards for observed in one[1:]] == [(0.0,), (0.0,)]
    assert played_alone(1, (tokens("1"),), "random")[0].rewards != one[0].rewards


class Given(Environment):
    """Gives what it is given."""

    name = description = "given"
    max_turns = 2
    seats = 2

    def __init__(self, step: Step) -> None:
        self._step = step

    def reset(self, seed: int) -> Messages:
        return [("user", str(seed))]

    def step(self, text: str) -> Step:
        return self._step


SAID = [("user", "1")]
WRONG: list[tuple[Any, str]] = [
    (Step(messages=SAID, rewards=(0.0,) * 3), "ValueError: a Step of 2 players has 3 rewards and seat 0 next"),
    (Step(messages=SAID, seat=-1), "ValueError: a Step of 2 players has 1 rewards and seat -1 next"),
    (Step(messages=SAID, rewards=(0.0, float("inf"))), "ValueError: reward 2 is inf, which is not a finite number"),
    (Step(messages=SAID, parts={"x": float("nan")}), "ValueError: x is nan, which is not a finite number"),
    (Step(messages=SAID, parts={str(i): 0 for i in range(17)}), "ValueError: a reward has 17 parts"),
    (Step(messages=cast("Any", [("user", 1)])), "TypeError: messages are (role, content) pairs"),
    (Step(), "ValueError: the messages for seat 0 have 0 tokens, not 1 to"),
    (Step(messages=[("user", "1" * (MAX_TOKENS + 1))]), f"ValueError: the messages for seat 0 have {MAX_TOKENS + 1}"),
    ("odd", "TypeError: step() gives a Step, not a str"),
]


@pytest.mark.parametrize(("step", "reason"), WRONG)
def test_an_answer_that_is_none_is_told(step: Step, reason: str) -> None:
    prompt = Prompt(prompt_id="episode-5", text="5", answer="", messages=(("user", "5"),))
    episode = ScoredEpisode(Given(step), TEXT, prompt)
    with pytest.raises((ValueError, TypeError)) as raised:
        episode.step(tokens("1"))
    assert one_line(raised.value).startswith(reason)
    other = msgspec.structs.replace(prompt, messages=(("user", "6"),))
    with pytest.raises(ValueError, match="other messages for the same seed"):
        ScoredEpisode(Given(step), TEXT, other)


def test_an_episode_that_failed_is_forgotten() -> None:
    episodes = opened()
    with pytest.raises(ValueError, match="this environment"):
        episodes.answer(asked(0, (tokens("1"), tokens("=0"))))
    assert not episodes.live


def test_a_step_that_is_asked_for_again_is_answered_as_before() -> None:
    """Its first answer may have been lost with who waited for it."""
    episodes, twice = opened(), asked(0, (tokens("1"), tokens("2")))
    assert [episodes.answer(twice), episodes.answer(twice)] == played_alone(0, twice.drawn)[1:] * 2


def test_an_environment_that_ends_earlier_when_it_is_played_again_is_a_fault() -> None:
    """So it is no pure function of its seed and of what was said."""
    with pytest.raises(ValueError, match="step\\(\\) ends an episode that went on"):
        opened().answer(asked(0, (tokens("=="),) * 2))


def test_each_turn_that_is_played_again_is_progress() -> None:
    """So that each has its own time limit."""
    told: list[None] = []
    opened().answer(asked(0, (tokens("1"),) * 5), lambda: told.append(None))
    assert len(told) == 4
