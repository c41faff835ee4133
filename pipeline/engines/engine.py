"""One optimiser step on all ranks. The rest of the pipeline does not know who does it: DDP or DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from pipeline.data.batch import Batch
from pipeline.methods.base import Stage


class Engine(Protocol):
    def begin_stage(self, stage: Stage, resuming: bool) -> None: ...
    def train_only(self, prefixes: tuple[str, ...]) -> None: ...
    def step(self, batch: Batch, lr: float) -> dict[str, Tensor]: ...
    def bad_steps(self) -> int: ...

    # All ranks call these together. What they give and take knows neither the number of ranks nor the engine.
    def state(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None: ...
    def weights(self) -> dict[str, Tensor]: ...
    def load_weights(self, weights: dict[str, Tensor]) -> None: ...

    def idle_forward(self, look: Callable[[Tensor], Any]) -> None:
        """Called by a rank without pictures while others look at some."""

    def close(self) -> None:
        """Leave the method with whole weights and free of the engine."""
