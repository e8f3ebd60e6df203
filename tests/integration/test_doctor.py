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
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from swarm.join.doctor import Check, examine
from swarm.net.signing import SigningKey, swarm_id_of
from swarm.node.bootstrap import JoinLine, read_join_line, write_join_line
from swarm.node.hello import Hello, hello_route
from swarm.types import Address
from tests.builders import KEY
from tests.integration.processes import PATIENCE_S, Learner, command, eventually, free_port, swarm_in
from tests.unit.node.test_bootstrap import hello_of, member

ROOT = Path(__file__).parents[2]
AS_OTHERS = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")  # Root may write everywhere
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a file system of its own")


class Examined:
    """What `doctor` found."""

    def __init__(self, checks: Sequence[Check]) -> None:
        self._checks = checks

    def fixes(self) -> dict[str, str]:
        """What is to be done, by what it is about."""
        return {check.about: check.fix for check in self._checks if check.fix}

    def what(self, about: str) -> str:
        return next(check.what for check in self._checks if check.about == about)


async def looked_at(state: Path, *bootstraps: str) -> Examined:
    """In this process, which is as the command's own but for what a test changes."""
    return Examined(await examine(bootstraps, "sampler", state))


def examined(*arguments: str, place: Sequence[str] = (), **variables: str) -> Examined:
    """What `doctor --json` says in a process of its own."""
    done = subprocess.run(
        [*place, sys.executable, "-m", "swarm", "doctor", "--json", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stderr == ""
    said = json.loads(done.stdout.splitlines()[-1])
    found = Examined([Check(**check) for check in said["checks"]])
    assert done.returncode == bool(found.fixes())
    assert said["fine"] == (not found.fixes())
    assert [one["fix"] for one in said["findings"]] == list(found.fixes().values())
    return found


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "")


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learner]:
    """A learner that encrypts and has published a version."""
    with swarm_in(tmp_path_factory.mktemp("swarm")) as swarm:
        one = swarm.lead("--tls")
        eventually(lambda: one.status()["version"], one, "a version")
        yield one


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


async def test_nothing_is_wrong_with_this_machine_and_its_learner(
    learner: Learner, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    found = await looked_at(state, learner.join_line())
    assert found.fixes() == {}
    assert "answers for swarm" in found.what("swarm")
    assert "of the weights came in" in found.what("line")
    assert "within two minutes" in found.what("clock")
    assert "https_proxy" in found.what("proxy")
    assert not await asyncio.to_thread(state.exists)


def test_a_person_reads_a_line_a_check_and_the_fix_below(state: Path) -> None:
    done = command("doctor", "--bootstrap", f"127.0.0.1:{free_port()}", "--state-dir", str(state))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    (wrong,) = (number for number, line in enumerate(lines) if line.startswith("FIX "))
    assert "nothing listens there" in lines[wrong]
    assert (
        lines[wrong + 1].strip() == "-> ask the person who leads the swarm whether the learner runs, and on which port"
    )


async def test_a_wrong_port_a_wrong_name_and_a_proxy_that_nodes_do_not_use(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = f"127.0.0.1:{free_port()}"
    fixes = (await looked_at(state, wrong)).fixes()
    assert fixes.keys() == {"swarm"}
    assert "on which port" in fixes["swarm"]
    assert "correct the name" in (await looked_at(state, "no-such-host.invalid")).fixes()["swarm"]
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    behind = (await looked_at(state, wrong)).fixes()
    assert behind.keys() == {"swarm", "proxy"}
    assert "open TCP connections itself" in behind["proxy"]


async def test_an_old_join_line_asks_for_the_new_one(learner: Learner, state: Path) -> None:
    line = read_join_line(learner.join_line())
    other = SigningKey.generate().public_bytes
    old = write_join_line(JoinLine(swarm=swarm_id_of(other), learner_key=other, addresses=line.addresses))
    assert "its new join line" in (await looked_at(state, old)).fixes()["swarm"]


async def test_another_program_on_that_port_is_no_echo_node(state: Path) -> None:
    async def hello(_: web.Request) -> web.Response:
        return web.Response(text="<html>", content_type="text/html")

    async with served(web.get("/{anything:.*}", hello)) as address:
        assert "another program has that port" in (await looked_at(state, address.authority)).fixes()["swarm"]


@pytest.mark.slow
async def test_a_line_that_swallows_packets_names_the_firewall(state: Path) -> None:
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        # The system answers nobody else while these wait to be accepted.
        for waiting in (first, second):
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        found = await looked_at(state, f"https://127.0.0.1:{full.getsockname()[1]}")
        assert "firewall or router" in found.fixes()["swarm"]


@pytest.mark.parametrize(("hours", "which"), [(1, "behind"), (-1, "ahead of")])
async def test_a_clock_that_differs_from_the_swarms(hours: int, which: str, state: Path) -> None:
    async with member(KEY, now=time.time() + 3600 * hours) as address:
        found = await looked_at(state, address.url)
    assert found.fixes().keys() == {"clock"}
    assert which in found.what("clock")
    assert "timedatectl set-ntp true" in found.fixes()["clock"]


async def test_a_member_without_encryption_where_it_is_expected(state: Path) -> None:
    async with member(KEY) as address:
        found = await looked_at(state, f"https://127.0.0.1:{address.port}")
    assert "http://HOST:PORT, at home alone" in found.fixes()["swarm"]


@pytest.mark.parametrize("nonsense", [b"[]", b"5", b'{"newest": [1]}', b"[" * 100_000])
async def test_what_a_member_makes_up_harms_no_other_check(nonsense: bytes, state: Path) -> None:
    """Its hello is a node's, its status is none."""

    async def status(_: web.Request) -> web.Response:
        return web.Response(body=nonsense, content_type="application/json")

    said: list[Hello] = []
    async with served(hello_route(lambda knock, caller: said[0]), web.get("/v1/status", status)) as address:
        said.append(hello_of(KEY, address))
        found = await looked_at(state, address.url)
    assert found.fixes() == {}
    assert "answers for swarm" in found.what("swarm")


@asynccontextmanager
async def served(*routes: web.RouteDef) -> AsyncIterator[Address]:
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield Address(host="127.0.0.1", port=runner.addresses[0][1])
    finally:
        await runner.cleanup()


def test_a_state_directory_that_its_user_may_not_use(tmp_path: Path) -> None:
    shut = tmp_path / "shut"
    shut.mkdir(mode=0o555)
    found = examined("--state-dir", str(shut), place=AS_OTHERS if os.geteuid() == 0 else ())
    assert found.fixes() == {"state": f'sudo chown -R "$USER" {shut}, or pass another --state-dir'}
    (tmp_path / "file").write_text("")
    assert "a file is in its way" in examined("--state-dir", str(tmp_path / "file" / "state")).fixes()["state"]


def mounted(size: str, where: Path, before: str = "") -> tuple[str, ...]:
    """A place with a small file system of its own at `where`, in which `before` was done."""
    script = f'mount -t tmpfs -o size={size} none {where} && {{ {before}exec "$@"; }}'
    return ("unshare", "--mount", "sh", "-c", script, "sh")


@pytest.mark.slow
@needs_root
def test_a_machine_without_a_network(state: Path) -> None:
    fixes = examined("--bootstrap", "192.0.2.1", "--state-dir", str(state), place=("unshare", "--net")).fixes()
    assert fixes == {"swarm": "correct the address, or connect this machine to the network (ip route shows it)"}


@pytest.mark.slow
@needs_root
def test_a_full_disk_says_how_much_to_free(tmp_path: Path) -> None:
    place = mounted("96m", tmp_path, f"head -c 1G /dev/zero >{tmp_path}/filling 2>/dev/null; ")
    fixes = examined("--state-dir", str(tmp_path), place=place).fixes()
    assert fixes.keys() == {"state", "disk"}
    assert fixes["state"].startswith("free some space there")
    assert fixes["disk"].startswith("free 67.2 MB there")


@pytest.mark.slow
@needs_root
def test_weights_that_have_no_room_in_memory_wear_the_disk(learner: Learner, state: Path) -> None:
    place = mounted("128k", Path("/dev/shm"))
    found = examined("--bootstrap", learner.join_line(), "--state-dir", str(state), place=place)
    assert "each version rewrites 0.0 GB" in found.what("wear")
    assert found.fixes().keys() == {"wear"}
    assert "size=1G /dev/shm; in a container --shm-size" in found.fixes()["wear"]


@pytest.mark.slow
def test_a_driver_that_shows_a_gpu_to_a_torch_that_cannot_use_it(tmp_path: Path, state: Path) -> None:
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\necho "0, GPU-1, NVIDIA of tests, 8.9"\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    found = examined("--state-dir", str(state), PATH=f"{tmp_path}:{os.environ['PATH']}", CUDA_VISIBLE_DEVICES="0")
    assert "cannot use the GPU" in found.what("driver")
    assert found.fixes().keys() == {"driver"}
    assert re.search("pip uninstall torch|update the NVIDIA driver", found.fixes()["driver"])


def test_few_open_files_and_long_paths_of_sockets(tmp_path: Path) -> None:
    deep = tmp_path / ("long" * 25)
    deep.mkdir()
    place = ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh")
    found = examined("--state-dir", str(tmp_path / "state"), place=place, TMPDIR=str(deep))
    assert found.fixes() == {"sockets": "export TMPDIR=/tmp", "files": "ulimit -n 4096, in the shell that runs join"}
