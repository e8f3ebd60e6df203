"""An agent for the tiny model, which knows digits: copy a number, and then the half that is asked for. Two calls."""

import random


def row(number):
    """Row `number` of data without end; held-out rows have numbers that training never reaches."""
    return {"digits": "".join(random.Random(number).choices("0123456789", k=3))}


async def play(row, client):
    digits = row["digits"]
    answer = await client.completions.create(model=client.model, prompt=f"{digits}=")
    said = answer.choices[0].text
    return {"reward": sum(a == b for a, b in zip(said, digits)) / 3, "right": said == digits}
