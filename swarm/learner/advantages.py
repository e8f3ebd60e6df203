"""Turns the rewards of groups into advantages, and rollouts into the rows that a learner step trains on.

Each player of an episode has its own row, in which only drawn tokens count. A completion is an episode of one turn.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from math import hypot, sqrt
from statistics import fmean

import torch

from swarm.learner.batch import Row
from swarm.learner.messages import TrainerConfig, TrainGroup, TrainRollout
from swarm.types import Turn

ADVANTAGE_EPSILON = 1e-4  # Keeps a group of nearly equal rewards from dividing by nearly zero; TRL's value
EQUAL = 1e-9  # Advantages up to this are rounding
TURNS_SHOWN = 8  # Turns with a reward figure of their own: a chart of more curves is hard to read


def turn_advantages(returns: Sequence[Sequence[float]]) -> list[list[float]] | None:
    """(R - mean) / (std + eps) of the returns of a group, by rollout and turn. None if all are 0.

    GRPO, arXiv 2402.03300, section 4.1.2. The std is the population's, over all returns of the group. The mean is over
    the turns with the same number, since returns depend on how many turns are left. A turn that no other rollout has is
    compared with the mean of all. With one turn each this is GRPO.
    """
    every = [value for own in returns for value in own]
    peers = [
        [own[number] for own in returns if number < len(own)] for number in range(max(map(len, returns), default=0))
    ]
    mean = fmean(every) if every else 0.0
    spread = hypot(*(one - mean for one in every)) / sqrt(len(every)) + ADVANTAGE_EPSILON if every else 1.0
    means = [fmean(some) if len(some) > 1 else mean for some in peers]
    found = [[(value - usual) / spread for value, usual in zip(own, means, strict=False)] for own in returns]
    # A reward that is no number is for the alarms to see.
    return found if any(not abs(one) <= EQUAL for own in found for one in own) else None


def overlong_punishment(tokens: int, *, longest: int) -> float:
    """Soft overlong punishment of a completion with this number of `tokens`: it falls from 0 to -1 over the last fifth
    before `longest` (DAPO, arXiv 2503.14476, equation 13)."""
    margin = longest // 5
    if tokens <= longest - margin:
        return 0.0
    return (longest - margin - tokens) / margin if tokens <= longest else -1.0


def shaped_reward(rollout: TrainRollout, config: TrainerConfig, seat: int = 0) -> float:
    """The reward from which the advantages of player `seat` are computed. The first player's is the rollout's."""
    turns = turns_of(rollout, seat)
    reward = rollout.reward if seat == 0 else sum(turn.reward for turn in turns)
    if config.overlong != "punish":
        return reward
    if rollout.turns:
        # An environment's tokens count in an episode's limit, so drawn tokens do not tell how near the limit is.
        return reward - float(rollout.truncated)
    return reward + overlong_punishment(rollout.length, longest=config.longest_completion)


def turns_of(rollout: TrainRollout, seat: int) -> tuple[Turn, ...]:
    if not rollout.turns and seat == 0:
        return (Turn(start=0, end=rollout.length, node=rollout.sampler, reward=rollout.reward),)
    return tuple(turn for turn in rollout.turns if turn.seat == seat)


def returns_of(rollout: TrainRollout, config: TrainerConfig, seat: int) -> list[float]:
    """The returns of a player: its shaped reward, or, with credit by turn, the discounted sum of rewards from each of
    its turns on, where each turn later counts `turn_discount` times as much. Empty if the player had no turn."""
    turns, shaped = turns_of(rollout, seat), shaped_reward(rollout, config, seat)
    if config.credit == "episode" or len(turns) < 2:
        return [shaped] if turns else []
    # The part of the shaped reward that belongs to no turn, a punishment, goes to the last one.
    found, to_go, rest = list[float](), 0.0, shaped - sum(turn.reward for turn in turns)
    for turn in reversed(turns):
        to_go, rest = turn.reward + rest + config.turn_discount * to_go, 0.0
        found.insert(0, to_go)
    return found


def taught(group: TrainGroup, config: TrainerConfig) -> Iterator[tuple[TrainRollout, int, list[float]]]:
    """Yield what to train on, player by player: rollout, player and advantages. A player whose advantages are all 0 is
    left out. The conversations of one player are compared with all others, and count as one if they have one return."""
    rollouts = [one for one in group.rollouts if not (config.overlong == "mask" and one.truncated)]
    if config.one_player:
        rows = [(one, seat) for one in rollouts for seat in range(len(one.seats) or 1) if turns_of(one, seat)]
        if config.credit == "episode":
            found = turn_advantages([[shaped_reward(one, config)] for one in rollouts])
            whole = {id(one): own for one, own in zip(rollouts, found or (), strict=found is not None)}
            every = [whole.get(id(one), []) for one, _ in rows]
        else:
            every = turn_advantages([returns_of(one, config, seat) for one, seat in rows]) or []
        yield from ((one, seat, own) for (one, seat), own in zip(rows, every, strict=bool(every)) if own)
        return
    # A masked rollout is not in the mean either: its reward means nothing, so it must not move the others' advantages.
    for seat in range(max((len(rollout.seats) for rollout in rollouts), default=0) or 1):
        advantages = turn_advantages([returns_of(rollout, config, seat) for rollout in rollouts])
        for rollout, own in zip(rollouts, advantages or (), strict=advantages is not None):
            if own:
                yield rollout, seat, own


def has_variance(group: TrainGroup, config: TrainerConfig) -> bool:
    """False if all advantages of the group are 0: it is left out of the step."""
    return next(taught(group, config), None) is not None


def rows_of(groups: Sequence[TrainGroup], config: TrainerConfig) -> list[Row]:
    """The rows of the groups that have any variance, in order."""
    return [row_of(group.prompt_token_ids, *one) for group in groups for one in taught(group, config)]


def row_of(prompt: tuple[int, ...], rollout: TrainRollout, seat: int = 0, advantages: Sequence[float] = (0.0,)) -> Row:
    """What player `seat` read and drew up to its last turn, with an advantage for each of its turns, or one for all."""
    turns = turns_of(rollout, seat)
    prompt, begin = (prompt, 0) if seat == 0 else ((), rollout.seats[seat])
    offset = len(prompt) - begin
    spans = [(max(turn.start, 1 - offset), turn.end) for turn in turns]  # Nothing predicts the first token of a row
    counts = torch.tensor([end - start for start, end in spans])
    drawn = torch.cat([torch.arange(start, end) for start, end in spans])
    parts = turns if rollout.turns else rollout.parts or turns
    nodes = [one.node or rollout.sampler for one in parts]
    each = counts if rollout.turns else torch.tensor([one.end - one.start for one in parts])
    samplers = tuple(dict.fromkeys(nodes))
    return Row(
        token_ids=torch.tensor([*prompt, *array("i", rollout.token_ids)[begin : turns[-1].end]], dtype=torch.long),
        prompt_tokens=spans[0][0] + offset,
        behaviour=torch.tensor(array("f", rollout.logprobs))[drawn],
        advantage=advantages[0] if len(advantages) == 1 else torch.tensor(advantages).repeat_interleave(counts),
        staleness=rollout.staleness,
        samplers=samplers,
        drawn=drawn + offset,
        drawn_by=torch.tensor([samplers.index(node) for node in nodes]).repeat_interleave(each),
    )


def reward_figures(groups: Sequence[TrainGroup], config: TrainerConfig) -> dict[str, float]:
    """The figures of a batch that need no model, by TRL's names. `reward` is the task's, before any shaping."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = torch.tensor([[rollout.reward for rollout in group.rollouts] for group in groups])
    ages = [rollout.staleness for rollout in rollouts]
    figures = {
        "reward": rewards.mean().item(),
        "reward_std": rewards.std(dim=1, correction=0).mean().item(),
        "frac_reward_zero_std": sum(not has_variance(group, config) for group in groups) / len(groups),
        **_length_figures(rollouts),
        **_episode_figures([rollout for rollout in rollouts if rollout.turns]),
        "staleness/mean": sum(ages) / len(ages),
        "staleness/max": float(max(ages)),
    }
    if config.overlong == "punish":
        figures["reward_shaped"] = sum(shaped_reward(rollout, config) for rollout in rollouts) / len(rollouts)
    return figures


def _length_figures(rollouts: Sequence[TrainRollout]) -> dict[str, float]:
    """Lengths in drawn tokens. `terminated` rollouts did not reach a limit; their mean is 0 if there are none."""
    lengths = [rollout.drawn for rollout in rollouts]
    terminated = [rollout.drawn for rollout in rollouts if not rollout.truncated]
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": 1 - len(terminated) / len(rollouts),
        "completions/mean_terminated_length": sum(terminated) / max(1, len(terminated)),
    }


def _episode_figures(episodes: Sequence[TrainRollout]) -> dict[str, float]:
    """Turns are counted over all players; rewards of turns are the first player's."""
    if not episodes:
        return {}
    turns, drawn = sum(len(one.turns) for one in episodes), sum(one.drawn for one in episodes)
    rewards = [[turn.reward for turn in turns_of(one, 0)] for one in episodes]
    of_turns = [[own[number] for own in rewards if number < len(own)] for number in range(TURNS_SHOWN)]
    return {
        "episode/turns/mean": turns / len(episodes),
        "episode/turn_tokens/mean": drawn / turns,
        "episode/limit_share": sum(one.truncated for one in episodes) / len(episodes),
        "episode/drawn_share": drawn / max(1, sum(one.length for one in episodes)),
        **{f"episode/reward/turn_{n + 1}": sum(own) / len(own) for n, own in enumerate(of_turns) if own},
    }
