"""A reward that asks a frozen model whether an answer is right. What it was asked before it does not ask again.

bin/echo-node serve MODEL --address judge &        # from the directory where the learner is started
bin/echo-node lead questions.jsonl --model M --reward examples/judge.py:score
"""

import functools
import json

import openai

QUESTION = "Question: {}\nRight answer: {}\nGiven answer: {}\nIs the given answer right? Say yes or no."


@functools.lru_cache(maxsize=100_000)
def verdict(question):
    with open("judge/inference.json") as file:
        place = json.load(file)
    with openai.OpenAI(base_url=f"{place['url']}/v1", api_key=place["token"]) as client:
        # At temperature 0 the same question has the same answer, so that it can be kept.
        answer = client.completions.create(model="policy", prompt=question, max_tokens=4, temperature=0)
    return float("yes" in answer.choices[0].text.lower())


def score(prompt, completion, answer):
    return verdict(QUESTION.format(prompt, answer, completion))
