"""Signing clients for the nodes that this one calls, kept open while they are in use."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from swarm.http import PeerClient
from swarm.signing import SigningKey
from swarm.types import Address, NodeId

MAX_CLIENTS = 256
"""Clients kept: connections close by themselves when idle, a client's session with its server is worth keeping."""


class PeerPool:
    """One client for each node and address; the one unused for longest is closed when there are too many."""

    def __init__(self, key: SigningKey) -> None:
        self._key = key
        self._clients: OrderedDict[tuple[NodeId, Address], PeerClient] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def at(self, node: NodeId, address: Address) -> PeerClient:
        """The client that signs for `node` at `address`."""
        client = self._clients.get((node, address))
        if client is None:
            client = self._clients[node, address] = PeerClient(address, key=self._key, server=node)
            if len(self._clients) > MAX_CLIENTS:
                self._close(self._clients.popitem(last=False)[1])
        self._clients.move_to_end((node, address))
        return client

    async def close(self) -> None:
        for client in self._clients.values():
            self._close(client)
        self._clients.clear()
        await asyncio.gather(*self._closing)

    def _close(self, client: PeerClient) -> None:
        task = asyncio.get_running_loop().create_task(client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
