"""The evidence against each sampler, and when it is enough to bar the sampler.

Every token that is drawn again (learner/replay.py) gives two figures, in nats: its *error*, the claimed log-prob minus
the recomputed one, and its *margin*, how far it is from being the best token under its noise. Honest engines have
errors of both signs that nearly cancel, and small margins. `Limits` are upper bounds of their means.

Evidence is Page's CUSUM (1954): S = max(0, S + sum(x - limit)) over the tokens of each rollout, with x cut at CUT. One
sum each is kept for the error and its negative (over all tokens, over answers above and below their group's mean
reward, and over first and second halves), for its magnitude, and for the margin. A node is caught when one S passes
`Limits.sum`. If the mean of x is m > limit, that takes about sum / (m - limit) audited tokens; if m <= limit it never
happens, which bounds the lies that go unnoticed (docs/threats.md). No rollout adds more than a quarter of `sum`.

A sampler chooses the name of its class, so the wide limits ANY hold for every class. A class that was measured has
narrower ones. The learner does not believe the log-probs of any other class: it redraws all rollouts of such samplers
and trains with its own log-probs. Of the other samplers it redraws a share that a secret chooses. Newcomers are audited
in full as far as there is time, and their first few rollouts in any case.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from swarm.bounded import Bounded
from swarm.types import NodeId
from swarm.wire import digest

CUT = 1.0  # Nats: the most that one token counts, however large its error
MIN_ROLLOUTS = 4  # Fewest rollouts after which a sampler can be caught
NEW_ROLLOUTS = 64  # Audited in full, as far as there is time
FIRST_ROLLOUTS = 8  # Audited in any case: a sampler that lies in all of them is then suspicious, and audited in full
SUSPICION = 0.25  # Share of `Limits.sum` from which a sampler is audited in full
MAX_NODES = 65_536  # Samplers remembered, in at most 60 MB; the oldest is forgotten, and then is a newcomer again


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorLimits:
    """Upper bounds for honest samplers, in mean nats a token: `bias` of errors, `size` of their magnitudes, and
    `margin`. A sampler is caught when the excess over one of them adds up to `sum` nats."""

    bias: float
    size: float
    margin: float
    sum: float

    def widened(self, other: ErrorLimits) -> ErrorLimits:
        """Return the wider of both."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("bias", "size", "margin", "sum"))
        bias, size, margin, total = map(max, pairs)
        return ErrorLimits(bias=bias, size=size, margin=margin, sum=total)


ANY = ErrorLimits(bias=0.225, size=1.0, margin=0.22, sum=18.0)
"""For every class: five times the effect of 8-bit weights on a model of 135M parameters, where it is largest. With
4-bit weights so small a model is another policy, which cannot be told from a lie (docs/threats.md)."""

HALF = ErrorLimits(bias=0.02, size=0.23, margin=0.011, sum=8.0)
"""Five times the effect of bfloat16, at the learner and at a sampler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What an audit found in one rollout: errors and margins of its tokens, float32 [tokens]. Errors are empty for
    greedy answers, which have no log-probs. `side` is 1 if its reward is above its group's mean, -1 if below, else
    0."""

    errors: NDArray[np.float32]
    margins: NDArray[np.float32]
    side: int = 0

    def signals(self) -> Iterator[tuple[str, str, NDArray[np.float32]]]:
        """Yield the series that a CUSUM is kept of: name, detector, and a value for each token."""
        cut, half = np.clip(self.errors, -CUT, CUT), len(self.errors) // 2
        parts = {"all": cut, "first half": cut[:half], "second half": cut[half:]}
        if self.side:
            parts["better answers" if self.side > 0 else "worse answers"] = cut
        for name, part in parts.items():
            yield f"too high, {name}", "log-probs", part
            yield f"too low, {name}", "log-probs", -part
        yield "size", "log-probs", np.abs(cut)
        yield "draws", "draws", np.minimum(self.margins, CUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caught:
    """The verdict that a sampler did not do what it was asked to, found by `detector` after `audited` audits. `off` is
    the mean of the series `name`, in nats a token."""

    node: NodeId
    detector: str
    name: str
    off: float
    audited: int

    @property
    def what(self) -> str:
        """The fault in words, for the sampler's owner, whose engine may be broken."""
        if self.detector == "draws":
            return f"its tokens miss what their seeds draw by {self.off:.2g} nats in the mean"
        direction = {"too high": "", "too low": "-"}.get(self.name.partition(",")[0], "+-")
        return f"its log-probs are off by {direction}{self.off:.2g} nats in the mean ({self.name})"


@dataclass(slots=True)
class _Sum:
    """A CUSUM, with the number of tokens and the sum of x since it was last 0."""

    score: float = 0.0
    tokens: int = 0
    total: float = 0.0

    def add(self, values: NDArray[np.float32], limit: float, most: float) -> None:
        total = float(values.sum(dtype=np.float64))
        if not math.isfinite(total):
            return  # The learner's weights are NaN: that is not the sampler's fault.
        self.score = max(0.0, self.score + min(most, total - limit * len(values)))
        if self.score:
            self.tokens, self.total = self.tokens + len(values), self.total + total
        else:
            self.tokens, self.total = 0, 0.0


@dataclass(slots=True)
class _Evidence:
    audited: int = 0
    claims: int = 0  # The audited rollouts with log-probs; a newcomer stays one while it has only held-out answers
    caught: bool = False
    sums: dict[str, _Sum] = field(default_factory=dict)
    suspicious: bool = False


class Auditor:
    """`classes` are the limits of measured classes, by name. `share` of the rollouts is audited where a sampler is of
    such a class and not new."""

    def __init__(self, classes: Mapping[str, ErrorLimits], *, secret: bytes, share: float) -> None:
        self.classes = classes
        self._secret = secret
        self._share = share
        self._known: Bounded[NodeId, _Evidence] = Bounded(MAX_NODES)

    def is_measured(self, class_name: str) -> bool:
        """Return whether the learner trains with the log-probs of such engines, within their limits."""
        return class_name in self.classes

    def share(self, node: NodeId, class_name: str, *, chosen: int = 0, has_time: bool = True) -> float:
        """Return the share of the node's rollouts to audit, given that `chosen` more are already selected."""
        known = self._known.get(node, _Evidence())
        if known.suspicious or not self.is_measured(class_name):
            return 1.0
        return 1.0 if known.claims + chosen < (NEW_ROLLOUTS if has_time else FIRST_ROLLOUTS) else self._share

    def drawn(self, rollout_id: str) -> float:
        """Return the rollout's secret number, from 0 to 1. It is audited if the number is below the share."""
        return int.from_bytes(digest(self._secret + rollout_id.encode())[:8], "little") / 2**64

    def add(self, node: NodeId, limits: ErrorLimits, finding: Finding) -> Caught | None:
        """Add a finding about one of the node's rollouts. Return a verdict the first time that a sum passes its
        limit."""
        known = self._known.setdefault(node, _Evidence())
        known.audited, known.claims = known.audited + 1, known.claims + bool(len(finding.errors))
        verdict: Caught | None = None
        limit_of = {"size": limits.size, "draws": limits.margin}
        for name, detector, values in finding.signals():
            one = known.sums.setdefault(name, _Sum())
            one.add(values, limit_of.get(name, limits.bias), limits.sum / MIN_ROLLOUTS)
            if one.score >= limits.sum and verdict is None and not known.caught:
                off = one.total / one.tokens
                verdict = Caught(node=node, detector=detector, name=name, off=off, audited=known.audited)
        known.suspicious = any(one.score > SUSPICION * limits.sum for one in known.sums.values())
        known.caught = known.caught or verdict is not None
        return verdict

    def forget(self, node: NodeId) -> bool:
        """Treat a node as a newcomer again. Return whether it was known."""
        return self._known.pop(node, None) is not None
