"""How the node reports alarms, and the alarms that only the node can raise, because they concern texts and rewards,
which the trainer does not know.

Theory of operation. `LearningSignal` sees every learner step. Two conditions mean that steps teach little or nothing:

    kind            when
    no_variance     in FLAT_STEPS steps with at least FLAT_GROUPS groups, every group's rewards were all the same
    reward_floor    of the completions of FLOOR_STEPS steps, at least FLOOR_SHARE got the lowest reward of the run

The run goes on. A low mean reward alone raises no alarm, since a hard task begins with one.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swarm.learner.messages import Alarm, AlarmKind
from swarm.rollout.plane.groups import Group

SAY_AGAIN_STEPS = 20  # Steps before an alarm of the same kind and reaction gets another line
MAX_WITHHELD = 1024  # Samplers whose withheld rollouts are counted, those first noticed: keys cost nothing to make

FLAT_STEPS, FLAT_GROUPS = 5, 64
"""A policy that is right once in a hundred samples, in groups of eight, has 64 groups in a row without variance only
once in 170 times."""

FLOOR_STEPS, FLOOR_SHARE = 20, 0.99
FAILED_SHARE = 0.01  # Share of a step's completions: rarer failures cause little bias
WHAT_TO_DO = "look at completions on the run's page, and try the reward with `echo-node tasks try`"


class LearningSignal:
    """Notices steps that teach nothing."""

    def __init__(self) -> None:
        self._flat_steps = self._flat_groups = 0
        self._lowest = math.inf
        self._at_lowest: deque[tuple[float, int, int]] = deque(maxlen=FLOOR_STEPS)

    def stepped(self, batch: Sequence[Group], figures: Mapping[str, float]) -> Alarm | None:
        """Return the alarm, if any, of a step on these groups with the trainer's figures."""
        scores = [sample.score for group in batch for sample in group.samples if sample.score]
        rewards = [score.reward for score in scores]
        least = min(rewards, default=0.0)
        self._at_lowest.append((least, rewards.count(least), len(rewards)))
        self._lowest = min(self._lowest, least)
        is_flat = figures.get("frac_reward_zero_std") == 1.0
        self._flat_steps = self._flat_steps + 1 if is_flat else 0
        self._flat_groups = self._flat_groups + len(batch) if is_flat else 0
        if self._flat_steps >= FLAT_STEPS and self._flat_groups >= FLAT_GROUPS:
            text = f"no group of the last {self._flat_steps} steps had two different rewards, so nothing was learned"
            text += f": {WHAT_TO_DO}"
            return _alarm("no_variance", self._flat_steps, FLAT_STEPS, text)
        share = self._floor_share()
        if is_flat or share < FLOOR_SHARE or any(score.exact for score in scores if score.reward == self._lowest):
            return None
        text = f"{share:.1%} of the completions of the last {FLOOR_STEPS} steps got the lowest reward, {self._lowest:g}"
        return _alarm("reward_floor", share, FLOOR_SHARE, f"{text}, so few groups teach anything: {WHAT_TO_DO}")

    def _floor_share(self) -> float:
        if len(self._at_lowest) < FLOOR_STEPS:
            return 0.0
        count = sum(count for least, count, _ in self._at_lowest if least == self._lowest)
        return count / max(1, sum(total for _, _, total in self._at_lowest))


def rewards_failed(share: float, reason: str) -> Alarm | None:
    """Return the alarm of a step in which `share` of the rewards failed, if that is too many. The last one failed for
    `reason`."""
    if share <= FAILED_SHARE:
        return None
    text = f"{share:.1%} of the rewards failed: such completions get 0. Last: {reason}"
    return _alarm("reward_failed", share, FAILED_SHARE, text)


def _alarm(kind: Any, value: float, limit: float, text: str) -> Alarm:
    return Alarm(kind=kind, reaction="none", value=float(value), limit=float(limit), text=text)


class AlarmLog:
    """Reports the alarms of each learner step. Steps trained again after a crash do not count: their events exist."""

    def __init__(self, *, emit: Callable[..., None], say: Callable[[str], None]) -> None:
        self._emit = emit
        self._say = say
        self._said_at: dict[tuple[str, str], int] = {}
        self.last: dict[str, Any] | None = None
        """The event of the last alarm."""
        self.counts: Counter[AlarmKind] = Counter()
        self.stopped_by = ""
        """Why the run must end; "" if it need not."""
        self.withheld: dict[str, int] = {}
        """How many rollouts of each sampler were not trained on because of their claims."""

    def doubted(self, withheld: Mapping[str, int], *, step: int) -> None:
        """Report whose rollouts learner step `step` has left out, and how many; each sampler gets one line."""
        if not withheld:
            return
        self._emit("withheld", step=step, rollouts=dict(withheld))
        for node, count in withheld.items():
            if node in self.withheld:
                self.withheld[node] += count
            elif len(self.withheld) < MAX_WITHHELD:
                self.withheld[node] = count
                self._say(
                    f"step {step}: {count} rollouts of sampler {node} are not trained on: the log-probs that it claims "
                    "are too far from the learner's own"
                )

    def told(self, alarms: Sequence[Alarm], *, step: int) -> bool:
        """Report the alarms of learner step `step`, each as an event. Return whether the run must end."""
        for alarm in alarms:
            self._tell(alarm, step)
        return bool(self.stopped_by)

    def _tell(self, alarm: Alarm, step: int) -> None:
        self.counts[alarm.kind] += 1
        shown = f"{alarm.value:.3g}, limit {alarm.limit:.3g}" if math.isfinite(alarm.value) else "not a number"
        self.last = {
            "alarm": alarm.kind,
            "reaction": alarm.reaction,
            "value": alarm.value if math.isfinite(alarm.value) else None,  # JSON has no NaN
            "limit": alarm.limit,
            "step": step,
            "text": alarm.text,
        }
        self._emit("alarm", **self.last)
        if alarm.reaction == "stop":
            self.stopped_by = alarm.text
        if step - self._said_at.get((alarm.kind, alarm.reaction), -SAY_AGAIN_STEPS) >= SAY_AGAIN_STEPS:
            self._said_at[alarm.kind, alarm.reaction] = step
            self._say(f"step {step}: alarm {alarm.kind} ({shown}): {alarm.text}")
