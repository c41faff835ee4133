"""Running statistics of batch normalisation: equal on all ranks after every step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.distributed.world import World
from pipeline.methods.base import Method


class BatchNormStats:
    """Running means and variances: equal on all ranks after every step, unchanged by a step that was skipped."""

    def __init__(self, method: Method, world: World) -> None:
        layers = [m for m in method.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.tensors = [s for m in layers for s in (m.running_mean, m.running_var) if s is not None]
        self.reduces = world.size > 1 and not all(isinstance(m, nn.SyncBatchNorm) for m in layers)
        self.world = world
        self.saved: Tensor | None = None

    def snapshot(self) -> None:
        """Called before every micro-batch; the first call after a step counts."""
        if self.tensors and self.saved is None:
            self.saved = torch.cat([t.flatten() for t in self.tensors])

    @torch.no_grad()
    def commit(self, stepped: Tensor | bool) -> None:
        """Average over ranks, or restore the snapshot if the optimiser did not step."""
        if self.saved is None:
            return
        flat = torch.cat([t.flatten() for t in self.tensors])
        if self.reduces:  # ranks saw only their own rows
            flat = self.world.all_reduce_sum(flat) / self.world.size
        flat = torch.where(torch.as_tensor(stepped, device=flat.device), flat, self.saved)
        for tensor, part in zip(self.tensors, flat.split([t.numel() for t in self.tensors])):
            tensor.copy_(part.view_as(tensor))
        self.saved = None
