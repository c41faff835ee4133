"""Per-sample state: buffers by permanent index, updated in every step, the same on all ranks.

B rows on this rank, G over all ranks, N training samples. Padding rows are never written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.data.batch import Batch
from pipeline.distributed.world import World


@torch.no_grad()
def add_by_index(memory: Tensor, batch: Batch, value_B: Tensor, world: World) -> None:
    """memory[i] += value of sample i, for the samples of all ranks. Values that are not finite are left out."""
    index_G, valid_G, value_G = (world.all_gather_rows(v, batch.rows) for v in (batch.index, batch.valid, value_B))
    real = _column(valid_G, value_G) > 0
    memory.index_add_(0, index_G, torch.where(real & value_G.isfinite(), value_G, 0).to(memory.dtype))


@torch.no_grad()
def update_by_index(memory: Tensor, batch: Batch, value_B: Tensor, world: World, keep: float = 0.0) -> None:
    """memory[i] = keep * memory[i] + (1 - keep) * value of sample i, for the samples of all ranks."""
    add_by_index(memory, batch, (1 - keep) * (value_B.to(memory.dtype) - memory[batch.index]), world)


@torch.no_grad()
def update_table(table_n: Tensor, batch: Batch, value_B: Tensor, world: World, total: int, keep: float) -> Tensor:
    """The same for a table of `total` rows spread over ranks (Method.register_table); (B, ...) the new rows of the batch.

    Every rank answers with the rows it holds, so that a step sends G rows twice and no rank needs the whole table.
    """
    value_B = value_B.to(table_n.dtype)
    index_G, valid_G, value_G = (world.all_gather_rows(v, batch.rows) for v in (batch.index, batch.valid, value_B))
    answer_G = torch.zeros_like(value_G)
    if len(table_n):
        own = world.rank_slice(total)
        mine = _column((index_G >= own.start) & (index_G < own.stop), value_G)
        row = (index_G - own.start).clamp(0, len(table_n) - 1)
        change = (1 - keep) * (value_G - table_n[row])
        real = mine & (_column(valid_G, value_G) > 0) & change.isfinite()
        table_n.index_add_(0, row, torch.where(real, change, 0))
        answer_G = torch.where(mine, table_n[row], 0)
    return world.all_reduce_sum(answer_G)[own_rows(batch, world)]


@torch.no_grad()
def rank_in_batch(value_B: Tensor, batch: Batch, world: World) -> tuple[Tensor, Tensor]:
    """(B,) position of each row of this rank in the sorted global batch, and how many rows of that batch are valid.

    Equal values keep the order of the batch, so that all ranks and any number of them agree.
    """
    value_G, valid_G = (world.all_gather_rows(v, batch.rows) for v in (value_B, batch.valid))
    by_value = torch.where(valid_G > 0, value_G.nan_to_num(torch.inf), torch.inf).argsort(stable=True)
    # Valid rows come first, also those whose value is infinite.
    by_value = by_value[(valid_G[by_value] <= 0).to(torch.uint8).argsort(stable=True)]
    position_G = torch.empty_like(by_value).scatter_(0, by_value, torch.arange(len(by_value), device=by_value.device))
    return position_G[own_rows(batch, world)], valid_G.sum()


def own_rows(batch: Batch, world: World) -> slice:
    """The rows of this rank among those gathered from all ranks."""
    first = sum(batch.rows[: world.rank]) if world.size > 1 else 0
    return slice(first, first + len(batch.index))


def _column(weight_G: Tensor, value_G: Tensor) -> Tensor:
    return weight_G.view(-1, *[1] * (value_G.ndim - 1))
