"""Which rank this process is, and the collectives the project uses.

Every rank calls every collective, in the same order. With one rank they cost nothing.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from pipeline.distributed.device import choose_device, compare_devices, describe, use_device
from pipeline.distributed.long_work import wait_for_work
from pipeline.distributed.network import set_interface
from pipeline.distributed.step_timer import StepTimer
from shards.base.errors import UserError

T = TypeVar("T")
CPU = torch.device("cpu")
GATHER_BYTES = 64 << 20  # beside the result; gloo takes as much again


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = CPU
    about: str = ""  # how many ranks, on which devices, by which torch
    timer: StepTimer = field(default_factory=StepTimer, compare=False, repr=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """Sum over ranks, without gradient; a new tensor."""
        value = value.detach().clone()
        if self.size > 1:
            self.timer.mark_wait()
            dist.all_reduce(value)
        return value

    def global_mean(self, values: Tensor, weights: Tensor) -> Tensor:
        """Weighted mean over the samples of ALL ranks, scaled for engines that average gradients over ranks.

        values, weights: (B,) of this rank. DDP divides gradients by the number of ranks R, so each rank returns
        R * sum_local(w*v) / sum_global(w); the average over ranks of what is returned is the global mean.
        """
        total = self.all_reduce_sum(weights.sum()).clamp_min(1e-8)
        return self.size * (weights * values).sum() / total

    def all_gather_rows(
        self, value: Tensor, rows: Sequence[int], grad: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """Rows of all ranks, in rank order. `rows` says how many each rank holds (all ranks know it).

        With grad=True the gradient of every rank's use of a row comes back to the rank that owns it. Without, they may be
        written to `out`, which is contiguous and of the same type.
        """
        if self.size == 1:
            return value if out is None else out.copy_(value)
        self.timer.mark_wait()
        if grad:
            gathered: Tensor = _Gather.apply(value, self, rows)  # type: ignore[no-untyped-call]
            return gathered
        return _gather(value.detach(), rows, out)

    def gather_rows(self, value: Tensor, rows: Sequence[int]) -> Tensor:
        """Rows of all ranks in the host memory of rank 0; the other ranks keep theirs."""
        if self.size == 1:
            return value
        out = value.new_empty(sum(rows) * self.is_main, *value.shape[1:], device=CPU)
        for place, part in _gathered_blocks(value.detach(), rows):
            if self.is_main:
                out[place] = part
        return out if self.is_main else value

    def broadcast_object(self, value: T | None) -> T:
        """Rank 0's object on every rank."""
        objects: list[Any] = [value]
        if self.size > 1:
            dist.broadcast_object_list(objects, src=0)
        shared: T = objects[0]
        return shared

    def on_main(self, work: Callable[[], T]) -> T:
        """Rank 0's result, on every rank. The work may take longer than a collective may; all ranks raise a UserError of it."""

        def attempt() -> tuple[T | None, UserError | None]:
            try:
                return work(), None
            except UserError as error:
                return None, error

        if self.size == 1:
            return work()
        outcome = wait_for_work(self.rank, self.size, attempt if self.is_main else None)
        value, problem = self.broadcast_object(outcome)
        if problem is not None:
            raise problem
        return cast(T, value)

    def each_rank(self, work: Callable[[], T]) -> T:
        """This rank's result, when all ranks have theirs. The work may take longer than a collective may."""
        return work() if self.size == 1 else cast(T, wait_for_work(self.rank, self.size, work))

    def all_gather_object(self, value: T) -> list[T]:
        """One object of every rank, on every rank."""
        out: list[Any] = [value]
        if self.size > 1:
            out = [None] * self.size
            dist.all_gather_object(out, value)
        return out

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def rank_slice(self, n: int) -> slice:
        """This rank's contiguous part of n items, without padding or overlap."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def rank_slice_sizes(self, n: int) -> list[int]:
        return [n * (r + 1) // self.size - n * r // self.size for r in range(self.size)]


def _gather(value: Tensor, rows: Sequence[int], out: Tensor | None = None) -> Tensor:
    """Rows of all ranks in one tensor, with little memory beside it: it may be many gigabytes."""
    if out is None:
        out = value.new_empty(sum(rows), *value.shape[1:])
    if value.is_cuda and min(rows) == max(rows) and out.numel():
        dist.all_gather_single(out, value.contiguous())
        return out
    for place, part in _gathered_blocks(value, rows):
        out[place] = part
    return out


def _gathered_blocks(value: Tensor, rows: Sequence[int]) -> Iterator[tuple[slice, Tensor]]:
    """Rows of all ranks, some at a time: their place among all of them, and they themselves, valid until the next.

    In blocks, because gloo makes a copy of what it gathers. Ranks must send equally many rows: the last block of a
    shorter part is filled up with whatever is in memory.
    """
    longest, first = max(rows), [0, *itertools.accumulate(rows)]
    row_bytes = (len(rows) + 1) * value.element_size() * math.prod(value.shape[1:])
    if not longest or not row_bytes:
        return
    block = max(1, min(longest, GATHER_BYTES // row_bytes))
    own, parts = (value.new_empty(n * block, *value.shape[1:]) for n in (1, len(rows)))
    for start in range(0, longest, block):
        piece = value[start : start + block]
        own[: len(piece)] = piece
        dist.all_gather_single(parts, own)
        for at, n, part in zip(first, rows, parts.split(block)):
            if (count := min(n - start, block)) > 0:
                yield slice(at + start, at + start + count), part[:count]


class _Gather(torch.autograd.Function):
    """Rows of all ranks. The gradient of a rank's rows is summed over all ranks that used them."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, world: World, rows: Sequence[int]) -> Tensor:
        ctx.world, ctx.own = world, slice(sum(rows[: world.rank]), sum(rows[: world.rank + 1]))
        return _gather(value, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.world.all_reduce_sum(grads[0].contiguous())[ctx.own], None, None


def init_distributed(device: str = "auto", timeout_seconds: float = 600.0) -> World:
    """Join the process group if torchrun (or anything that sets its variables) started several ranks."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    where = choose_device(device, local_rank)
    use_device(where)
    kinds = [describe(where)]
    if size > 1 and where == CPU:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
    if size > 1 and not dist.is_initialized():
        set_interface(size, local_size)
        timeout = timedelta(seconds=timeout_seconds)
        store, _, _ = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        kinds = compare_devices(store, rank, size, kinds[0])
        backend = "gloo" if where == CPU else "cpu:gloo,cuda:nccl"
        store = PrefixStore("default_pg", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    about = f"{size} {'ranks' if size > 1 else 'rank'} on {', '.join(kinds)}, torch {torch.__version__}"
    return World(rank, size, local_rank, where, about)


def shutdown_distributed() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
