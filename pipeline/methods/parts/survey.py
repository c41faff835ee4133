"""The survey: a forward pass without gradient over every training sample, test transform, index order, no padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.distributed.world import World


@dataclass
class Survey:
    """This rank's contiguous part of the training set, and the outputs of the network for it."""

    index: Tensor  # (n,) int64: consecutive sample indices of this rank
    outputs: dict[str, Tensor]  # name -> (n, ...) float32, on the world's device
    total: int  # N, over all ranks
    world: World

    def __getitem__(self, name: str) -> Tensor:
        return self.outputs[name]

    def all_gather(self, value: Tensor, out: Tensor | None = None) -> Tensor:
        """(N, ...): rows of all ranks in index order, on every rank; written to `out` if it is given."""
        return self.world.all_gather_rows(value, self.world.rank_slice_sizes(self.total), out=out)


def take_survey(
    outputs_of: Callable[[Tensor, Tensor], dict[str, Tensor]],
    batches: Iterable[tuple[Tensor, Tensor]],
    total: int,
    world: World,
) -> Survey:
    """Run `outputs_of` over (index, images) batches of this rank's part and collect what it returns."""
    n, done = world.rank_slice_sizes(total)[world.rank], 0
    index_n = torch.zeros(n, dtype=torch.long, device=world.device)
    outputs: dict[str, Tensor] = {}
    for index, images in batches:
        rows = slice(done, done := done + len(index))
        index_n[rows] = index
        for name, value in outputs_of(index, images).items():
            value = value if value.dtype == torch.float64 else value.float()
            if name not in outputs:  # whole from the start: joining parts in the end would hold everything twice
                outputs[name] = value.new_empty(n, *value.shape[1:])
            outputs[name][rows] = value
    assert done == n, f"the survey saw {done} of {n} samples"
    if total < world.size:  # ranks without a sample take names and shapes from the others
        shapes = world.all_gather_object({name: tuple(value.shape[1:]) for name, value in outputs.items()})
        outputs = outputs or {
            n: torch.zeros(0, *shape, device=world.device) for n, shape in next(filter(None, shapes)).items()
        }
    return Survey(index_n, outputs, total, world)
