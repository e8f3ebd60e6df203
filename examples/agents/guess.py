"""An agent that plays textarena's GuessTheNumber (from 1 to 20, in ten guesses, with hints) with the tiny model, which
reads digits: what it has said and heard so far is one text that goes on.

    pip install textarena==0.7.4
    bin/echo-node lead --config examples/agents/guess.toml
"""

import re

import textarena

HINTS = {"higher": "9", "lower": "0"}


def row(number):
    """Every number from 1 to 20 is some seed's; held-out games have seeds of their own."""
    return {"seed": number % 2**32}


async def play(row, client):
    game = textarena.make("GuessTheNumber-v0-raw")
    game.reset(num_players=1, seed=row["seed"])
    text, guesses, done = "", 0, False
    while not done:
        text += "="
        answer = await client.completions.create(model=client.model, prompt=text, max_tokens=2)
        said = answer.choices[0].text
        text += said
        guesses += 1
        done, _ = game.step(f"[{said}]" if re.fullmatch("[0-9]{2}", said) else said)
        _, heard = game.get_observation()
        hint = re.search("higher|lower", str(heard[-1]))
        text += HINTS[hint[0]] if hint else ""
    rewards, _ = game.close()
    return {"reward": rewards[0], "guesses": guesses, "won": float(rewards[0] == 1)}
