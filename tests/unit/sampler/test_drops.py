"""What a sampler says of its rollouts that the learner dropped."""

from __future__ import annotations

from swarm.rollout.messages import DroppedRollouts
from swarm.sampler.session import SAID_AGAIN_S, Drops


def told(**counts: int) -> list[DroppedRollouts]:
    return [DroppedRollouts(reason=reason, rollouts=count) for reason, count in counts.items()]


def test_it_speaks_when_they_grew_and_of_the_growth_alone() -> None:
    drops = Drops()
    assert drops.hear(told(), now=0.0) is None
    assert drops.hear(told(stale=12), now=5.0) == 'the learner dropped 12 of our rollouts: "stale"'
    assert drops.hear(told(stale=12), now=5.0 + SAID_AGAIN_S) is None
    later = drops.hear(told(stale=14, reward_failed=1), now=5.0 + SAID_AGAIN_S)
    assert later == 'the learner dropped 3 of our rollouts: 1 "reward_failed", 2 "stale"'
    assert drops.counts == {"stale": 14, "reward_failed": 1}
    drops.hear(told(), now=400.0)
    again = drops.hear(told(stale=5), now=500.0)
    assert again == 'the learner dropped 5 of our rollouts: "stale"', "a learner that started again counts from zero"


def test_it_speaks_once_a_minute_and_forgets_nothing_meanwhile() -> None:
    drops = Drops()
    lines = [drops.hear(told(stale=1 + second), now=float(second)) for second in range(121)]
    assert [second for second, line in enumerate(lines) if line] == [0, 60, 120]
    assert lines[60] == 'the learner dropped 60 of our rollouts: "stale"'


def test_a_reason_cannot_play_with_the_terminal() -> None:
    line = Drops().hear([DroppedRollouts(reason="\x1b[2Jx", rollouts=1)], now=0.0)
    assert line == 'the learner dropped 1 of our rollouts: "?[2Jx"'
