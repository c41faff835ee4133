"""Rows gathered from several ranks: their order, their gradients, their memory."""

from __future__ import annotations

import pytest
import torch
from peak_memory import MB, peak_growth
from ranks import on_ranks
from torch import Tensor

from pipeline.distributed import world as world_module
from pipeline.distributed.world import World

ROWS = {1: [[4]], 2: [[3, 3], [4, 1], [0, 2]], 3: [[2, 2, 2], [3, 0, 2], [1, 4, 4], [0, 0, 0]]}
CASES = [(size, rows) for size, some in ROWS.items() for rows in some]
TYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]  # those that methods send


def table(rows: list[int], dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.arange(sum(rows) * 6).view(-1, 3, 2) % 7).to(dtype)


def own_part(world: World, rows: list[int], dtype: torch.dtype = torch.float64) -> Tensor:
    return table(rows, dtype).split(rows)[world.rank].clone()


def _gather(world: World, rows: list[int]) -> bool:
    for dtype in TYPES:
        gathered, whole = world.all_gather_rows(own_part(world, rows, dtype), rows), table(rows, dtype)
        assert gathered.dtype == dtype
        assert torch.equal(gathered, whole)
        flipped = own_part(world, rows, dtype).transpose(1, 2)  # not contiguous
        assert torch.equal(world.all_gather_rows(flipped, rows), whole.transpose(1, 2))
        out = torch.zeros_like(whole)
        assert world.all_gather_rows(own_part(world, rows, dtype), rows, out=out) is out
        assert torch.equal(out, whole)
    return True


@pytest.mark.dist
@pytest.mark.parametrize(("size", "rows"), CASES)
@pytest.mark.parametrize("memory", [1, 1 << 20])
def test_rows_come_in_rank_order_in_one_block_or_in_many(size, rows, memory, monkeypatch) -> None:
    monkeypatch.setattr(world_module, "GATHER_BYTES", memory)
    assert on_ranks(size, _gather, rows) == [True] * size


def _gradients(world: World, rows: list[int]) -> tuple[Tensor, Tensor]:
    value = own_part(world, rows).requires_grad_()
    added = torch.zeros(sum(rows), 3, 2, dtype=torch.float64, requires_grad=True)
    factor = torch.arange(sum(rows) * 6, dtype=torch.float64).view(-1, 3, 2) + world.rank
    ((world.all_gather_rows(value, rows, grad=True) + added) * factor).sum().backward()
    assert value.grad is not None
    assert added.grad is not None
    assert torch.equal(added.grad, factor)  # the sum over ranks must not be written into somebody else's gradient
    return value.grad, factor


@pytest.mark.dist
@pytest.mark.parametrize(("size", "rows"), CASES)
def test_a_rank_gets_the_gradient_of_its_rows_from_all_ranks(size, rows) -> None:
    found = on_ranks(size, _gradients, rows)
    expected = sum(factor for _, factor in found).split(rows)
    assert all(torch.equal(gradient, own) for (gradient, _), own in zip(found, expected))


def _memory(world: World, rows: list[int]) -> float:
    value = torch.full((rows[world.rank], MB // 4), float(world.rank))
    world.all_gather_rows(torch.zeros(1), [1] * world.size)  # connections and their buffers
    gathered, growth = peak_growth(lambda: world.all_gather_rows(value, rows))
    assert gathered[:: rows[0], 0].tolist()[:2] == [0, 1]
    return growth


@pytest.mark.dist
@pytest.mark.parametrize("rows", [[96, 96], [96, 95]])
def test_a_gather_holds_its_result_once(rows, monkeypatch) -> None:
    monkeypatch.setattr(world_module, "GATHER_BYTES", 6 * MB)
    for growth in on_ranks(2, _memory, rows):
        assert sum(rows) - 2 < growth < sum(rows) + 48, growth
