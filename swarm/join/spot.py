"""Notices by which a cloud says that it will take away a machine that it rents out for less.

AWS gives two minutes, Google and Azure about 30 s; all of them tell the machine itself, at one address that no router
carries. A node asks there every POLL_S, and leaves within LEAVE_S of a notice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from aiohttp import ClientError, ClientSession, ClientTimeout

METADATA = "http://169.254.169.254"
"""Constant: an address that a peer or a file could name would let them have this machine ask anything."""

POLL_S = 4.0
LEAVE_S = 15.0  # With the wait for the next question, within 20 s
ANSWER_S, ANSWER_BYTES = 2.0, 65_536  # A cloud's own service is a hop away, and says a few lines
AWS_TOKEN = "X-aws-ec2-metadata-token"


class Cloud(NamedTuple):
    """Where a cloud's notices are. `is_notice` reads what an answer with status 200 says."""

    name: str
    path: str
    headers: dict[str, str]
    is_notice: Callable[[str], bool]


def _is_azure_notice(said: str) -> bool:
    events: Any = json.loads(said)
    return any(event.get("EventType") == "Preempt" for event in events["Events"])


CLOUDS = (
    Cloud("AWS", "/latest/meta-data/spot/instance-action", {}, lambda said: "action" in json.loads(said)),
    Cloud(
        "Google",
        "/computeMetadata/v1/instance/preempted",
        {"Metadata-Flavor": "Google"},
        lambda said: said.strip() == "TRUE",
    ),
    Cloud("Azure", "/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"}, _is_azure_notice),
)


async def watch_notices(on_notice: Callable[[str], None], say: Callable[[str], None]) -> None:
    """Call `on_notice` once, with the cloud's name, when this machine is to be taken away. `say` gets a line if nothing
    answers here."""
    is_new = True
    async with ClientSession(METADATA, timeout=ClientTimeout(total=ANSWER_S), trust_env=False) as session:
        while True:
            heard = [await _notice_of(session, cloud) for cloud in CLOUDS]
            if True in heard:
                on_notice(CLOUDS[heard.index(True)].name)
                return
            if is_new and heard == [None] * len(CLOUDS):
                say("no cloud gives notices here: --spot only hands over long samples from time to time")
            is_new = False
            await asyncio.sleep(POLL_S)


async def _notice_of(session: ClientSession, cloud: Cloud) -> bool | None:
    """Return whether there is a notice; None if that cloud does not answer."""
    headers, is_there = cloud.headers, False
    if cloud.name == "AWS":  # Without a notice there is no such page
        token = await _asked(session, "PUT", "/latest/api/token", {f"{AWS_TOKEN}-ttl-seconds": "60"})
        headers, is_there = {AWS_TOKEN: token or ""}, token is not None
    said = await _asked(session, "GET", cloud.path, headers)
    with suppress(ValueError, TypeError, LookupError, AttributeError):  # Whatever answers there is no such cloud
        return cloud.is_notice(said) if said is not None else (False if is_there else None)
    return None


async def _asked(session: ClientSession, method: str, path: str, headers: dict[str, str]) -> str | None:
    """Return what was answered with status 200; None if that was not."""
    with suppress(ClientError, TimeoutError, UnicodeDecodeError):
        async with session.request(method, path, headers=headers, allow_redirects=False) as answer:
            body = b""
            while len(body) < ANSWER_BYTES and (more := await answer.content.readany()):
                body += more
            return body.decode() if answer.status == 200 else None
    return None
