"""Eight ranks with the batches of every config file: each has pictures in every step, and together they are one rank."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_bench import Bench, apart, same, small
from ranks import on_ranks
from torch import Tensor

from launch.sweep import method_names
from pipeline import config as configuration
from pipeline.data.batch import Pass
from pipeline.data.partition import check_ranks, micro_batches
from pipeline.distributed.world import World
from shards.base.errors import UserError

CONFIGS = sorted(path.stem for path in (Path(__file__).parents[2] / "configs").glob("*.yaml"))
RANKS = 8


@cache
def batches() -> list[tuple[int, int, int]]:
    """(batch, accumulate, mix_group) of every config file and method, and one cut in two."""
    found = {(64, 2, 8)}
    for file in CONFIGS:
        for method in method_names():
            config = configuration.load(["--config", f"configs/{file}.yaml", f"method.name={method}"])
            found.add((config.data.batch, config.optim.accumulate, config.data.mix_group))
    return sorted(found)


def test_every_rank_has_a_picture_in_every_micro_batch_of_every_recipe() -> None:
    assert len(batches()) > 3
    for batch, accumulate, mix_group in batches():
        order = np.arange(3 * batch + 5)
        pass_ = Pass(order, second=order, second_batch=batch)
        for rank in range(RANKS):
            for micro in micro_batches(pass_, batch, accumulate, mix_group, rank, RANKS):
                assert micro.step == 3 or all(part.valid.any() for part in micro.parts)  # the last is short


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_groups_do_not_depend_on_the_number_of_ranks(ranks: int) -> None:
    def groups(size: int) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        for rank in range(size):
            for micro in micro_batches(Pass(np.arange(70)), 32, 1, 8, rank, size):
                rows = micro.parts[0]
                for sample, group, valid in zip(rows.index, rows.groups, rows.valid):
                    if valid:
                        found.setdefault((micro.step, int(group)), set()).add(int(sample))  # type: ignore[arg-type]
        return found

    assert groups(ranks) == groups(1)
    assert max(len(members) for members in groups(1).values()) == 4  # an eighth of the batch


@pytest.mark.parametrize(
    ("batch", "accumulate", "mix_group", "ranks"), [(64, 1, 8, 16), (8, 1, 8, 5), (64, 8, 8, 8), (256, 1, 64, 16)]
)
def test_a_batch_too_small_for_the_ranks_is_refused(batch: int, accumulate: int, mix_group: int, ranks: int) -> None:
    with pytest.raises(UserError) as refused:
        check_ranks(batch, accumulate, mix_group, ranks)
    advised = int(re.findall(r"at most (\d+) ranks", str(refused.value))[0])
    check_ranks(batch, accumulate, mix_group, advised)


def one_step(world: World, url: str) -> dict[Any, dict[str, Tensor]]:
    """Weights and running statistics after a step without momentum, of a full batch and then of a short one."""
    found = {}
    for batch, accumulate, mix_group in batches():
        settings = {
            "data": {"batch": batch, "mix_group": mix_group},
            "model": {"norm": "batch", "width": 4},
            "optim": {"momentum": 0.0, "accumulate": accumulate},
        }
        bench = Bench(world, url, small("cross_entropy", **settings))
        for rows in (batch, 11):
            bench.steps(rows)
        found[batch, accumulate] = {n: v for n, v in bench.weights().items() if v.is_floating_point()}
    return found


@pytest.mark.dist
def test_statistics_and_gradients_of_eight_ranks_are_those_of_one(digits: str) -> None:
    alone, ranks = on_ranks(1, one_step, digits)[0], on_ranks(RANKS, one_step, digits)
    for case, weights in alone.items():
        assert all(same(rank[case], ranks[0][case]) for rank in ranks), case
        assert apart(ranks[0][case], weights) < 1e-3, case
        assert torch.stack([v.abs().max() for n, v in weights.items() if n.endswith("running_mean")]).min() > 0
