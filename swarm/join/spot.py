"""Notices by which a cloud says that it will take away a machine that it rents out for less.

AWS gives two minutes, Google and Azure about 30 s; all of them tell the machine itself, at one address that no router
carries. A node asks there every POLL_S, and leaves within LEAVE_S of a notice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout

METADATA = "http://169.254.169.254"
"""Constant: an address that a peer or a file could name would let them have this machine ask anything."""

POLL_S = 4.0
LEAVE_S = 15.0  # With the wait for the next question, within 20 s
ANSWER_S, ANSWER_BYTES = 2.0, 65_536  # A cloud's own service is a hop away, and says a few lines
AWS_TOKEN = "X-aws-ec2-metadata-token"

CLOUDS: dict[str, tuple[str, dict[str, str]]] = {
    "AWS": ("/latest/meta-data/spot/instance-action", {}),
    "Google": ("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}),
    "Azure": ("/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"}),
}
"""Where each cloud's notices are, and what it wants to be told."""


async def watch_notices(on_notice: Callable[[str], None], say: Callable[[str], None]) -> None:
    """Call `on_notice` once, with the cloud's name, when this machine is to be taken away. `say` gets a line if nothing
    answers here."""
    is_new = True
    async with ClientSession(METADATA, timeout=ClientTimeout(total=ANSWER_S), trust_env=False) as session:
        while True:
            heard = {cloud: await _notice_of(session, cloud) for cloud in CLOUDS}
            if noticed := [cloud for cloud, is_notice in heard.items() if is_notice]:
                on_notice(noticed[0])
                return
            if is_new and set(heard.values()) == {None}:
                say("no cloud gives notices here: --spot only hands over long samples from time to time")
            is_new = False
            await asyncio.sleep(POLL_S)


async def _notice_of(session: ClientSession, cloud: str) -> bool | None:
    """Return whether there is a notice; None if that cloud does not answer."""
    (path, headers), no_notice = CLOUDS[cloud], None
    if cloud == "AWS":  # Without a notice there is no such page
        token = await _asked(session, "PUT", "/latest/api/token", {f"{AWS_TOKEN}-ttl-seconds": "60"})
        headers, no_notice = {AWS_TOKEN: token or ""}, None if token is None else False
    if (said := await _asked(session, "GET", path, headers)) is None:
        return no_notice
    if cloud == "Google":
        return said.strip() == "TRUE"
    with suppress(ValueError, TypeError, LookupError, AttributeError):  # Whatever answers there is no such cloud
        found: Any = json.loads(said)
        return "action" in found if cloud == "AWS" else any(one["EventType"] == "Preempt" for one in found["Events"])
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
