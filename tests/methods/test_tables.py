"""Tables with a row for every sample, of which each rank holds a part: ELR's memory of earlier predictions."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from rivals import Course, Pictures, small_config
from test_rivals_together import parts_of

from pipeline.checkpoints.checkpointer import read_checkpoint
from pipeline.config import Config
from pipeline.distributed.world import World
from pipeline.training.build import build

SAMPLES, BEFORE = 29, 3  # two steps in an epoch: a run is stopped inside the second one


def train_part(world: World, name: str, state: Any, steps: int | None) -> dict[str, Any]:
    """Go on from a state (None: start), for some steps (None: to the end)."""
    run = Course(small_config({"name": name}, train={"epochs": 3}), Pictures(SAMPLES), world=world, double=True)
    if state:
        run.load(state)
    losses = list(islice(run.steps(), steps))
    held = [len(run.method.get_buffer(table)) for table in run.method.tables]
    return {"losses": losses, "state": run.state(), "held": held, "beliefs": parts_of(run.method.beliefs)}


@pytest.mark.dist
@pytest.mark.parametrize("name", ["elr", "elr_plus"])
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 1), (1, 3)])
def test_a_checkpoint_of_any_number_of_ranks_goes_on_on_any_other(name: str, before: int, after: int) -> None:
    whole = on_ranks(1, train_part, name, None, None)[0]
    first = on_ranks(before, train_part, name, None, BEFORE)
    rest = on_ranks(after, train_part, name, first[0]["state"], None)
    for step, parts in enumerate(whole["losses"][BEFORE:]):
        both = {part: sum(rank["losses"][step][part] for rank in rest) / after for part in parts}
        assert both == pytest.approx(parts, rel=1e-8)
    memory = whole["state"]["method"]["memory"]
    assert memory.abs().sum() > 1
    assert torch.allclose(rest[0]["state"]["method"]["memory"], memory, atol=1e-9)
    for rank in rest:
        assert rank["beliefs"]["label"] == whole["beliefs"]["label"]
        assert rank["beliefs"]["score"] == pytest.approx(whole["beliefs"]["score"])
    for ranks in (first, rest):  # every rank holds its part and no more
        assert [rank["held"] for rank in ranks] == [[n] for n in World(size=len(ranks)).rank_slice_sizes(SAMPLES)]


def trained(world: World, shards: str, folder: str) -> torch.Tensor:
    """The memory on this rank when a run has trained, or has loaded what was trained before."""
    settings = {
        "output": folder, "shards": {"url": shards}, "tracking": {"uri": ""}, "train": {"epochs": 1}, "model": {"width": 2},
        "data": {"size": 8, "padding": 1, "threads": 1}, "method": {"name": "elr"},
    }  # fmt: skip
    trainer = build(Config.model_validate(settings), world)
    trainer.run()
    trainer.checkpoints.close()
    return trainer.method.memory


@pytest.mark.dist
def test_a_checkpoint_holds_the_whole_table_and_every_rank_loads_its_rows(digits: str, tmp_path: Path) -> None:
    rows = torch.cat(on_ranks(2, trained, digits, str(tmp_path)))
    assert (rows.sum(1) > 0).all()
    assert torch.equal(read_checkpoint(tmp_path).tree["method"]["memory"], rows)
    assert torch.equal(torch.cat(on_ranks(3, trained, digits, str(tmp_path))), rows)
