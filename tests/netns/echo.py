"""An echo server to run in a host: echo.py PORT. Says "ready" once it listens."""

from __future__ import annotations

import asyncio
import sys


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while words := await reader.read(65_536):
        writer.write(words)
        await writer.drain()
    writer.close()


async def _serve(port: int) -> None:
    server = await asyncio.start_server(_echo, "0.0.0.0", port)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
