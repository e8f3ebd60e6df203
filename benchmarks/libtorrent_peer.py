"""One libtorrent session of the broadcast benchmark, tuned as somebody who knows it would tune it for this.

It speaks JSON lines: `listening` once it has the torrent, `connected` with its number of connections that have shaken
hands, and, a peer, `finished` with the moment (of CLOCK_MONOTONIC) at which the last piece had passed its hash check.
Both take `connect HOST...`; a peer asks for nothing before it is told `start`.
"""

from __future__ import annotations

import argparse
import json
import os
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
"""Between two looks at the connections, at most."""

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
    # Or those that do not ask yet would part from one another and from the seeder.
    "close_redundant_connections": False,
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
    if options.seed:
        options.torrent.write_bytes(_make_torrent(options.directory))
    session = libtorrent.session({**SETTINGS, "listen_interfaces": f"0.0.0.0:{PORT}"})
    torrent = _add(session, options.torrent, options.directory, seed=options.seed)
    threading.Thread(target=_obey, args=(torrent,), daemon=True).start()
    _say("listening")
    connections = 0
    while True:
        session.wait_for_alert(WAIT_MS)
        for alert in session.pop_alerts():
            if isinstance(alert, libtorrent.torrent_finished_alert) and not options.seed:
                _say("finished", monotonic_s=time.monotonic())
        if (now := _connections(torrent)) != connections:
            connections = now
            _say("connected", connections=connections)


def _obey(torrent: Any) -> None:
    """Do what the lines of stdin say, each at once; end with them."""
    for line in sys.stdin:
        match line.split():
            case ["connect", *addresses]:
                for address in addresses:
                    torrent.connect_peer((address, PORT))
            case ["start"]:
                torrent.unset_flags(libtorrent.torrent_flags.upload_mode)
    os._exit(0)


def _connections(torrent: Any) -> int:
    opening = libtorrent.peer_info.connecting | libtorrent.peer_info.handshake
    return sum(not peer.flags & opening for peer in torrent.get_peer_info())


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
    flags = libtorrent.torrent_flags
    parameters.flags |= flags.seed_mode if seed else flags.upload_mode
    return session.add_torrent(parameters)


def _say(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


if __name__ == "__main__":
    main()
