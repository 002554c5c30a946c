"""What an open request says of its past: with whom it does not want to be placed again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.lifecycles import PLACED, D, P

from coordinator.events import Cause, Loss
from coordinator.live import Attempt
from kvrelay.requests import WorkerId


@pytest.mark.parametrize("worker", [P, D])
@pytest.mark.parametrize("cause", [Cause.LOST, Cause.GAVE_UP, Cause.NOT_TAKEN])
def test_the_worker_of_the_loss_is_avoided_and_the_other_one_is_not(worker: WorkerId, cause: Cause) -> None:
    assert Attempt(0.0, placement=PLACED, loss=Loss(cause, worker, "")).to_avoid() == (worker,)


def test_of_a_hand_off_that_failed_both_are_avoided_until_the_blocks_have_landed() -> None:
    attempt = Attempt(0.0, placement=PLACED, loss=Loss(Cause.FAILED, D, ""))
    assert attempt.to_avoid() == (P, D)
    assert replace(attempt, landed_at=1.0).to_avoid() == (D,)
    alone = replace(PLACED, prefill=None)
    assert replace(attempt, placement=alone).to_avoid() == (D,)


def test_nobody_is_avoided_before_a_loss() -> None:
    assert Attempt(0.0, placement=PLACED).to_avoid() == ()
