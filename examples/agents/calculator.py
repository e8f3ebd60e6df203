"""An agent with a tool, for examples/smollm2.py's model of 135M parameters: it is asked for a product, which it cannot
compute, and learns to call the calculator and to say what comes back.

    MODEL=$(bin/python examples/smollm2.py)
    bin/echo-node lead --model $MODEL --task agent:examples/agents/calculator.py:play
"""

import json
import random

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
# The chat template of this model shows no tools, so the agent shows how one is called.
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": %d, "b": %d}}</tool_call>'
BEGINNING = [
    {"role": "system", "content": "You multiply with a tool, and then say the result."},
    {"role": "user", "content": "What is 21 times 14?"},
    {"role": "assistant", "content": CALL % (21, 14)},
    {"role": "tool", "content": "294"},
    {"role": "assistant", "content": "21 times 14 is 294."},
]


def row(number):
    draw = random.Random(number)
    return {"a": draw.randint(11, 99), "b": draw.randint(11, 99)}


async def play(row, client):
    a, b = row["a"], row["b"]
    messages = [*BEGINNING, {"role": "user", "content": f"What is {a} times {b}?"}]
    earned = {"called": 0.0, "rightly": 0.0, "right": 0.0}
    for _ in range(2):
        answer = await client.chat.completions.create(model=client.model, messages=messages, tools=TOOLS, max_tokens=40)
        said = answer.choices[0].message
        messages.append(said)
        if not said.tool_calls:
            earned["right"] = 0.6 * (str(a * b) in (said.content or "").replace(",", ""))
            break
        for call in said.tool_calls:
            try:
                given = json.loads(call.function.arguments)
                result = str(int(given["a"]) * int(given["b"]))
            except (ValueError, TypeError, KeyError) as fault:
                result = f"error: {fault}"
            earned["called"] = 0.1
            earned["rightly"] = 0.3 * (result == str(a * b))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return {"reward": sum(earned.values()), **{name: float(part > 0) for name, part in earned.items()}}
