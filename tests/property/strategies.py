"""Values of every message type, drawn within the limits that the types state."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import strategies as st

import swarm.broadcast.version.manifest
import swarm.gossip.reachability
import swarm.gossip.records
import swarm.net.sessions
import swarm.net.signing
import swarm.node.bootstrap
import swarm.node.hello
import swarm.rollout.messages
import swarm.types
from swarm.types import Observed, Score
from swarm.wire import Message

MODULES = (
    swarm.types,
    swarm.rollout.messages,
    swarm.broadcast.version.manifest,
    swarm.node.hello,
    swarm.node.bootstrap,
    swarm.gossip.records,
    swarm.gossip.reachability,
    swarm.net.signing,
    swarm.net.sessions,
)

MAX_ITEMS = 4
"""Longest collection that is drawn: limits on size have tests of their own."""


def message_types() -> list[type[Message]]:
    """Every kind of message between nodes, by name. Score and Observed have maps: they stay on one machine."""
    found = {
        name: thing
        for module in MODULES
        for name, thing in vars(module).items()
        if isinstance(thing, type) and issubclass(thing, Message) and thing not in (Message, Score, Observed)
    }
    return [found[name] for name in sorted(found)]


@cache
def messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Valid messages of one kind."""
    hints = get_type_hints(kind, include_extras=True)
    fields = {name: _values(hints[name]) for name in kind.__struct_fields__}
    return st.fixed_dictionaries(fields).map(lambda values: kind(**values))


def _values(hint: Any) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        (limits,) = [extra for extra in arguments[1:] if isinstance(extra, msgspec.Meta)]
        return _limited(arguments[0], limits)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is Union or type(hint).__name__ == "UnionType":
        return st.one_of(*map(_values, arguments))
    if isinstance(hint, type) and issubclass(hint, Message):
        return messages(hint)
    return _limited(hint, msgspec.Meta())


def _limited(kind: Any, limits: msgspec.Meta) -> st.SearchStrategy[Any]:
    low, high = limits.min_length or 0, limits.max_length
    most = MAX_ITEMS + low if high is None else min(high, MAX_ITEMS + low)
    if get_origin(kind) is tuple and Ellipsis not in get_args(kind):
        return st.tuples(*map(_values, get_args(kind)))
    if get_origin(kind) is tuple:
        return st.lists(_values(get_args(kind)[0]), min_size=low, max_size=most).map(tuple)
    if get_origin(kind) is dict:
        return st.dictionaries(*map(_values, get_args(kind)), min_size=low, max_size=most)
    if limits.pattern is not None:
        return st.from_regex(limits.pattern, fullmatch=True)
    if kind is str:
        return st.text(min_size=low, max_size=min(high or 20, 20))
    if kind is bytes:
        return st.binary(min_size=low, max_size=max(low, min(high or 40, 40)))
    if kind is bool:
        return st.booleans()
    if kind is int:
        low_value = -(2**63) if limits.ge is None else int(limits.ge)
        return st.integers(low_value, 2**63 - 1 if limits.le is None else int(limits.le))
    if kind is float:
        return st.floats(min_value=limits.ge, max_value=limits.le, allow_nan=False)
    assert kind is type(None), f"no values for {kind}"
    return st.none()
