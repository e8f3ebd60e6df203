"""Every cap on what comes in as rollouts, on a real server: a clear refusal, a counter, and nothing kept of it."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from swarm.errors import ProtocolError
from swarm.net import client
from swarm.rollout import api
from swarm.rollout.intake import INLINE_BYTES, Claimed, open_submission
from swarm.rollout.messages import Answer, Submission
from swarm.wire import ROLLOUT_BODY_BYTES, ROLLOUT_MAX_RATIO, ROLLOUT_UNPACKED_BYTES, compress, encode
from tests.builders import rollout
from tests.learner_face import ALICE, Learner, leases_for


async def answer_to(learner: Learner, body: bytes) -> str:
    """What the learner says of a body; fails if it takes it."""
    with pytest.raises(ProtocolError) as refused:
        await learner.peers[ALICE].post("/v1/steps", body, cap_bytes=1 << 20, timeout_s=20.0)
    status = learner.service.status()
    assert (status["submissions_in_hand"], status["submission_bytes_in_hand"]) == (0, 0)
    return str(refused.value)


async def first_line(reader: Any) -> str:
    line: bytes = await reader.readline()
    return line.decode().strip()


# -- bytes ---------------------------------------------------------------------------------------------------


async def test_a_body_that_states_more_than_its_cap_is_refused_unread(learner: Learner) -> None:
    reader, writer = await learner.begin_submission(ALICE, stated=ROLLOUT_BODY_BYTES + 1)
    assert await first_line(reader) == "HTTP/1.1 413 Request Entity Too Large"
    writer.close()


async def test_a_body_that_unpacks_to_more_than_its_cap_is_refused_unpacked(learner: Learner) -> None:
    draw, zeros = random.Random(0), bytes(60 * 1024)
    content = b"".join(draw.randbytes(4096) + zeros for _ in range(ROLLOUT_UNPACKED_BYTES // (64 * 1024) + 1))
    body = compress(content)
    assert len(content) < ROLLOUT_MAX_RATIO * len(body)
    assert f"claim to unpack to {len(content)}" in await answer_to(learner, body)


@pytest.mark.parametrize("body", [b"", b"no zstd", compress(b"no submission")], ids=["empty", "no zstd", "no message"])
async def test_what_is_no_submission_is_refused(learner: Learner, body: bytes) -> None:
    assert "refused with status 400" in await answer_to(learner, body)


async def test_a_large_submission_is_opened_in_a_thread_with_the_same_verdicts(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_in: list[threading.Thread] = []

    def open_here(body: bytes, vocab_size: int) -> tuple[str, list[Claimed]]:
        opened_in.append(threading.current_thread())
        return open_submission(body, vocab_size)

    monkeypatch.setattr(api, "open_submission", open_here)
    (one,) = await leases_for(learner, ALICE, 2)
    good = [Answer(rollout(group_id="t0", index=spec.index)) for spec in one.samples]
    too_long = Answer(rollout(group_id="t0", index=1, tokens=[3] * 100_000))
    given = (good[0], too_long, good[1])
    assert len(encode(Submission(node=ALICE, answers=given))) > INLINE_BYTES
    verdicts = await learner.client(ALICE).submit(given)
    assert [verdict.verdict for verdict in verdicts] == ["accepted", "malformed", "accepted"]
    await learner.client(ALICE).submit(good)
    assert [thread is threading.main_thread() for thread in opened_in] == [False, True]


# -- time ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"a few bytes"], ids=["nothing", "a little"])
async def test_a_body_that_does_not_come_gives_its_place_back(
    learner: Learner, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(client, "GRACE_S", 0.0)
    reader, writer = await learner.begin_submission(ALICE, sent=sent)
    assert await first_line(reader) == "HTTP/1.1 408 Request Timeout"
    assert learner.service.status()["submissions_in_hand"] == 0
    writer.close()
