"""The join line: whole or refused with one sentence."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import UserError
from swarm.node.bootstrap import CHECK_BYTES, PREFIX, JoinLine, read_join_line, write_join_line
from swarm.types import Address
from swarm.wire import digest, encode
from tests.swarmers import LEARNER, THE_SWARM, address, key

LINE = JoinLine(swarm=THE_SWARM, learner_key=LEARNER.public_bytes, addresses=(address(1), address(2)))
TEXT = write_join_line(LINE)


def checked(body: bytes) -> str:
    """A join line whose checksum is right, whatever it says."""
    return PREFIX + base64.urlsafe_b64encode(body + digest(body)[:CHECK_BYTES]).decode().rstrip("=")


def test_a_join_line_comes_back_as_it_was_also_the_longest() -> None:
    assert read_join_line(f"  {TEXT}\n") == LINE
    assert TEXT.startswith("echo1:")
    assert len(TEXT.split()) == 1
    names = tuple(Address(host="n" * 200, port=65_535, fingerprint=bytes(32)) for _ in range(8))
    longest = JoinLine(swarm=THE_SWARM, learner_key=LEARNER.public_bytes, addresses=names)
    assert read_join_line(write_join_line(longest)) == longest


@pytest.mark.parametrize("cut", range(len(PREFIX), len(TEXT)))
def test_a_join_line_that_was_cut_is_refused(cut: int) -> None:
    with pytest.raises(UserError, match="copy the whole line"):
        read_join_line(TEXT[:cut])


@given(at=st.integers(len(PREFIX), len(TEXT) - 1), other=st.characters(max_codepoint=255))
def test_a_character_that_was_altered_is_seen(at: int, other: str) -> None:
    altered = TEXT[:at] + other + TEXT[at + 1 :]
    try:
        assert read_join_line(altered) == LINE
    except UserError:
        return
    # The last character may carry bits that mean nothing, and white space at the end is no part of the line.
    assert altered.strip() == TEXT or at == len(TEXT) - 1


@given(st.text(max_size=200))
def test_no_other_text_is_a_join_line(text: str) -> None:
    with pytest.raises(UserError):
        read_join_line(text)


def line(*addresses: Address, key: bytes = LEARNER.public_bytes) -> JoinLine:
    return JoinLine(swarm=THE_SWARM, learner_key=key, addresses=addresses)


@pytest.mark.parametrize(
    "line",
    [
        line(address(1), key=key(1).public_bytes),
        line(),
        line(Address(host="a b", port=1)),
        line(address(1), key=b"short"),
    ],
    ids=["another learner", "nowhere to begin", "no host", "no key"],
)
def test_a_line_that_contradicts_itself_is_refused_in_spite_of_its_checksum(line: JoinLine) -> None:
    with pytest.raises(UserError, match="damaged"):
        read_join_line(checked(encode(line)))
