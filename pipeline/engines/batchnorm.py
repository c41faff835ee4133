"""Running statistics of batch normalisation: equal on all ranks after every step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.data.batch import Batch
from pipeline.distributed.world import World
from pipeline.methods.base import Method
from pipeline.models.batchnorm import BatchNorm


class BatchNormStats:
    """Running means and variances: equal on all ranks after every step, unchanged by a step that was skipped."""

    def __init__(self, method: Method, world: World) -> None:
        self.layers = [m for m in method.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        shared = all(isinstance(m, BatchNorm) and m.rows.world is not None for m in self.layers)
        self.reduces = world.size > 1 and not shared
        self.tensors: list[Tensor] = []  # what may move in this step; an average of frozen ones would round them
        self.world = world
        self.saved: Tensor | None = None
        self.rows = torch.zeros((), device=world.device)  # of this rank that count, in the current step

    def snapshot(self, batch: Batch) -> None:
        """Called before every micro-batch; the first call after a step counts."""
        if self.saved is None:
            moving = [m for m in self.layers if m.training]
            self.tensors = [s for m in moving for s in (m.running_mean, m.running_var) if s is not None]
            if self.tensors:
                self.saved = torch.cat([t.flatten() for t in self.tensors])
                self.rows.zero_()
        if self.reduces:
            self.rows += batch.valid.sum()

    @torch.no_grad()
    def commit(self, stepped: Tensor | bool) -> None:
        """Average over the rows of all ranks, or restore the snapshot if the optimiser did not step."""
        if self.saved is None:
            return
        flat = torch.cat([t.flatten() for t in self.tensors])
        if self.reduces:  # ranks saw only their own rows
            sums = self.world.all_reduce_sum(torch.cat([flat * self.rows, self.rows[None]]))
            flat = torch.where(sums[-1] > 0, sums[:-1] / sums[-1].clamp_min(1), flat)
        if isinstance(stepped, Tensor):  # on the device: the host is not asked
            flat = torch.where(stepped, flat, self.saved)
        elif not stepped:
            flat = self.saved
        torch._foreach_copy_(self.tensors, list(flat.split([t.numel() for t in self.tensors])))
        self.saved = None
