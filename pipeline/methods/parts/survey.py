"""The survey: a gradient-free look at every training sample with the test transform, in index order, nothing padded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.distributed.world import World


@dataclass
class Survey:
    """This rank's contiguous part of the training set and what the network said of it."""

    index: Tensor  # (n,) int64: consecutive sample indices of this rank
    outputs: dict[str, Tensor]  # name -> (n, ...) float32, on the world's device
    total: int  # N, over all ranks
    world: World

    def __getitem__(self, name: str) -> Tensor:
        return self.outputs[name]

    def everywhere(self, value: Tensor) -> Tensor:
        """(N, ...): rows of all ranks in index order, on every rank."""
        return self.world.all_gather_rows(value, self.world.rank_slice_sizes(self.total))


def take_survey(
    outputs_of: Callable[[Tensor, Tensor], dict[str, Tensor]],
    batches: Iterable[tuple[Tensor, Tensor]],
    total: int,
    world: World,
) -> Survey:
    """Run `outputs_of` over (index, images) batches of this rank's part; all it returns is kept."""
    indices: list[Tensor] = []
    kept: dict[str, list[Tensor]] = {}
    for index, images in batches:
        indices.append(index)
        for name, value in outputs_of(index, images).items():
            kept.setdefault(name, []).append(value if value.dtype == torch.float64 else value.float())
    index = torch.cat(indices) if indices else torch.zeros(0, dtype=torch.long, device=world.device)
    outputs = {name: torch.cat(parts) for name, parts in kept.items()}
    if total < world.size:  # some ranks have seen nothing and learn from the others what they would have
        shapes = world.all_gather_object({name: tuple(value.shape[1:]) for name, value in outputs.items()})
        outputs = outputs or {
            n: torch.zeros(0, *shape, device=world.device) for n, shape in next(filter(None, shapes)).items()
        }
    return Survey(index, outputs, total, world)
