"""When a learner step is wrong, and what is done about it: the rules alone, and on the tiny model."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec import structs

from swarm.lead.signal import SAY_AGAIN_STEPS, AlarmLog
from swarm.learner.alarms import (
    ENTROPY_STEPS,
    LOWER_EVERY_STEPS,
    MIN_SCALE,
    MISMATCH_STEPS,
    NORMS_BEFORE,
    NORMS_KEPT,
    NOT_FINITE_STEPS,
    Alarms,
    typical_mismatch,
)
from swarm.learner.claims import Claim
from swarm.learner.messages import Alarm, AlarmState, ClaimState, Train, TrainGroup, TrainRollout
from swarm.learner.trainer import Trainer
from tests.builders import floats, ints
from tests.unit.trainers import group, saved, trainer_in, weights


def step(
    alarms: Alarms,
    norms: Sequence[float] = (2.0, 2.0),
    *,
    mismatch_kl: float | None = None,
    entropy: float = 2.0,
    reward: float = 0.0,
) -> tuple[list[bool], list[tuple[str, str]]]:
    """One learner step: which optimiser steps were made, and kind and reaction of its alarms."""
    fit = [
        alarms.is_fit(gradient_norm=norm, mismatch_kl=None if number else mismatch_kl)
        for number, norm in enumerate(norms)
    ]
    raised = alarms.stepped({"entropy": entropy, "reward": reward, "reward_std": 0.2})
    return fit, [(alarm.kind, alarm.reaction) for alarm in raised]


def after(steps: int, **values: Any) -> Alarms:
    """Alarms that have seen so many ordinary steps."""
    alarms = Alarms()
    for _ in range(steps):
        assert step(alarms, **values)[1] == []
    return alarms


# -- not finite ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_skipped_and_a_third_barren_step_stops(norm: float) -> None:
    alarms = after(1)
    for _ in range(NOT_FINITE_STEPS - 1):
        assert step(alarms, (norm, norm)) == ([False, False], [("not_finite", "skip")])
    assert step(alarms, (norm, norm)) == ([False, False], [("not_finite", "stop")])


def test_one_finite_gradient_breaks_the_row_and_a_step_without_any_does_not() -> None:
    alarms = after(1)
    for _ in range(4 * NOT_FINITE_STEPS):
        assert step(alarms, (math.nan, 2.0)) == ([False, True], [("not_finite", "skip")])
    for _ in range(NOT_FINITE_STEPS - 1):
        step(alarms, (math.nan,))
        assert step(alarms, ())[1] == []
    assert step(alarms, (math.nan,))[1] == [("not_finite", "stop")]


# -- spikes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "before", "norms", "fit"),
    [
        (NORMS_BEFORE // 2, 2.0, (2.0, 19.9), [True, True]),
        (NORMS_BEFORE // 2, 2.0, (2.0, 20.1), [True, False]),
        (NORMS_BEFORE // 2 - 1, 2.0, (1e6, 2.0), [True, True]),
        (NORMS_KEPT, 0.01, (0.9, 1.1), [True, False]),
    ],
    ids=["below", "above", "among the first", "needs no clipping"],
)
def test_a_norm_above_ten_medians_is_skipped(
    steps: int, before: float, norms: tuple[float, ...], fit: list[bool]
) -> None:
    alarms = after(steps, norms=(before, before))
    assert step(alarms, norms) == (fit, [] if all(fit) else [("gradient_spike", "skip")])


def test_a_lasting_change_becomes_the_new_regime() -> None:
    alarms = after(NORMS_KEPT)
    skipped = 0
    while not step(alarms, (100.0,))[0][0]:
        skipped += 1
    assert skipped == NORMS_KEPT // 2
    assert step(alarms, (100.0, 100.0)) == ([True, True], [])


# -- mismatch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mismatch", "fit"), [(0.5, True), (0.51, False)])
def test_a_mismatch_in_the_first_minibatch_skips_the_whole_step(mismatch: float, fit: bool) -> None:
    assert step(Alarms(), mismatch_kl=mismatch) == ([fit, fit], [] if fit else [("mismatch_kl", "skip")])


def test_ten_steps_of_mismatch_in_a_row_stop_and_what_cannot_be_compared_does_not_count() -> None:
    alarms = Alarms()
    for _ in range(MISMATCH_STEPS - 1):
        assert step(alarms, mismatch_kl=1.0)[1] == [("mismatch_kl", "skip")]
    assert step(alarms, mismatch_kl=0.1) == ([True, True], [])
    for number in range(MISMATCH_STEPS - 1):
        assert alarms.state.unchanged_steps == 2 * number
        assert step(alarms, mismatch_kl=1.0)[1] == [("mismatch_kl", "skip")]
        assert step(alarms, ())[1] == []
    assert step(alarms, mismatch_kl=1.0)[1] == [("mismatch_kl", "stop")]


def claims(**samplers: Sequence[float]) -> list[Claim]:
    """Rollouts of each sampler, each so many nats a token apart."""
    return [Claim(name, 0, 0.0, nats=4 * kl, tokens=4) for name, own in samplers.items() for kl in own]


@pytest.mark.parametrize(
    ("compared", "is_off"),
    [
        (claims(a=[5.0] * 4, b=[5.0] * 3, c=[0.0]), True),
        (claims(a=[5.0] * 3, b=[0.0] * 15, c=[0.0] * 12), False),
        (claims(quick=[5.0] * 28, b=[0.0], c=[0.0]), False),
        (claims(**{f"many{number}": [5.0] for number in range(10)}, b=[0.0] * 20), False),
        (claims(a=[5.0] * 4, b=[0.0] * 4), False),
        (claims(alone=[5.0, 5.0, 0.0]), True),
        ([Claim("a", 0, 0.0, nats=5e4, tokens=10_000), *claims(b=[0.0], c=[0.0])], False),
    ],
    ids=["most", "a tenth", "one that answers most", "many with few answers", "half", "alone", "one long"],
)
def test_to_be_off_takes_most_rollouts_and_most_samplers(compared: list[Claim], is_off: bool) -> None:
    found = typical_mismatch(compared, rollouts=len(compared))
    assert found == (5.0 if is_off else 0.0)


def test_who_alone_claims_the_newest_version_is_not_judged_alone() -> None:
    early = claims(quick=[5.0] * 3)
    assert typical_mismatch(early, rollouts=7) is None
    assert typical_mismatch(early, rollouts=6) == 5.0
    assert typical_mismatch([], rollouts=0) is None


# -- entropy -------------------------------------------------------------------------------------------------


def test_lost_entropy_halves_the_learning_rate_every_ten_steps_down_to_an_eighth() -> None:
    alarms = after(ENTROPY_STEPS)
    raised = [number for number in range(100) if step(alarms, entropy=0.1)[1] == [("entropy", "lower")]]
    first = raised[0]
    assert first <= ENTROPY_STEPS
    assert raised == [first, first + LOWER_EVERY_STEPS, first + 2 * LOWER_EVERY_STEPS]
    assert alarms.state.learning_rate_scale == MIN_SCALE


@pytest.mark.parametrize(("entropy", "reward"), [(0.25, 0.0), (0.1, 0.11)], ids=["kept", "paid"])
def test_entropy_that_is_there_or_was_paid_for_is_no_alarm_until_that_is_lost_too(
    entropy: float, reward: float
) -> None:
    alarms = after(ENTROPY_STEPS)
    for _ in range(50):
        assert step(alarms, entropy=entropy, reward=reward)[1] == []
    for _ in range(ENTROPY_STEPS):
        step(alarms, entropy=0.01, reward=0.0)
    assert alarms.state.learning_rate_scale == 0.5


# -- what is remembered --------------------------------------------------------------------------------------


def test_what_is_remembered_passes_through_a_checkpoint_and_decides_alike() -> None:
    first = after(30, norms=(0.1 + 0.2, 2.0))
    step(first, mismatch_kl=1.0)
    step(first, (math.nan,))
    held = msgspec.json.decode(msgspec.json.encode(first.state), type=AlarmState)
    assert held == first.state
    again = Alarms(held)
    for norms, entropy in [((2.0, 30.0), 2.0), ((math.nan,), 0.1), ((2.0, 2.0), 0.0), ((50.0,), 0.0)] * 10:
        assert step(again, norms, entropy=entropy) == step(first, norms, entropy=entropy)


# -- on the tiny model ---------------------------------------------------------------------------------------


def kinds(alarms: Sequence[Alarm]) -> list[tuple[str, str]]:
    return [(alarm.kind, alarm.reaction) for alarm in alarms]


def agreed(
    trainer: Trainer,
    rewards: list[float],
    *,
    staleness: int = 0,
    shift: float = 0.0,
    samplers: str = "aaaa",
    tokens: int = 2,
) -> TrainGroup:
    """A group whose claims are the learner's own log-probs, `shift` higher; `samplers`: who answered each."""
    made = group(rewards)
    rollouts: list[TrainRollout] = []
    for number, rollout in enumerate(made.rollouts):
        token_ids = [*made.prompt_token_ids, *range(3 + number, 3 + number + tokens)]
        rollout = structs.replace(rollout, token_ids=ints(*token_ids[3:]), staleness=staleness)
        with torch.no_grad():
            logits = trainer._model(input_ids=torch.tensor([token_ids])).logits[0, 2:-1].log_softmax(-1)
        claimed = [float(logits[i, token]) + shift for i, token in enumerate(token_ids[3:])]
        rollouts.append(structs.replace(rollout, logprobs=floats(*claimed), sampler=samplers[number]))
    return TrainGroup(prompt_token_ids=made.prompt_token_ids, rollouts=tuple(rollouts))


def test_a_poisoned_batch_changes_nothing_spoils_no_figure_and_stops_the_third_time(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    before = weights(trainer)
    poisoned = (group([math.nan, 1.0]),)
    for number, reaction in enumerate(["skip"] * (NOT_FINITE_STEPS - 1) + ["stop"]):
        done = trainer.step(Train(step=number, groups=poisoned))
        assert kinds(done.alarms) == [("not_finite", reaction)]
        own = {name: value for name, value in done.metrics.items() if not name.startswith("reward")}
        assert all(math.isfinite(value) for value in own.values())
    assert torch.equal(weights(trainer), before)


def test_shifted_claims_are_skipped_for_as_long_as_they_can_be_compared(tmp_path: Path) -> None:
    """The second batch is a version older, of weights that are equal since the first one was skipped."""
    trainer = trainer_in(tmp_path)
    before = weights(trainer)
    for number in range(2):
        wrong = agreed(trainer, [1.0, 0.0, 0.0, 0.0], staleness=number, shift=2.0)
        assert kinds(trainer.step(Train(step=number, groups=(wrong,))).alarms) == [("mismatch_kl", "skip")]
    assert torch.equal(weights(trainer), before)
    done = trainer.step(Train(step=2, groups=(agreed(trainer, [1.0, 0.0, 0.0, 0.0], staleness=2),)))
    assert done.alarms == ()
    assert done.metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-6)
    assert not torch.equal(weights(trainer), before)
    late = trainer.step(Train(step=3, groups=(agreed(trainer, [1.0, 0.0], staleness=1, shift=2.0),)))
    assert late.alarms == ()
    assert "mismatch_kl" not in late.metrics


def test_one_liar_whose_claims_are_most_tokens_stops_nothing(tmp_path: Path) -> None:
    """Its rollouts are long, so the mean over tokens is far above the limit, in every step."""
    trainer = trainer_in(tmp_path, minibatches=1)
    for number in range(MISMATCH_STEPS):
        honest = [agreed(trainer, [1.0, 0.0, 0.0, 0.0], samplers="abca") for _ in range(3)]
        lying = agreed(trainer, [1.0, 0.0, 0.0, 0.0], samplers="zzzz")
        long = tuple(
            structs.replace(one, token_ids=ints(*[5] * 40), logprobs=floats(*[-40.0] * 40)) for one in lying.rollouts
        )
        done = trainer.step(Train(step=number, groups=(*honest, structs.replace(lying, rollouts=long))))
        assert done.alarms == ()
        assert done.metrics["mismatch_kl"] > 2.0
        assert done.metrics["optimizer_steps"] == 1


@pytest.mark.parametrize("minibatches", [1, 2])
def test_rollouts_with_invented_claims_move_nothing(tmp_path: Path, minibatches: int) -> None:
    """Whatever they claim, as long as it is far off; the same rollouts with true claims do."""
    ends: list[torch.Tensor] = []
    for shift in (-2.2, 9.0, 0.0):
        trainer = trainer_in(tmp_path / str(shift), minibatches=minibatches)
        honest = [agreed(trainer, [1.0, 0.0, 0.0, 0.0], samplers="abca") for _ in range(2)]
        lying = agreed(trainer, [1.0, 0.0, 0.0, 0.0], shift=shift, samplers="zzzz", tokens=8)
        done = trainer.step(Train(step=0, groups=(*honest, lying)))
        assert done.withheld == ({"z": 4} if shift else {})
        assert done.metrics["rollouts_withheld"] == (4 if shift else 0)
        assert done.metrics["optimizer_steps"] == minibatches
        ends.append(weights(trainer))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_an_answer_of_which_a_token_or_two_moved_far_is_trained_on(tmp_path: Path) -> None:
    """Honest ones do, while the model learns: by 1.8 nats a token, or it gives a token up altogether."""
    trainer = trainer_in(tmp_path, minibatches=1)
    short = agreed(trainer, [1.0, 0.0, 0.0, 0.0], shift=-1.8, samplers="abcd")
    whole = agreed(trainer, [1.0, 0.0, 0.0, 0.0], samplers="abcd", tokens=8)
    given_up = [
        structs.replace(one, logprobs=floats(*[*array("f", one.logprobs)[:6], -30.0, -0.1])) for one in whole.rollouts
    ]
    groups = (short, structs.replace(whole, rollouts=tuple(given_up)))
    assert trainer.step(Train(step=0, groups=groups)).withheld == {}


def test_a_policy_that_collapses_gets_a_lower_learning_rate_and_keeps_it_over_a_checkpoint(tmp_path: Path) -> None:
    """A hundred times the usual learning rate, on one batch whose reward cannot rise."""
    trainer = trainer_in(tmp_path, learning_rate=1e-1)
    raised: list[tuple[str, str]] = []
    number = 0
    while ("entropy", "lower") not in raised:
        assert number < 60
        done = trainer.step(Train(step=number, groups=(agreed(trainer, [1.0, 0.0, 0.0, 0.0]),)))
        raised += kinds(done.alarms)
        number += 1
    checkpoint = saved(trainer, tmp_path / "step-000060", number)
    again = trainer_in(tmp_path / "again", learning_rate=1e-1, resume=checkpoint)
    assert again._update.alarms.state == trainer._update.alarms.state
    assert again._update.claims.state == trainer._update.claims.state != ClaimState()
    next_batch = (agreed(trainer, [1.0, 0.0, 0.0, 0.0]),)
    done, repeated = (one.step(Train(step=number, groups=next_batch)) for one in (trainer, again))
    assert done.metrics["learning_rate"] == repeated.metrics["learning_rate"] == pytest.approx(0.05)


# -- in the node ---------------------------------------------------------------------------------------------


def test_every_alarm_is_an_event_and_a_line_only_now_and_then() -> None:
    events: list[dict[str, Any]] = []
    said: list[str] = []
    log = AlarmLog(emit=lambda kind, **fields: events.append({"kind": kind, **fields}), say=said.append)
    spike = Alarm(kind="gradient_spike", reaction="skip", value=31.0, limit=20.0, text="left out")
    for number in range(1, SAY_AGAIN_STEPS + 2):
        assert not log.told((spike,), step=number)
    assert len(events) == SAY_AGAIN_STEPS + 1
    assert said == [f"step {n}: alarm gradient_spike (31, limit 20): left out" for n in (1, SAY_AGAIN_STEPS + 1)]
    broken = Alarm(kind="not_finite", reaction="stop", value=math.nan, limit=0.0, text="broken")
    assert log.told((broken,), step=30)
    assert log.stopped_by == "broken"
    told = {"kind": "alarm", "alarm": "not_finite", "reaction": "stop", "text": "broken"}
    assert events[-1] == {**told, "value": None, "limit": 0.0, "step": 30}
