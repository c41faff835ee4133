"""How many pictures pass the network at a time in surveys and evaluation changes nothing in a training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks
from rivals import Course, Pictures
from test_rivals_together import config_of

from pipeline.distributed.world import World

SURVEYING = ("prototypical", "rrl", "sfa")


def trained(world: World, eval_batch: int) -> dict[str, Any]:
    """Evaluation of every epoch and all state at the end; in double precision, lest rounding grows."""
    found = {}
    for name in SURVEYING:
        config = config_of(name, data={"eval_batch": eval_batch}, model={"norm": "batch"} if world.size == 1 else {})
        run = Course(config, Pictures(29), world=world, double=True)
        losses = list(run.steps())
        history = [{k: v for k, v in past.items() if not k.startswith("time/")} for past in run.trainer.history]
        found[name] = losses, history, run.state()["method"]
    return found


def agree(some: dict[str, Any], others: dict[str, Any]) -> None:
    for name, (losses, history, state) in some.items():
        other_losses, other_history, other_state = others[name]
        for one, other in [*zip(losses, other_losses, strict=True), *zip(history, other_history, strict=True)]:
            assert one == pytest.approx(other, rel=1e-8, abs=1e-11), name
        for key, value in state.items():
            assert torch.allclose(value.double(), other_state[key].double(), atol=1e-6), (name, key)


def test_on_one_rank() -> None:
    agree(trained(World(), 5), trained(World(), 0))


@pytest.mark.dist
def test_on_two_ranks() -> None:
    agree(on_ranks(2, trained, 4)[0], on_ranks(2, trained, 0)[0])
