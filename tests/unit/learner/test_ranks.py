"""What several ranks decide without one another: who computes which rows, and on which device."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from swarm.errors import UserError
from swarm.learner.batch import micro_batches
from swarm.learner.messages import TrainerConfig
from swarm.learner.process import torchrun_options
from swarm.learner.ranks import TORCHRUN_VARIABLE
from swarm.learner.sharded import Sharded, _own_device, check_parent
from swarm.settings import LeadConfig
from tests.unit.rows import CPU, row


class Alone(Sharded):
    """A rank that never met the others."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [[], [5], [7, 7, 7, 7, 7], [100, 1, 1, 1, 1, 96], list(range(1, 40))])
def test_every_row_is_computed_once_and_no_rank_has_much_more_than_another(tokens: list[int], count: int) -> None:
    shares = [Alone(rank, count).share(tokens) for rank in range(count)]
    assert sorted(place for share in shares for place in share) == list(range(len(tokens)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(tokens[place] for place in share) for share in shares]
    # The last row that the fullest rank got went to the one that had least.
    assert max(loads) - min(loads) <= max(tokens, default=0)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 7])
def test_ranks_hold_the_rows_that_torch_gives_them(rows: int, count: int) -> None:
    tensor = torch.arange(rows)
    held = [tensor[Alone(0, count)._rows(tensor, rank)].tolist() for rank in range(count)]
    chunks = [chunk.tolist() for chunk in tensor.chunk(count)]
    assert held == chunks + [[]] * (count - len(chunks))


def test_a_pass_without_weight_keeps_its_tokens_alone() -> None:
    hostile = replace(row([1], [2, 3], advantage=float("nan")), reference=torch.tensor([-5.0, -5.0]))
    (part,) = micro_batches([hostile], TrainerConfig(), CPU)
    made = part.without_weight()
    assert made.token_ids is part.token_ids
    assert made.proximal is None
    assert made.reference is not None
    for zeros in (made.behaviour, made.mask, made.advantages, made.reference):
        assert zeros.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("wanted", "there", "words"),
    [
        ("auto", 1, "--trainer-ranks 2: this machine has 1 CUDA device, and each rank takes one"),
        ("cuda:0", 2, 'device = "cuda:0" is one device'),
    ],
)
def test_ranks_without_a_device_each_are_one_line(
    monkeypatch: pytest.MonkeyPatch, wanted: str, there: int, words: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("swarm.learner.sharded.pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    with pytest.raises(UserError, match=words) as caught:
        _own_device(wanted)
    assert "\n" not in str(caught.value)


def test_torchrun_is_told_of_this_machine_and_of_others() -> None:
    assert torchrun_options(LeadConfig()) == ()
    assert torchrun_options(LeadConfig(trainer_ranks=4)) == ("--standalone", "--nproc-per-node", "4")
    words = " ".join(torchrun_options(LeadConfig(trainer_ranks=8, trainer_machines="2@10.0.0.1:29500")))
    assert words == "--nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500 --nproc-per-node 8"


def test_a_rank_whose_torchrun_went_while_it_started_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TORCHRUN_VARIABLE, str(os.getpid()))
    with pytest.raises(SystemExit, match="is gone"):
        check_parent()
    monkeypatch.setenv(TORCHRUN_VARIABLE, str(os.getppid()))
    check_parent()
    monkeypatch.delenv(TORCHRUN_VARIABLE)  # On another machine a person starts torchrun itself
    check_parent()
