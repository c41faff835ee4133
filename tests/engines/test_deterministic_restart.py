"""With train.deterministic a restart changes not one bit on any number of ranks."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from rivals import Course, Pictures, small_config

from pipeline.distributed.world import World


def restarted(world: World) -> list[bool]:
    """Whether the losses of this rank and all state are those of a run that was not stopped."""
    train = {"epochs": 2, "deterministic": True}
    config, pictures = small_config({"name": "prototypical", "warmup_steps": 1}, train=train), Pictures(60)
    run = Course(config, pictures, world=world)
    losses, states = [], []
    for found in run.steps():
        losses.append(found)
        states.append(run.state())
    again = Course(config, pictures, world=world)
    again.load(states[3])
    rest = list(again.steps())
    state = again.state()["method"]
    return [rest == losses[4:], *(torch.equal(state[key], value) for key, value in run.state()["method"].items())]


@pytest.mark.dist
def test_on_three_ranks() -> None:
    """Of two ranks a sum is the same in either order; from three on, the place of a gradient in its bucket counts."""
    for of_rank in on_ranks(3, restarted):
        assert all(of_rank)
