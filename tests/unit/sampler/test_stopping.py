"""What of an unfinished completion can be handed over, where strings end one: no stop may have begun in it."""

from __future__ import annotations

import pytest

from swarm.learner.tiny import tiny_tokenizer
from swarm.sampler.stopping import StopStrings, handed
from swarm.types import Span
from tests.builders import v

TOKENIZER = tiny_tokenizer().backend_tokenizer
SPANS = (Span(version=v(0), start=0, end=3), Span(version=v(1), start=3, end=6))


def row(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        ("123456", None, "123456"),
        ("123456", ["99"], "123456"),
        ("123456", ["67"], "12345"),
        ("123456", ["4567"], "123"),
        ("123456", ["4567", "34"], "12"),
        ("123456", ["7", "6"], "12345"),
        ("123456", ["56"], "1234"),
    ],
)
def test_what_is_kept_ends_before_the_first_token_of_a_stop(text: str, stops: list[str] | None, kept: str) -> None:
    found = handed(row(text), [-1.0] * len(text), SPANS, StopStrings(TOKENIZER, stops) if stops else None)
    assert (found.finish, found.token_ids) == ("handed", b"".join(i.to_bytes(4, "little") for i in row(kept)))
    assert len(found.logprobs) == len(found.token_ids)
    assert found.spans[-1].end == len(kept)
    assert len(found.spans) == 1 + (len(kept) > 3)


def test_of_nothing_that_can_be_kept_nothing_is_handed_over() -> None:
    assert handed(row("12"), [-1.0] * 2, SPANS[:1], StopStrings(TOKENIZER, ["123"])).fault == "time limit"
    assert handed([], [], (), None).fault == "time limit"
