"""`gymnasium:ENV_ID`: an environment of gymnasium in words, if it has discrete actions and words for what one sees."""

from __future__ import annotations

import re
from random import Random
from typing import Any

from swarm.environments.base import Environment, Messages, Step
from swarm.errors import UserError
from swarm.extras import require

MAX_TURNS = 50  # Of an environment that sets no limit itself


class GymnasiumText(Environment):
    """What one sees is drawn, if the environment draws text, and printed. The last action that a turn names counts. A
    turn that names none takes a random one, because to do nothing may be worth something. An episode is solved if it
    ends with a reward over 0."""

    description = "an environment of gymnasium with discrete actions, in words: gymnasium:ENV_ID"
    max_new_tokens = 256

    def __init__(self, *, env_id: str) -> None:
        self.name = f"gymnasium:{env_id}"
        require("gymnasium", self.name)
        import gymnasium

        try:
            modes = gymnasium.make(env_id).metadata.get("render_modes", ())
            self._env: Any = gymnasium.make(env_id, render_mode="ansi" if "ansi" in modes else None)
        except (gymnasium.error.Error, ImportError) as error:
            raise UserError(f"{self.name} cannot be made: {' '.join(str(error).split())}") from error
        seen, does, spec = self._env.observation_space, self._env.action_space, self._env.spec
        if type(does).__name__ != "Discrete" or ("ansi" not in modes and "Box" in str(seen)):
            raise UserError(f"{self.name} has no words for its observations {seen} or its actions {does}: take another")
        self.max_turns = spec.max_episode_steps or MAX_TURNS
        self._actions = [str(int(does.start) + number) for number in range(int(does.n))]

    def reset(self, seed: int) -> Messages:
        self._draw = Random(f"gymnasium/{seed}")
        seen, _ = self._env.reset(seed=seed)
        return [("user", f"{self._look(seen)}\nEach turn, say the number of one action: {', '.join(self._actions)}.")]

    def step(self, text: str) -> Step:
        said = [word for word in re.findall(r"-?\w+", text) if word in self._actions]
        action = said[-1] if said else self._draw.choice(self._actions)
        seen, reward, terminated, truncated, _ = self._env.step(int(action))
        messages, parts = [("user", f"You did {action}.\n{self._look(seen)}")], {"invalid_moves": float(not said)}
        ends = {"done": terminated or truncated, "solved": terminated and reward > 0}
        return Step(messages=messages, rewards=(float(reward),), parts=parts, **ends)

    def _look(self, seen: Any) -> str:
        """The drawing, with brackets around what is coloured, and the observation."""
        drawn = "" if self._env.render_mode is None else self._env.render().rstrip() + "\n"
        # Colours may be nested: the passenger's within the taxi's.
        return re.sub(r"(?:\x1b\[[0-9;]*m)+([^\x1b]+)(?:\x1b\[0m)+", r"[\1]", drawn) + f"You see {seen}"
