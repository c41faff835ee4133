"""The interface of an engine: one optimiser step on all ranks, and state that any engine can load."""

from __future__ import annotations

from collections.abc import Callable
from typing import NotRequired, Protocol, TypedDict

from torch import Tensor

from pipeline.data.batch import Batch
from pipeline.methods.base import Stage


class OptimizerState(TypedDict):
    momentum: NotRequired[dict[str, Tensor]]  # sgd; by parameter name, as all that follows
    exp_avg: NotRequired[dict[str, Tensor]]  # adamw, and
    exp_avg_sq: NotRequired[dict[str, Tensor]]
    steps: NotRequired[dict[str, int]]
    scaler: dict[str, float]  # of GradScaler; empty without fp16
    nonfinite_steps: int


class Engine(Protocol):
    def begin_stage(self, stage: Stage, resuming: bool) -> None: ...
    def set_trainable(self, prefixes: tuple[str, ...]) -> None: ...
    def step(self, batch: Batch, lr: float) -> dict[str, Tensor]: ...
    def nonfinite_steps(self) -> int: ...

    # Called by all ranks together. The state depends neither on the number of ranks nor on the engine.
    def optimizer_state_dict(self) -> OptimizerState: ...
    def load_optimizer_state_dict(self, state: OptimizerState) -> None: ...
    def model_state_dict(self) -> dict[str, Tensor]: ...
    def load_model_state_dict(self, weights: dict[str, Tensor]) -> None: ...

    def dummy_forward(self, forward: Callable[[Tensor], object]) -> None:
        """Called by a rank that has no batch left while others run a forward pass."""

    def close(self) -> None:
        """Leave the method as plain torch with complete weights."""
