"""`gymnasium:ENV_ID`: an environment of gymnasium in words, if its actions are discrete and its observations can be
written as text."""

from __future__ import annotations

import re
from random import Random
from typing import Any

from swarm.environments.base import Environment, Messages, Step
from swarm.errors import UserError
from swarm.extras import require

MAX_TURNS = 50  # For an environment that sets no limit itself


class GymnasiumText(Environment):
    """Shows the environment's drawing, if it draws text, and the observation. The last action that a turn names counts.
    A turn that names none takes a random action, because doing nothing might be rewarded. An episode is solved if its
    last reward is over 0."""

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
        return [("user", f"{self._view(seen)}\nEach turn, say the number of one action: {', '.join(self._actions)}.")]

    def step(self, text: str) -> Step:
        named = [word for word in re.findall(r"-?\w+", text) if word in self._actions]
        action = named[-1] if named else self._draw.choice(self._actions)
        seen, reward, terminated, truncated, _ = self._env.step(int(action))
        messages, parts = [("user", f"You did {action}.\n{self._view(seen)}")], {"invalid_moves": float(not named)}
        ends = {"done": terminated or truncated, "solved": terminated and reward > 0}
        return Step(messages=messages, rewards=(float(reward),), parts=parts, **ends)

    def _view(self, seen: Any) -> str:
        """The drawing, with brackets around coloured parts, and the observation."""
        drawn = "" if self._env.render_mode is None else self._env.render().rstrip() + "\n"
        # Colours may be nested: the passenger's within the taxi's.
        return re.sub(r"(?:\x1b\[[0-9;]*m)+([^\x1b]+)(?:\x1b\[0m)+", r"[\1]", drawn) + f"You see {seen}"
