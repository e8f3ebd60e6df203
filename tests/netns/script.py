"""The command line of `bin/netns-swarm`. Every failure is one line on stderr and exit status 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from tests.netns.hosts import Host, Hosts, NetnsError, attach, create, remove, swarms, sweep

FAILED = 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise NetnsError(f"{message} (see --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="netns-swarm", description="Shaped network namespaces for a swarm on one machine. Root only.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser, metavar="COMMAND")

    def add(name: str, words: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=words, description=words)
        command.add_argument("--name", default="default", help="which swarm; default: %(default)s")
        return command

    up = add("up", "make hosts 1 to N, each with a network of its own")
    up.add_argument("--hosts", type=int, required=True, metavar="N")
    up.add_argument("--up-mbit", type=float, metavar="RATE", help="what a host may send; default: no limit")
    up.add_argument("--down-mbit", type=float, metavar="RATE", help="what a host may receive; default: no limit")
    add("exec", "run a command in a host: exec 3 -- CMD...").add_argument("host", type=int)
    add("list", "print every host, its address, what it is cut into and whether it is shielded")
    partition = add("partition", "cut between groups, as in 1,2 3,4,5; hosts in no group stay together")
    partition.add_argument("groups", nargs="+", metavar="GROUP")
    add("heal", "undo partition")
    for name, words in (("shield", "drop TCP connections opened towards a host"), ("unshield", "undo shield")):
        add(name, words).add_argument("host", type=int)
    add("down", "end what runs in the hosts and remove them")
    return parser


def _group(swarm: Hosts, word: str) -> list[Host]:
    if not all(number.isdecimal() for number in word.split(",")):
        raise NetnsError(f"a group is host numbers with commas between them, not {word!r}")
    return [swarm.host(int(number)) for number in word.split(",")]


def _print(swarm: Hosts) -> None:
    bridges = swarm.groups()
    for host in swarm:
        notes = [bridges[host.number], *(["shielded"] if swarm.shielded(host) else [])]
        print(host.number, host.address, host.namespace, *notes)


def _execute(host: Host, command: Sequence[str]) -> NoReturn:
    whole = host.command(command)
    os.execv(whole[0], whole)


def _serve(options: argparse.Namespace, command: Sequence[str]) -> None:
    if options.command == "up":
        sweep()
        _print(create(options.name, options.hosts, up_mbit=options.up_mbit, down_mbit=options.down_mbit))
        return
    if options.command == "down":
        remove(options.name)
        return
    if options.command == "list" and options.name not in swarms():
        return
    swarm = attach(options.name)
    if options.command == "exec":
        _execute(swarm.host(options.host), command)
    elif options.command == "list":
        _print(swarm)
    elif options.command == "partition":
        swarm.partition([_group(swarm, word) for word in options.groups])
    elif options.command == "heal":
        swarm.heal()
    elif options.command == "shield":
        swarm.shield(swarm.host(options.host))
    else:
        swarm.unshield(swarm.host(options.host))


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before the first -- is ours."""
    words = list(arguments)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def main(arguments: Sequence[str]) -> int:
    words, command = _split(arguments)
    try:
        options = _parser().parse_args(words)
        if (options.command == "exec") != bool(command):
            raise NetnsError("a command to run comes after exec and --, as in: exec 3 -- ls -l")
        if os.geteuid() != 0:
            raise NetnsError("needs root")
        _serve(options, command)
    except NetnsError as error:
        print(f"netns-swarm: {error}", file=sys.stderr)
        return FAILED
    return 0
