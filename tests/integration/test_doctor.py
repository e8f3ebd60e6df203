"""`doctor` on set-ups that are broken on purpose: each names its own fix, and nothing else is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from swarm.net.signing import SigningKey, swarm_id_of
from swarm.node.bootstrap import JoinLine, read_join_line, write_join_line
from swarm.node.hello import Hello, hello_route
from swarm.types import Address
from tests.builders import KEY
from tests.integration.processes import PATIENCE_S, Learner, eventually, free_port, swarm_in
from tests.unit.node.test_bootstrap import hello_of, member

ROOT = Path(__file__).parents[2]
AS_OTHERS = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")  # Root may write everywhere
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a file system of its own")


class Examined:
    """What `doctor --json` said."""

    def __init__(self, *arguments: str, place: Sequence[str] = (), **variables: str) -> None:
        self.done = subprocess.run(
            [*place, sys.executable, "-m", "swarm", "doctor", "--json", *arguments],
            env=os.environ | {"PYTHONPATH": str(ROOT), "no_proxy": ""} | variables,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert self.done.stderr == ""
        self.said: dict[str, Any] = json.loads(self.done.stdout.splitlines()[-1])

    def fixes(self) -> dict[str, str]:
        """What is to be done, by what it is about."""
        found = {check["about"]: check["fix"] for check in self.said["checks"] if check["fix"]}
        assert self.done.returncode == bool(found)
        assert self.said["fine"] == (not found)
        assert [one["fix"] for one in self.said["findings"]] == list(found.values())
        return found

    def what(self, about: str) -> str:
        return next(str(check["what"]) for check in self.said["checks"] if check["about"] == about)


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learner]:
    """A learner that encrypts and has published a version."""
    with swarm_in(tmp_path_factory.mktemp("swarm")) as swarm:
        one = swarm.lead("--tls")
        eventually(lambda: one.status()["version"], one, "a version")
        yield one


@pytest.fixture
def state(tmp_path: Path) -> tuple[str, str]:
    return "--state-dir", str(tmp_path / "state")


def test_nothing_is_wrong_with_this_machine_and_its_learner(learner: Learner, state: tuple[str, str]) -> None:
    examined = Examined("--bootstrap", learner.join_line(), *state, https_proxy="http://127.0.0.1:1")
    assert examined.fixes() == {}
    assert "answers for swarm" in examined.what("swarm")
    assert "of the weights came in" in examined.what("line")
    assert "within two minutes" in examined.what("clock")
    assert "https_proxy" in examined.what("proxy")
    assert not Path(state[1]).exists()


def test_a_person_reads_a_line_a_check_and_the_fix_below(state: tuple[str, str]) -> None:
    given = [sys.executable, "-m", "swarm", "doctor", "--bootstrap", f"127.0.0.1:{free_port()}", *state]
    done = subprocess.run(given, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    (wrong,) = (number for number, line in enumerate(lines) if line.startswith("FIX "))
    assert "nothing listens there" in lines[wrong]
    assert (
        lines[wrong + 1].strip() == "-> ask the person who leads the swarm whether the learner runs, and on which port"
    )


@pytest.mark.slow
def test_a_wrong_port_a_wrong_name_and_a_proxy_that_nodes_do_not_use(state: tuple[str, str]) -> None:
    given = ("--bootstrap", f"127.0.0.1:{free_port()}", *state)
    fixes = Examined(*given).fixes()
    assert fixes.keys() == {"swarm"}
    assert "on which port" in fixes["swarm"]
    assert "correct the name" in Examined("--bootstrap", "no-such-host.invalid", *state).fixes()["swarm"]
    behind = Examined(*given, HTTPS_PROXY="http://proxy:3128").fixes()
    assert behind.keys() == {"swarm", "proxy"}
    assert "open TCP connections itself" in behind["proxy"]


def test_an_old_join_line_asks_for_the_new_one(learner: Learner, state: tuple[str, str]) -> None:
    line = read_join_line(learner.join_line())
    other = SigningKey.generate().public_bytes
    old = write_join_line(JoinLine(swarm=swarm_id_of(other), learner_key=other, addresses=line.addresses))
    assert "its new join line" in Examined("--bootstrap", old, *state).fixes()["swarm"]


def test_another_program_on_that_port_is_no_echo_node(tmp_path: Path, state: tuple[str, str]) -> None:
    port = free_port()
    serving = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    with subprocess.Popen(serving, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as other:
        try:
            until = time.monotonic() + PATIENCE_S
            while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
                assert time.monotonic() < until
            assert (
                "another program has that port" in Examined("--bootstrap", f"127.0.0.1:{port}", *state).fixes()["swarm"]
            )
        finally:
            other.kill()


@pytest.mark.slow
def test_a_line_that_swallows_packets_names_the_firewall(state: tuple[str, str]) -> None:
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        # The system answers nobody else while these wait to be accepted.
        for waiting in (first, second):
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        given = f"https://127.0.0.1:{full.getsockname()[1]}"
        assert "firewall or router" in Examined("--bootstrap", given, *state).fixes()["swarm"]


@pytest.mark.parametrize(("hours", "which"), [(1, "behind"), (-1, "ahead of")])
async def test_a_clock_that_differs_from_the_swarms(hours: int, which: str, state: tuple[str, str]) -> None:
    async with member(KEY, now=time.time() + 3600 * hours) as address:
        examined = await asyncio.to_thread(Examined, "--bootstrap", address.url, *state)
    assert examined.fixes().keys() == {"clock"}
    assert which in examined.what("clock")
    assert "timedatectl set-ntp true" in examined.fixes()["clock"]


async def test_a_member_without_encryption_where_it_is_expected(state: tuple[str, str]) -> None:
    async with member(KEY) as address:
        examined = await asyncio.to_thread(Examined, "--bootstrap", f"https://127.0.0.1:{address.port}", *state)
    assert "http://HOST:PORT, at home alone" in examined.fixes()["swarm"]


@pytest.mark.parametrize("nonsense", [b"[]", b"5", b'{"newest": [1]}', b"[" * 100_000])
async def test_what_a_member_makes_up_harms_no_other_check(nonsense: bytes, state: tuple[str, str]) -> None:
    """Its hello is a node's, its status is none."""

    async def status(_: web.Request) -> web.Response:
        return web.Response(body=nonsense, content_type="application/json")

    said: list[Hello] = []
    app = web.Application()
    app.add_routes([hello_route(lambda knock, caller: said[0]), web.get("/v1/status", status)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = Address(host="127.0.0.1", port=runner.addresses[0][1])
    said.append(hello_of(KEY, address))
    try:
        examined = await asyncio.to_thread(Examined, "--bootstrap", address.url, *state)
    finally:
        await runner.cleanup()
    assert examined.fixes() == {}
    assert "answers for swarm" in examined.what("swarm")


def test_a_state_directory_that_its_user_may_not_use(tmp_path: Path) -> None:
    shut = tmp_path / "shut"
    shut.mkdir(mode=0o555)
    examined = Examined("--state-dir", str(shut), place=AS_OTHERS if os.geteuid() == 0 else ())
    assert examined.fixes() == {"state": f'sudo chown -R "$USER" {shut}, or pass another --state-dir'}
    (tmp_path / "file").write_text("")
    in_the_way = Examined("--state-dir", str(tmp_path / "file" / "state"))
    assert "a file is in its way" in in_the_way.fixes()["state"]


@contextmanager
def mounted(size: str, where: Path) -> Iterator[tuple[str, ...]]:
    """A place with a small file system of its own at `where`, of which 1 MB is free if there is so much."""
    filling = f"head -c 1G /dev/zero >{where}/filling 2>/dev/null; " if size == "96m" else ""
    yield (
        "unshare",
        "--mount",
        "sh",
        "-c",
        f'mount -t tmpfs -o size={size} none {where} && {{ {filling}exec "$@"; }}',
        "sh",
    )


@pytest.mark.slow
@needs_root
def test_a_machine_without_a_network(state: tuple[str, str]) -> None:
    fixes = Examined("--bootstrap", "192.0.2.1", *state, place=("unshare", "--net")).fixes()
    assert fixes == {"swarm": "correct the address, or connect this machine to the network (ip route shows it)"}


@pytest.mark.slow
@needs_root
def test_a_full_disk_says_how_much_to_free(tmp_path: Path) -> None:
    with mounted("96m", tmp_path) as place:
        fixes = Examined("--state-dir", str(tmp_path), place=place).fixes()
    assert fixes.keys() == {"state", "disk"}
    assert fixes["state"].startswith("free some space there")
    assert fixes["disk"].startswith("free 67.2 MB there")


@pytest.mark.slow
@needs_root
def test_weights_that_have_no_room_in_memory_wear_the_disk(learner: Learner, state: tuple[str, str]) -> None:
    with mounted("128k", Path("/dev/shm")) as place:
        examined = Examined("--bootstrap", learner.join_line(), *state, place=place)
    assert "each version rewrites 0.0 GB" in examined.what("wear")
    assert examined.fixes().keys() == {"wear"}
    assert "size=1G /dev/shm; in a container --shm-size" in examined.fixes()["wear"]


@pytest.mark.slow
def test_a_driver_that_shows_a_gpu_to_a_torch_that_cannot_use_it(tmp_path: Path, state: tuple[str, str]) -> None:
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\necho "0, GPU-1, NVIDIA of tests, 8.9"\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    examined = Examined(*state, PATH=f"{tmp_path}:{os.environ['PATH']}", CUDA_VISIBLE_DEVICES="0")
    assert "cannot use the GPU" in examined.what("driver")
    assert examined.fixes().keys() == {"driver"}
    assert re.search("pip uninstall torch|update the NVIDIA driver", examined.fixes()["driver"])


def test_few_open_files_and_long_paths_of_sockets(tmp_path: Path) -> None:
    deep = tmp_path / ("long" * 25)
    deep.mkdir()
    place = ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh")
    examined = Examined("--state-dir", str(tmp_path / "state"), place=place, TMPDIR=str(deep))
    assert examined.fixes() == {"sockets": "export TMPDIR=/tmp", "files": "ulimit -n 4096, in the shell that runs join"}
