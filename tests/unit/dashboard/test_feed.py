"""Messages to many readers: each one sees all of them once and in order, or a snapshot in place of those it missed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.dashboard.feed import OTHERS, READERS, PageFeed, Reader


@pytest.fixture
def feed() -> PageFeed:
    return PageFeed("boot")


def joined(feed: PageFeed, last_id: str = "", *, is_owner: bool = False) -> Reader:
    reader = feed.join(last_id, is_owner=is_owner)
    assert reader is not None
    return reader


def told(feed: PageFeed, reader: Reader) -> list[str]:
    """What the reader is given now; a snapshot is the newest number."""
    messages = feed.take(reader)
    if messages is None:
        reader.place = feed.newest
        return [f"snapshot {feed.newest}"]
    return [f"{one.number} {one.event} {one.data.decode()}" for one in messages]


def test_a_lost_connection_goes_on_where_it_was_unless_the_process_is_another(feed: PageFeed) -> None:
    for number in range(3):
        feed.publish("steps", b"%d" % number)
    assert told(feed, joined(feed, "boot-2")) == ["3 steps 2"]
    for unknown in ("before-2", "2", "boot-", "boot-x", "boot-4", "boot-²", "boot--1", "boot-" + "9" * 99):
        assert told(feed, joined(feed, unknown)) == ["snapshot 3"], unknown


def test_a_state_replaces_the_one_before_and_nothing_else_is_lost(feed: PageFeed) -> None:
    reader = joined(feed)
    told(feed, reader)
    for number in range(100):
        feed.publish("digest", b"state %d" % number)
        if number == 50:
            feed.publish("steps", b"s")
    assert told(feed, reader) == ["52 steps s", "101 digest state 99"]


def test_a_reader_that_never_reads_takes_no_memory_and_gets_a_snapshot_at_last() -> None:
    feed = PageFeed("boot", kept=10, kept_bytes=1000)
    slow, quick = joined(feed), joined(feed)
    told(feed, slow)
    told(feed, quick)
    for number in range(1, 10_000):
        feed.publish("steps", b"x" * 90)
        assert told(feed, quick) == [f"{number} steps {'x' * 90}"]
    assert len(feed._ring) == 10
    assert feed._nbytes == 900
    assert told(feed, slow) == ["snapshot 9999"]
    feed.publish("steps", b"x" * 5000)
    assert feed._nbytes == 0, "one that is larger than the ring is not kept"
    assert told(feed, quick) == ["snapshot 10000"]


def test_what_was_not_published_is_made_up_for_by_a_snapshot(feed: PageFeed) -> None:
    reader = joined(feed)
    told(feed, reader)
    feed.publish("steps", b"1")
    feed.forget()
    assert told(feed, reader) == ["snapshot 2"]
    assert told(feed, joined(feed, "boot-1")) == ["snapshot 2"]
    assert told(feed, joined(feed, "boot-2")) == []


def test_there_are_so_many_readers_and_one_that_leaves_makes_room(feed: PageFeed) -> None:
    """Those without the token leave the owner some places."""
    readers = [joined(feed) for _ in range(OTHERS)]
    assert feed.join("", is_owner=False) is None
    feed.readers.discard(readers[3])
    joined(feed)
    for _ in range(READERS - OTHERS):
        joined(feed, is_owner=True)
    assert feed.join("", is_owner=True) is None


@given(
    kept=st.integers(1, 6),
    deeds=st.lists(st.sampled_from(["steps", "digest", "read", "lose", "reconnect", "restart"]), max_size=60),
)
def test_every_message_is_seen_once_in_order_or_a_snapshot_has_it(kept: int, deeds: list[str]) -> None:
    """A reader that reads, loses what it was just given, and comes back with the last id that it saw."""
    feed = PageFeed("0", kept=kept, kept_bytes=10_000)
    reader: Reader | None = None
    last_id, counted, digest = "", 0, 0  # What the reader knows: steps so far, and the newest digest
    steps = digests = 0
    for deed in [*deeds, "reconnect", "read"]:
        match deed:
            case "steps":
                steps += 1
                feed.publish("steps", b"%d" % steps)
            case "digest":
                digests += 1
                feed.publish("digest", b"%d" % digests)
            case "restart":
                feed, reader = PageFeed(f"{feed.boot}0", kept=kept), None
            case "reconnect":
                reader = joined(feed, last_id)
            case "read" | "lose" if reader is not None:
                messages = feed.take(reader)
                if messages is None:
                    reader.place = feed.newest
                if deed == "lose":
                    reader = None
                    continue
                if messages is None:
                    counted, digest, last_id = steps, digests, f"{feed.boot}-{reader.place}"
                for one in messages or ():
                    if one.event == "steps":
                        assert int(one.data) == counted + 1
                        counted += 1
                    else:
                        assert int(one.data) > digest
                        digest = int(one.data)
                    last_id = f"{feed.boot}-{one.number}"
        assert len(feed._ring) <= kept
    assert (counted, digest) == (steps, digests)
