"""The optimiser's state inside an open DeepSpeed engine: read and written whole, by parameter name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pipeline.config import OptimConfig
from pipeline.distributed.world import World
from pipeline.engines.optimizers import Tensors, fresh_state, state_names


@dataclass(frozen=True)
class ZeroState:
    inner: Any  # the engine
    deepspeed: Any  # the package
    stage: int
    world: World
    optim: OptimConfig
    trained: dict[str, nn.Parameter]

    def read(self) -> Tensors:
        """Called by all ranks together. Nothing before the first step."""
        names, state = state_names(self.optim), self.inner.basic_optimizer.state
        if not state:
            return {}
        if self.stage == 0:
            return {ours: {n: state[p][theirs] for n, p in self.trained.items()} for ours, theirs in names.items()}
        get = self.deepspeed.utils.safe_get_full_optimizer_state
        return {ours: {n: get(p, theirs) for n, p in self.trained.items()} for ours, theirs in names.items()}

    def write(self, tensors: Tensors) -> None:
        """Into an engine that has not stepped yet. What is missing starts from zero.

        The first step would make it, too; but after that ZeRO 1 and 2 find the state of the first group only.
        """
        if not tensors or (self.stage in (0, 3) and not any(tensors.values())):
            return
        state = self.inner.basic_optimizer.state
        for flat, steps in self._optimised():
            state[flat] = fresh_state(self.optim, flat, steps)
        if self.stage in (1, 2):
            self.inner.optimizer._lazy_init_hp_params_optimizer_state()
        for ours, theirs in state_names(self.optim).items():
            for name, parameter in self.trained.items():
                if name in tensors[ours]:
                    self._write(parameter, tensors[ours][name].to(self.world.device), theirs)

    def _optimised(self) -> list[tuple[Tensor, int]]:
        """The tensors the optimiser moves, with the steps they have done: parameters, or parts of flattened groups."""
        optimizer = self.inner.optimizer
        groups = optimizer.param_groups
        if self.stage == 0:
            return [(p, group["steps_done"]) for group in groups for p in group["params"]]
        if self.stage < 3:
            return [(f, g["steps_done"]) for f, g in zip(optimizer.single_partition_of_fp32_groups, groups)]
        group_of = optimizer.sub_group_to_group_id
        return [(f, groups[group_of[i]]["steps_done"]) for i, f in enumerate(optimizer.fp32_partitioned_groups_flat)]

    def _write(self, parameter: Any, value: Tensor, name: str) -> None:
        if self.stage == 0:
            self.inner.basic_optimizer.state[parameter][name].copy_(value)
        elif self.stage < 3:
            self.deepspeed.utils.safe_set_full_optimizer_state(parameter, value, name)
        else:
            self.deepspeed.utils.safe_set_local_optimizer_state(parameter, self._part(value, parameter), name)

    def _part(self, value: Tensor, parameter: Any) -> Tensor:
        """This rank's part of a value, partitioned as in ZeRO-3; the last part is padded."""
        length = parameter.ds_tensor.numel()
        flat = value.new_zeros(length * self.world.size)
        flat[: value.numel()] = value.flatten()
        return flat[length * self.world.rank : length * (self.world.rank + 1)]
