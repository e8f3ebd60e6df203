"""Micro-batches: each place predicts the token after it, and no row is lost, cut or mixed with another."""

from __future__ import annotations

import pytest
import torch

from swarm.learner.batch import MicroBatch, Row, micro_batches
from swarm.learner.messages import TrainerConfig
from tests.unit.rows import CPU, grouped_rows, random_rows, row

ROWS = [row([1, 5, 6], [7, 8, 2], staleness=2), row([1, 5, 6], [9]), row([1], [3, 4, 5, 6, 7], advantage=-1.0)]


def cut(rows: list[Row], tokens: int | None, *, packing: bool = False) -> list[MicroBatch]:
    return micro_batches(rows, TrainerConfig.model_construct(tokens_per_micro_batch=tokens, packing=packing), CPU)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("tokens", [None, 12, 4])
def test_each_place_of_a_micro_batch_predicts_the_token_after_it(tokens: int | None, packing: bool) -> None:
    for part in cut(ROWS, tokens, packing=packing):
        flat, at = part.token_ids.flatten().tolist(), 0
        for number, count in zip(part.numbers, part.counts, strict=True):
            of = ROWS[number]
            whole = of.token_ids.tolist()
            for place in range(count):
                here = int(part.places[at + place])
                # The whole row up to this place stands before it, and the target behind.
                seen = of.prompt_tokens + place
                assert flat[here + 1 - seen : here + 1] == whole[:seen]
                assert int(part.targets[at + place]) == whole[seen]
                assert part.behaviour[at + place] == -1.0 - place
                assert part.advantages[at + place] == of.advantage
                assert part.staleness[at + place] == of.staleness
                if part.positions is not None:
                    assert part.positions.flatten()[here] == seen - 1
            at += count


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("tokens", [16, 40, 64, 1000])
def test_every_row_is_in_one_micro_batch_within_the_budget(tokens: int, packing: bool) -> None:
    rows = random_rows(60)
    parts = cut(rows, tokens, packing=packing)
    assert sorted(number for part in parts for number in part.numbers) == list(range(60))
    for part in parts:
        assert part.token_ids.numel() <= tokens or len(part.numbers) == 1
        for number, values in part.by_row(part.targets).items():
            assert torch.equal(values, rows[number].token_ids[rows[number].prompt_tokens :])


@pytest.mark.parametrize("tokens", [None, 30])
def test_a_row_sees_its_prompt_and_itself_alone_on_a_line_that_it_shares(tokens: int | None) -> None:
    rows = grouped_rows(4, 3)
    rules = TrainerConfig.model_construct(tokens_per_micro_batch=tokens, shares_beyond=1000)
    parts = micro_batches(rows, rules, CPU)
    assert sorted(number for part in parts for number in part.numbers) == list(range(12))
    assert any(len(part.numbers) > len(part.token_ids) for part in parts)
    for part in parts:
        assert part.attention is not None
        assert part.positions is not None
        width = part.token_ids.shape[1]
        for number, places in part.by_row(part.places).items():
            line = int(places[0]) // width
            for place, at in enumerate((places % width).tolist()):
                sees = part.attention[line, 0, at]
                seen = rows[number].prompt_tokens + place
                assert part.token_ids[line][sees].tolist() == rows[number].token_ids[:seen].tolist()
                assert part.positions[line][sees].tolist() == list(range(seen))
        for number, values in part.by_row(part.targets).items():
            assert torch.equal(values, rows[number].token_ids[rows[number].prompt_tokens :])


def test_what_rows_begin_with_is_computed_once_across_prompts_and_in_answers() -> None:
    rows = [row([1, 5, 6, 7], [3, 4, 2]), row([1, 5, 6, 8], [3, 4, 2]), row([1, 5, 6, 7], [3, 9, 2])]
    (part,) = micro_batches([*rows, *rows], TrainerConfig(shares_beyond=1000), CPU)
    assert part.token_ids.tolist() == [[1, 5, 6, 7, 3, 4, 9, 8, 3, 4]]
    assert len(part.targets) == 18, "and each row is trained on as it would be alone"


def test_rows_of_one_micro_batch_are_about_as_long_as_one_another() -> None:
    rows = random_rows(200)
    real = sum(len(one.token_ids) - 1 for one in rows)  # The last token predicts none that counts
    padded = sum(part.token_ids.numel() for part in cut(rows, 128))
    packed = sum(part.token_ids.numel() for part in cut(rows, 128, packing=True))
    assert packed == real
    assert padded < 1.1 * real
    assert sum(part.token_ids.numel() for part in cut(rows, None)) > 1.4 * real


def test_equal_rows_stay_in_order_and_one_longer_than_the_budget_is_alone() -> None:
    parts = cut([row([1], [3]), row([1], list(range(12))), row([1], [4])], 8)
    assert [part.numbers for part in parts] == [(1,), (0, 2)]
    rows = [row([1], [3, 4]) for _ in range(5)]
    assert [part.numbers for part in cut(rows, 4)] == [(0, 1), (2, 3), (4,)]
    assert [part.numbers for part in cut(rows, None)] == [(0, 1, 2, 3, 4)]
    assert cut([], 6) == cut([], None) == []
