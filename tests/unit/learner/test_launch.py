"""A rank and the torchrun that started it."""

from __future__ import annotations

import os

import pytest

from swarm.learner.ranks import TORCHRUN_VARIABLE
from swarm.learner.sharded import check_parent


def test_a_rank_whose_torchrun_went_while_it_started_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TORCHRUN_VARIABLE, str(os.getpid()))
    with pytest.raises(SystemExit, match="is gone"):
        check_parent()


def test_a_rank_whose_torchrun_is_there_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TORCHRUN_VARIABLE, str(os.getppid()))
    check_parent()
    # On another machine a person starts torchrun itself.
    monkeypatch.delenv(TORCHRUN_VARIABLE)
    check_parent()
