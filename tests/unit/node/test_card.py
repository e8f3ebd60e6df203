"""The card of a run: signed by its learner, harmless to show, and silent about its machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.node.hello import CARD_BYTES, Card, card_lines, card_of, open_card, sign_card
from tests.builders import KEY, OTHER_KEY


def test_only_the_learners_card_is_shown() -> None:
    card = card_of("tiny", "copy", weights_bytes=10**9, sample_tokens=35)
    assert card == Card(model="tiny", task="copy", weights_bytes=10**9, sample_tokens=35)
    sealed = sign_card(card, KEY)
    assert open_card(sealed, KEY.public_bytes) == card
    assert open_card(sealed, OTHER_KEY.public_bytes) is None
    assert open_card(b"", KEY.public_bytes) is None
    assert open_card(sealed[:-1] + bytes([sealed[-1] ^ 1]), KEY.public_bytes) is None


@pytest.mark.parametrize(
    ("model", "task", "told"),
    [
        ("/home/ann/secret/qwen", "file:/home/ann/secret/q.jsonl", ("qwen", "file:q.jsonl")),
        ("./models/qwen", "python:./mine/task.py", ("qwen", "python:task.py")),
        ("examples/arithmetic", "jsonl:examples/questions.jsonl", ("arithmetic", "jsonl:questions.jsonl")),
        ("Qwen/Qwen3-4B", "hf:openai/gsm8k", ("Qwen/Qwen3-4B", "hf:openai/gsm8k")),
    ],
)
def test_no_paths_are_told(monkeypatch: pytest.MonkeyPatch, model: str, task: str, told: tuple[str, str]) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    card = open_card(sign_card(card_of(model, task), KEY), KEY.public_bytes)
    assert card is not None
    assert (card.model, card.task) == told


def test_the_longest_card_fits_its_cap() -> None:
    name = "\U0001f600" * 90
    sealed = sign_card(card_of(name, name, weights_bytes=2**53, sample_tokens=2**53, about=2 * name), KEY)
    assert len(sealed) <= CARD_BYTES
    assert open_card(sealed, KEY.public_bytes) is not None


def test_a_volunteer_is_told_the_bytes_before_they_come() -> None:
    lines = list(card_lines(Card(model="Qwen3-4B", task="sort", weights_bytes=8 * 10**9), draws=True, has_base=False))
    assert lines[0] == 'this swarm trains "Qwen3-4B" on the task "sort"'
    assert "about 5.5 GB" in lines[1]
    assert "8.0 GB of memory for the weights, in addition to the engine's own, and up to 13.5 GB of disk" in lines[1]
    assert "Ctrl-C" in lines[-1]
    (_, based, _) = card_lines(Card(model="m", task="t", weights_bytes=10**6), draws=False, has_base=True)
    assert "only what differs from --base" in based
    assert "engine" not in based


def test_a_volunteer_is_told_what_it_is_for_in_its_owners_words_and_without_escapes() -> None:
    card = Card(model="\x1b[2Jm", task="t\nrm -rf", about='to teach sums"\n\x1b[2J')
    lines = list(card_lines(card, draws=True, has_base=False))
    assert lines[0].endswith('; its owner says: "to teach sums\'??[2J"')
    assert all(line.isprintable() for line in lines)
