"""Answers of the learner's face that carry no work."""

from __future__ import annotations

import math

from aiohttp import web

from swarm.http import binary
from swarm.rollout.intake import TEXTS, Overloaded
from swarm.rollout.messages import LeaseReply, Refusal
from swarm.wire import encode


def refuse(reason: Refusal, retry_after_s: float, detail: str = "") -> web.Response:
    """No leases, and why."""
    return binary(encode(LeaseReply(refusal=reason, retry_after_s=retry_after_s, detail=detail)))


def come_back(why: str) -> web.Response:
    """503: the same is to be sent again in a second."""
    return web.Response(status=503, text=why, headers={"Retry-After": "1"})


def too_much(why: Overloaded) -> web.Response:
    """429: the same is to be sent again after a while."""
    text = f"overloaded: {TEXTS[why.reason]}"
    return web.Response(status=429, text=text, headers={"Retry-After": str(math.ceil(why.retry_after_s))})
