"""What a learner shows to anybody, if its user wants that (`public_page`, off by default): how the run goes, who gave
most to it, and how to join. No prompts, no addresses of other nodes, nothing about this machine."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from swarm.extras import installs
from swarm.node.hello import card_of, purpose
from swarm.report.words import ID_LENGTH, JOIN_LENGTH, finite, number, part, parts, words

STATE_S = 1.0  # Between two looks at the node, however many ask: with a thousand samplers one takes 8 ms
NAME_LENGTH = 32  # As long as a nickname may be
MAX_LEADERS = 100


class PublicState:
    """The body of /public/state.json for the learner whose `status` and `config` these are."""

    def __init__(
        self,
        status: Callable[[], Mapping[str, Any]],
        config: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._status, self._config, self._clock = status, config, clock
        self._made_at, self._body = -math.inf, b""

    def body(self) -> bytes:
        if self._clock() - self._made_at >= STATE_S:
            self._made_at = self._clock()
            self._body = json.dumps(public_state(self._status(), self._config), allow_nan=False).encode()
        return self._body


def public_state(status: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Samplers have the names that their owners chose, else the beginning of their ids. What they gave counts since the
    run began; those that are barred are left out."""
    card = card_of(words(config, "model"), words(config, "task"), about=words(config, "about"))
    cost, leaders, barred = part(status, "cost"), status.get("leaders"), status.get("barred")
    given = [one for one in leaders if isinstance(one, list) and len(one) == 4] if isinstance(leaders, list) else []
    named = [dict(zip(("node", "name", "rollouts", "tokens"), one, strict=True)) for one in given]
    tested: list[Mapping[str, Any]] = parts(status, "held_out") or [{}]
    return {
        "run": f"{card.model} on {card.task}",
        "model": card.model,
        "task": card.task,
        "what": purpose(card),
        "state": words(status, "state", NAME_LENGTH),
        **{name: int(number(status, name)) for name in ("step", "steps")},
        "reward": finite(part(status, "metrics").get("reward")),
        **{name: finite(tested[at].get("exact_match")) for name, at in (("held_out_first", 0), ("held_out", -1))},
        "samplers": len(parts(status, "samplers")),
        "rollouts": int(number(cost, "rollouts_accepted")),
        "tokens": int(number(cost, "tokens_accepted")),
        "join": words(status, "join", JOIN_LENGTH),
        "installs": installs(),
        "leaders": [
            {
                "name": words(one, "name", NAME_LENGTH) or words(one, "node", ID_LENGTH),
                **{name: int(number(one, name)) for name in ("rollouts", "tokens")},
            }
            for one in named[:MAX_LEADERS]
            if not (isinstance(barred, list) and one["node"] in barred)
        ],
    }
