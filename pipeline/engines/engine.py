"""One optimiser step on all ranks. The rest of the pipeline does not know who does it: DDP or DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from pipeline.data.batch import Batch
from pipeline.methods.base import Stage


class Engine(Protocol):
    def begin_stage(self, stage: Stage, resuming: bool) -> None: ...
    def set_trainable(self, prefixes: tuple[str, ...]) -> None: ...
    def step(self, batch: Batch, lr: float) -> dict[str, Tensor]: ...
    def nonfinite_steps(self) -> int: ...

    # All ranks call these together. What they give and take knows neither the number of ranks nor the engine.
    def optimizer_state_dict(self) -> dict[str, Any]: ...
    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None: ...
    def model_state_dict(self) -> dict[str, Tensor]: ...
    def load_model_state_dict(self, weights: dict[str, Tensor]) -> None: ...

    def dummy_forward(self, look: Callable[[Tensor], Any]) -> None:
        """Called by a rank without pictures while others look at some."""

    def close(self) -> None:
        """Leave the method with whole weights and free of the engine."""
