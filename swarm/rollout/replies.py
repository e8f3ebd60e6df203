"""What the learner answers a sampler that gets nothing now."""

from __future__ import annotations

import math

from aiohttp import web

from swarm.net.client import binary
from swarm.rollout.intake import TEXTS, Overloaded
from swarm.rollout.messages import LeaseReply, Refusal
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
