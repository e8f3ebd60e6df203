"""Where a model runs."""

from __future__ import annotations

import pytest
import torch

from swarm.errors import UserError
from swarm.learner.device import pick_device


def test_the_cpu_is_taken_where_there_is_nothing_else() -> None:
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="a Mac has what this wants to miss")
def test_the_gpu_of_a_mac_is_refused_elsewhere_in_one_line() -> None:
    with pytest.raises(UserError, match=r"^--device mps cannot be used here \(.*\); auto, cpu, .* mps may be$"):
        pick_device("mps")


@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="mps is on Macs with Apple silicon alone")
def test_the_gpu_of_a_mac_is_taken_by_name() -> None:
    assert pick_device("mps").type == "mps"
