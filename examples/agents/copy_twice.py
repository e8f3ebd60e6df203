"""An agent of two calls for the tiny model, which knows digits: copy a number, then the digit after another one."""

import random


def row(number):
    """Row `number` of data without end. Held-out rows have numbers that training never comes to."""
    return {"digits": "".join(random.Random(number).choices("0123456789", k=3))}


async def play(row, client):
    digits = row["digits"]

    async def said(prompt, most):
        answer = await client.completions.create(model=client.model, prompt=prompt, max_tokens=most)
        return answer.choices[0].text

    copied = await said(f"{digits}=", 3)
    again = await said(f"{digits}={copied}{digits[0]}=", 1)
    right = sum(a == b for a, b in zip(copied + again, digits + digits[0], strict=False))
    return {"reward": right / 4 if right < 4 else 1.0, "copied": copied == digits, "again": again == digits[0]}
