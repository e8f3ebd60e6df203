"""What the floods send: it has to come as far as the check that it is to cost."""

from __future__ import annotations

import pytest

from benchmarks.floods import RECORDS, records
from swarm.errors import ProtocolError
from swarm.gossip.records import GOSSIP_BODY_BYTES, Exchange, open_record, read_record, unpack_digest
from swarm.net.signing import SigningKey
from swarm.wire import encode
from tests.builders import SWARM_OF_KEY


@pytest.mark.parametrize("forged", [True, False])
def test_invented_records_are_newer_each_time_and_only_their_signature_may_be_wrong(forged: bool) -> None:
    keys = [SigningKey.generate() for _ in range(RECORDS)]
    orders = []
    for sequence in (0, 1):
        digest, sealed = records(keys, SWARM_OF_KEY, sequence, forged=forged)
        assert len(encode(Exchange(digest=digest, records=sealed, asks=0))) <= GOSSIP_BODY_BYTES
        read = [read_record(one, SWARM_OF_KEY) for one in sealed]
        assert [(one.prefix, one.order, 0) for one in read] == list(unpack_digest(digest))
        orders.append(read[0].order)
        if forged:
            with pytest.raises(ProtocolError, match="the signature of this record"):
                open_record(sealed[0], SWARM_OF_KEY)
        else:
            open_record(sealed[0], SWARM_OF_KEY)
    assert orders[0] < orders[1]
