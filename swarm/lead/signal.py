"""How the node reports alarms, and the alarms that only the node can raise, because they concern texts and rewards,
which the trainer does not know.

Theory of operation. `LearningSignal` sees every learner step. Two conditions mean that steps teach little or nothing:

    kind            when
    no_variance     in FLAT_STEPS steps with at least FLAT_GROUPS groups, every group's rewards were all the same
    reward_floor    of the completions of FLOOR_STEPS steps, at least FLOOR_SHARE got the lowest reward of the run

The run goes on. The user hears likely reasons (`likely_causes`, from the completions themselves) and sees three
completions. A low mean reward alone raises no alarm, since a hard task begins with one.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from swarm.learner.messages import Alarm, AlarmKind
from swarm.rollout.plane.groups import Group
from swarm.tasks.rewards import CORRECTNESS, without_thoughts
from swarm.types import Rollout, Score

SAY_AGAIN_STEPS = 20  # Steps before an alarm of the same kind and reaction gets another line
MAX_WITHHELD = 1024  # Samplers whose withheld rollouts are counted, those first noticed: keys cost nothing to make

FLAT_STEPS, FLAT_GROUPS = 5, 64
"""A policy that is right once in a hundred samples, in groups of eight, has 64 groups in a row without variance only
once in 170 times."""

FLOOR_STEPS, FLOOR_SHARE = 20, 0.99
FAILED_SHARE = 0.01  # Share of a step's completions: rarer failures cause little bias
GROUPS_READ, SAMPLES_READ = 16, 4  # Up to 64 completions are decoded to find causes: shares are good to some percent
TOKENS_READ = 1024  # Tokens decoded from each end of a completion
EVENT_CHARACTERS, LINE_CHARACTERS = 500, 100  # Characters shown of a text, half of them from its end
EXPLAINING_SHARE = 0.5  # Share of the completions that is enough to explain why nothing is learned
TELLING_SHARE = 0.1  # Share of completions that are wrong but hold the wanted answer: more than chance would give


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A completion in readable form."""

    prompt: str
    wanted: str
    completion: str
    reward: float
    exact: bool
    tokens: int
    truncated: bool
    parts: Mapping[str, float]


class LearningSignal:
    """Notices steps that teach nothing. `decode` turns token ids into text; `longest` is the longest completion, in
    tokens."""

    def __init__(self, decode: Callable[[Sequence[int]], str], longest: int) -> None:
        self._decode = decode
        self._longest = longest
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
            return _alarm("no_variance", self._flat_steps, FLAT_STEPS, text)
        share = self._floor_share()
        if is_flat or share < FLOOR_SHARE or any(score.exact for score in scores if score.reward == self._lowest):
            return None
        text = f"{share:.1%} of the completions of the last {FLOOR_STEPS} steps got the lowest reward, {self._lowest:g}"
        return _alarm("reward_floor", share, FLOOR_SHARE, text + ": few groups teach anything")

    def _floor_share(self) -> float:
        if len(self._at_lowest) < FLOOR_STEPS:
            return 0.0
        count = sum(count for least, count, _ in self._at_lowest if least == self._lowest)
        return count / max(1, sum(total for _, _, total in self._at_lowest))

    def explain(self, batch: Sequence[Group]) -> tuple[list[str], list[Answer]]:
        """Return likely causes, and completions to look at: the best, one from the middle, and the worst."""
        step = -(-len(batch) // GROUPS_READ)
        groups = [list(self._read(group)) for group in batch[:: max(1, step)]]
        answers = sorted((one for group in groups for one in group), key=lambda one: -one.reward)
        picked = sorted({0, len(answers) // 2, len(answers) - 1})
        return likely_causes(groups, self._longest), [answers[at] for at in picked if answers]

    def _read(self, group: Group) -> Iterator[Answer]:
        for sample in group.samples[:SAMPLES_READ]:
            if sample.rollout is not None and sample.score is not None:
                yield self._answer(group, sample.rollout, sample.score)

    def _answer(self, group: Group, rollout: Rollout, score: Score) -> Answer:
        tokens = rollout.tokens().tolist()
        is_cut = len(tokens) > 2 * TOKENS_READ
        read = (tokens[:TOKENS_READ], tokens[-TOKENS_READ:]) if is_cut else (tokens,)
        return Answer(
            prompt=group.prompt.text,
            wanted=group.prompt.answer,
            completion=" ... ".join(self._decode(ids) for ids in read),
            reward=score.reward,
            exact=score.exact,
            tokens=rollout.length,
            truncated=rollout.finish == "length",
            parts=score.parts,
        )


def likely_causes(groups: Sequence[Sequence[Answer]], longest: int) -> list[str]:
    """Return why completions like these teach nothing: at least one line."""
    answers = [one for group in groups for one in group]
    count = max(1, len(answers))
    if answers and all(one.exact for one in answers):
        return ["all of them are solved: these prompts have nothing left to teach"]
    found = []
    if (cut := sum(one.truncated for one in answers) / count) >= EXPLAINING_SHARE:
        found.append(
            f"{cut:.0%} end at the limit of {longest} tokens: raise --max-new-tokens, or ask for short answers"
        )
    empty = sum(not without_thoughts(one.completion).strip() for one in answers) / count
    if empty >= EXPLAINING_SHARE:
        found.append(
            f"{empty:.0%} say nothing, or nothing after their thoughts: look at the prompt, its chat template and "
            "`stop`"
        )
    if groups and all(len({one.completion for one in group}) == 1 for group in groups if len(group) > 1):
        found.append("the completions of a prompt are all the same: raise temperature, or go back to a version before")
    names = dict.fromkeys(name for one in answers for name in one.parts)
    if len(names) > 1 and (zero := [name for name in names if not any(one.parts.get(name) for one in answers)]):
        found.append(f"0 for all of them: {', '.join(zero)}; say in the prompt which form is wanted (--system-prompt)")
    if (holds := sum(_holds_wanted(one) for one in answers) / count) >= TELLING_SHARE:
        found.append(
            f"{holds:.0%} hold the wanted answer and are not right: the reward wants another form; look at "
            f"`echo-node tasks try`, another of the rewards {', '.join(CORRECTNESS)}, or lenient = true"
        )
    if not found and answers and (answers[0].reward and len({one.reward for one in answers}) == 1):
        found.append(f"all of them get {answers[0].reward:g}: the reward may not look at the completion")
    return found or [
        "they end by themselves and are wrong: the task may be too hard for this model, the prompt not say what is "
        "wanted, or the reward not what you mean (`echo-node tasks try`)"
    ]


def _holds_wanted(answer: Answer) -> bool:
    """Return whether a wrong completion holds the wanted answer as whole words: most long numbers hold any digit."""
    wanted = re.escape(answer.wanted.strip())
    said = without_thoughts(answer.completion)
    return bool(wanted) and not answer.exact and bool(re.search(rf"(?<!\w){wanted}(?!\w)", said, re.IGNORECASE))


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
        """The event of the last alarm, without completions."""
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
            self._tell(alarm, step, [], [])
        return bool(self.stopped_by)

    def explained(self, alarm: Alarm, explain: Callable[[], tuple[list[str], list[Answer]]], *, step: int) -> None:
        """Report a lasting alarm with causes and completions, at most once in SAY_AGAIN_STEPS."""
        if self._is_new(alarm, step):
            self._tell(alarm, step, *explain())

    def _is_new(self, alarm: Alarm, step: int) -> bool:
        said_at = self._said_at.get((alarm.kind, alarm.reaction))
        return said_at is None or step - said_at >= SAY_AGAIN_STEPS

    def _tell(self, alarm: Alarm, step: int, causes: list[str], answers: list[Answer]) -> None:
        self.counts[alarm.kind] += 1
        shown = f"{alarm.value:.3g}, limit {alarm.limit:.3g}" if math.isfinite(alarm.value) else "not a number"
        self.last = {
            "alarm": alarm.kind,
            "reaction": alarm.reaction,
            "value": alarm.value if math.isfinite(alarm.value) else None,  # JSON has no NaN
            "limit": alarm.limit,
            "step": step,
            "text": alarm.text,
            **({"causes": causes} if causes else {}),
        }
        shown_answers = {"completions": [_cut_answer(one) for one in answers]} if answers else {}
        self._emit("alarm", **self.last, **shown_answers)
        if alarm.reaction == "stop":
            self.stopped_by = alarm.text
        if not self._is_new(alarm, step):
            return
        self._said_at[alarm.kind, alarm.reaction] = step
        self._say(f"step {step}: alarm {alarm.kind} ({shown}): {alarm.text}")
        for cause in causes:
            self._say(f"  likely: {cause}")
        for one in answers:
            prompt, completion = (cut(text, LINE_CHARACTERS) for text in (one.prompt, one.completion))
            self._say(f"  reward {one.reward:g} for {completion!r}, asked {prompt!r}")


def cut(text: str, most: int) -> str:
    """Return `text`, or both ends of it if it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-(most // 2) :]}"


def _cut_answer(answer: Answer) -> dict[str, Any]:
    texts = {name: cut(getattr(answer, name), EVENT_CHARACTERS) for name in ("prompt", "wanted", "completion")}
    return {**msgspec.to_builtins(answer), **texts}
