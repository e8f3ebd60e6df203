"""docs/privacy.md names every field that a node says about itself, and every file that it keeps."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from swarm.gossip.records import Record
from swarm.node.hello import Hello
from swarm.rollout.messages import Beat, LeaseRequest, Offer
from swarm.types import Address, Rollout

NAMED = set(re.findall(r"`([\w./-]+?)/?`", (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()))


@pytest.mark.parametrize("message", [Record, Address, Hello, Beat, Offer, LeaseRequest, Rollout])
def test_every_field_is_named(message: type[msgspec.Struct]) -> None:
    assert set(message.__struct_fields__) - NAMED == set()
