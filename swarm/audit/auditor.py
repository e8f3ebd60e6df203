"""What is known of each sampler, and when there is no doubt that it lies.

Of every token that is drawn again (learner/replay.py) two figures are known, in nats: its *error*, the claimed log-prob
less the recomputed one, and its *margin*, by how much it misses being the best token under its noise. Honest engines
have errors of both signs that nearly cancel, and small margins. `Limits` say what they have in the mean at most.

Evidence is Page's CUSUM (1954): S = max(0, S + sum(x - limit)) over the tokens of each rollout, with x cut at CUT. It
is kept for the error and its negative (over all tokens, over answers above and below their group's mean reward, and
over first and second halves), for its magnitude, and for the margin. A node is caught when one S passes `Limits.sum`.
If the mean of x is m > limit, that takes about sum / (m - limit) audited tokens; if m <= limit it never happens, which
bounds the lies that stay unseen (docs/threats.md). No rollout adds more than a quarter of `sum`.

Limits hold for any class of engine, since a sampler chooses the name of its class. Narrower ones hold for a class that
was measured. Log-probs of any other class are not believed at all: the learner takes its own for them, so that all of
its rollouts are drawn again. Of other samplers a share is, which a secret chooses; newcomers are audited in full as far
as there is time, and their first few rollouts in any case.
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

CUT = 1.0  # Nats: one token says no more than that, whatever its error
MIN_ROLLOUTS = 4  # Rollouts that it takes to be caught
NEW_ROLLOUTS = 64  # Audited in full, as far as there is time
FIRST_ROLLOUTS = 8  # Audited in any case: who lies in all of them is suspicious by then, and audited in full
SUSPICION = 0.25  # Of the sum that convicts: from here on a sampler is audited in full
MAX_NODES = 65_536  # Samplers that are remembered, 60 MB at most; the oldest is forgotten, and is new again


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What honest samplers have at most, in nats a token in the mean: `bias` of errors, `size` of their magnitudes, and
    `margin`. A sampler is caught when what is beyond a limit adds up to `sum` nats."""

    bias: float
    size: float
    margin: float
    sum: float

    def widened(self, other: Limits) -> Limits:
        """Return the wider of both."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("bias", "size", "margin", "sum"))
        bias, size, margin, total = map(max, pairs)
        return Limits(bias=bias, size=size, margin=margin, sum=total)


ANY = Limits(bias=0.225, size=1.0, margin=0.22, sum=18.0)
"""For every class: five times what weights of 8 bits do on a model of 135M parameters, where they do most. Weights of 4
bits make another policy of so small a model, which cannot be told from a lie (docs/threats.md)."""

HALF = Limits(bias=0.02, size=0.23, margin=0.011, sum=8.0)
"""Five times what bfloat16 does, on the learner's side and on a sampler's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What an audit found of one rollout: errors and margins of its tokens, float32 [tokens]. Errors are empty where
    log-probs were not claimed. `side` is 1 if its reward is above its group's mean, -1 if below, else 0."""

    errors: NDArray[np.float32]
    margins: NDArray[np.float32]
    side: int = 0

    def signals(self) -> Iterator[tuple[str, str, NDArray[np.float32]]]:
        """Yield what evidence is kept of, by name."""
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
    """A sampler did not do as it was asked, by `detector`, after `audited` audits.
    `off` is the mean of what was found, in nats a token; `name` says of which tokens."""

    node: NodeId
    detector: str
    name: str
    off: float
    audited: int

    @property
    def what(self) -> str:
        """For its owner, who may have a broken engine."""
        if self.detector == "draws":
            return f"its tokens miss what their seeds draw by {self.off:.2g} nats in the mean"
        direction = {"too high": "", "too low": "-"}.get(self.name.partition(",")[0], "+-")
        return f"its log-probs are off by {direction}{self.off:.2g} nats in the mean ({self.name})"


@dataclass(slots=True)
class _Sum:
    """A CUSUM, with the tokens and the sum of x since it was last 0."""

    score: float = 0.0
    tokens: int = 0
    total: float = 0.0

    def add(self, values: NDArray[np.float32], limit: float, most: float) -> None:
        total = float(values.sum(dtype=np.float64))
        if not math.isfinite(total):
            return  # Weights that are no numbers any more say nothing of samplers.
        self.score = max(0.0, self.score + min(most, total - limit * len(values)))
        if self.score:
            self.tokens, self.total = self.tokens + len(values), self.total + total
        else:
            self.tokens, self.total = 0, 0.0


@dataclass(slots=True)
class _Evidence:
    audited: int = 0
    claims: int = 0  # Of these, the rollouts with log-probs: held-out answers make no newcomer known
    caught: bool = False
    sums: dict[str, _Sum] = field(default_factory=dict)
    suspicious: bool = False


class Auditor:
    """`classes`: limits by name of class, of those that were measured. `share` is audited of samplers of such a class
    that are not new."""

    def __init__(self, classes: Mapping[str, Limits], *, secret: bytes, share: float) -> None:
        self.classes = classes
        self._secret = secret
        self._share = share
        self._known: Bounded[NodeId, _Evidence] = Bounded(MAX_NODES)

    def is_measured(self, class_name: str) -> bool:
        """Return whether log-probs of such engines are believed, within their limits."""
        return class_name in self.classes

    def share(self, node: NodeId, class_name: str, *, chosen: int = 0, has_time: bool = True) -> float:
        """Return which share of the node's rollouts is audited, once `chosen` more have been."""
        known = self._known.get(node, _Evidence())
        if known.suspicious or not self.is_measured(class_name):
            return 1.0
        return 1.0 if known.claims + chosen < (NEW_ROLLOUTS if has_time else FIRST_ROLLOUTS) else self._share

    def drawn(self, rollout_id: str) -> float:
        """Return the rollout's secret number, from 0 to 1: below the share that is audited, it is."""
        return int.from_bytes(digest(self._secret + rollout_id.encode())[:8], "little") / 2**64

    def note(self, node: NodeId, limits: Limits, finding: Finding) -> Caught | None:
        """Add what was found of one of the node's rollouts. Return a verdict the first time that there is no doubt."""
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
        """Begin again with a node, as with a newcomer: an operator has let it back in. Return whether it was known."""
        return self._known.pop(node, None) is not None
