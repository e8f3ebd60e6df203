"""What the learner answers a sampler: that it gets nothing now, or how an episode goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from aiohttp import web

from swarm.net.client import binary
from swarm.rollout.intake import TEXTS, Overloaded
from swarm.rollout.messages import STEP_REPLY_BYTES, Answer, LeaseReply, Refusal, Stepped
from swarm.rollout.plane.effects import Judged
from swarm.types import Observed
from swarm.wire import encode


def refuse(reason: Refusal, retry_after_s: float, detail: str = "") -> web.Response:
    return binary(encode(LeaseReply(refusal=reason, retry_after_s=retry_after_s, detail=detail)))


def come_back(why: str) -> web.Response:
    """Return a 503: send the same again in a second."""
    return web.Response(status=503, text=why, headers={"Retry-After": "1"})


def too_much(why: Overloaded) -> web.Response:
    """Return a 429: send the same again after a while."""
    text = f"overloaded: {TEXTS[why.reason]}"
    return web.Response(status=429, text=text, headers={"Retry-After": str(math.ceil(why.retry_after_s))})


def stepped(answer: Answer, said: Observed, judged: Judged | None) -> Stepped:
    """Return what the environment said to a turn; `judged` is None if the turn was taken before."""
    return Stepped(
        group_id=answer.rollout.group_id,
        index=answer.rollout.index,
        turn=answer.turn,
        verdict=judged.verdict if judged is not None else "accepted",
        detail=judged.detail if judged is not None else "",
        ended=said.done,
        seat=said.seat,
        token_ids=said.token_ids,
    )


def within(steps: Sequence[Stepped]) -> tuple[Stepped, ...]:
    """Return as many as a reply has room for, at least one if there is any. The others are asked for again."""
    sizes = accumulate(len(one.token_ids) for one in steps)
    return tuple(one for one, end in zip(steps, sizes, strict=True) if end <= STEP_REPLY_BYTES // 2)
