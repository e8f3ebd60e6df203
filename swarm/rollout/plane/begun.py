"""Completions that are handed over: a sampler that cannot end one gives what it has, and another goes on from there.

The noise of a draw is a hash of the sample's seed, the position and the token (models/draws.py), so the tokens are the
same whoever draws which of them, and an audit replays each part by itself. Each span names who drew it. A part belongs
to exactly the tokens that it follows, whose name its answer carries: after a withdrawal others may stand there.
"""

from __future__ import annotations

from msgspec import structs

from swarm.rollout.plane.episodes import moved
from swarm.types import NodeId, Rollout
from swarm.wire import digest

MAX_HANDED_SPANS = 64
"""Of what was handed over of one sample. Each part costs the learner a record and a lease with all tokens so far, and
an honest sampler gives one up after minutes of work."""


def begun_name(token_ids: bytes) -> int:
    """Return the name of the tokens (int32) that a part follows; 0 if there are none."""
    return int.from_bytes(digest(token_ids)[:6], "little") if token_ids else 0


def joined(begun: Rollout | None, part: Rollout, node: NodeId | None = None) -> Rollout:
    """Return a completion up to the end of `part`, which follows `begun`; `node` is named as its author, unless it is
    None."""
    start = begun.length if begun is not None else 0
    spans = (structs.replace(moved(span, start), node=node or "") for span in part.spans)
    if begun is None:
        return structs.replace(part, spans=tuple(spans))
    return structs.replace(
        part,
        token_ids=begun.token_ids + part.token_ids,
        logprobs=begun.logprobs + part.logprobs,
        spans=(*begun.spans, *spans),
    )


def handing_fault(part: Rollout, begun: Rollout | None, stop_token_ids: tuple[int, ...]) -> str:
    """Return why a part cannot be handed over; "" if it can."""
    if part.tokens()[-1] in stop_token_ids:
        return "a sample that has ended is handed over"
    spans = len(part.spans) + (len(begun.spans) if begun is not None else 0)
    return f"it was drawn in {spans} parts: its end is wanted" if spans > MAX_HANDED_SPANS else ""
