"""One libtorrent session of the broadcast benchmark, tuned as somebody who knows it would tune it for this.

It speaks JSON lines: seeder `prepared`, then on the command `publish` it adds its torrent and says `published`; a
peer adds the torrent at once and says `listening`, `connected` with its number of connections, and `finished` with
the moment at which the last piece had passed its hash check. Both take `connect HOST...`. Times are of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

import libtorrent

PORT = 6881
PIECE_BYTES = 64 * 1024
FILE_NAME = "payload.bin"

WAIT_MS = 50
"""How long a command may lie unread."""

SETTINGS: dict[str, Any] = {
    "alert_mask": libtorrent.alert.category_t.status_notification | libtorrent.alert.category_t.error_notification,
    # Nothing but direct TCP between peers that are told of one another.
    "enable_dht": False,
    "enable_lsd": False,
    "enable_upnp": False,
    "enable_natpmp": False,
    "enable_outgoing_utp": False,
    "enable_incoming_utp": False,
    "out_enc_policy": libtorrent.enc_policy.disabled,
    "in_enc_policy": libtorrent.enc_policy.disabled,
    "min_reconnect_time": 1,
    "connection_speed": 200,
    # Everybody may always upload to everybody; rarest first from the first piece on.
    "choking_algorithm": libtorrent.choking_algorithm_t.fixed_slots_choker,
    "unchoke_slots_limit": -1,
    "unchoke_interval": 1,
    "initial_picker_threshold": 0,
    # The rarest piece wherever it lies: runs of neighbouring pieces (for the sake of disks) cost a fifth of the time.
    "whole_pieces_threshold": 0,
    # Short queues: late decisions, little that is sent twice.
    "tick_interval": 100,
    "max_out_request_queue": 8,
    "request_queue_time": 1,
    "send_buffer_watermark": 128 * 1024,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="where this session keeps its file")
    parser.add_argument("--torrent", type=Path, required=True, help="made by the seeder, read by the others")
    parser.add_argument("--seed", action="store_true")
    options = parser.parse_args()
    session = libtorrent.session({**SETTINGS, "listen_interfaces": f"0.0.0.0:{PORT}"})
    commands = _commands()
    torrent = None
    if options.seed:
        options.torrent.write_bytes(_make_torrent(options.directory))
        _say("prepared")
    else:
        torrent = _add(session, options.torrent, options.directory, seed=False)
        _say("listening")
    connections = 0
    while True:
        session.wait_for_alert(WAIT_MS)
        for alert in session.pop_alerts():
            if isinstance(alert, libtorrent.torrent_finished_alert) and not options.seed:
                _say("finished", monotonic_s=time.monotonic())
        match _next(commands):
            case ["publish"]:
                torrent = _add(session, options.torrent, options.directory, seed=True)
                _say("published", monotonic_s=time.monotonic())
            case ["connect", *addresses] if torrent is not None:
                for address in addresses:
                    torrent.connect_peer((address, PORT))
            case ["end"]:
                return
        if torrent is not None and (now := torrent.status().num_peers) != connections:
            connections = now
            _say("connected", connections=connections)


def _make_torrent(directory: Path) -> bytes:
    files = libtorrent.file_storage()
    libtorrent.add_files(files, str(directory / FILE_NAME))
    torrent = libtorrent.create_torrent(files, PIECE_BYTES, libtorrent.create_torrent.v1_only)
    libtorrent.set_piece_hashes(torrent, str(directory))
    found: bytes = libtorrent.bencode(torrent.generate())
    return found


def _add(session: Any, torrent: Path, directory: Path, *, seed: bool) -> Any:
    parameters = libtorrent.add_torrent_params()
    parameters.ti = libtorrent.torrent_info(str(torrent))
    parameters.save_path = str(directory)
    parameters.flags &= ~libtorrent.torrent_flags.auto_managed & ~libtorrent.torrent_flags.paused
    if seed:
        parameters.flags |= libtorrent.torrent_flags.seed_mode
    return session.add_torrent(parameters)


def _commands() -> queue.SimpleQueue[list[str]]:
    """Lines of stdin as words; their end is a command too."""
    commands: queue.SimpleQueue[list[str]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            commands.put(line.split())
        commands.put(["end"])

    threading.Thread(target=read, daemon=True).start()
    return commands


def _next(commands: queue.SimpleQueue[list[str]]) -> list[str]:
    return [] if commands.empty() else commands.get()


def _say(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


if __name__ == "__main__":
    main()
