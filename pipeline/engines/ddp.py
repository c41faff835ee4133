"""Plain torch on one rank, DistributedDataParallel on several."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.config import Config
from pipeline.data.batch import Batch
from pipeline.distributed.world import World
from pipeline.engines.batchnorm import BatchNormStats
from pipeline.engines.engine import OptimizerState
from pipeline.engines.optimizers import STATE, fresh_state, make_optimizer, parameter_groups, set_lr, set_options
from pipeline.engines.parameters import require_gradients, trainable_parameters, trained_parameters
from pipeline.methods.base import Method, Stage
from pipeline.models.precision import autocast_for


class TorchEngine:
    """Plain torch on one rank, DistributedDataParallel on several."""

    def __init__(self, config: Config, method: Method, world: World) -> None:
        self.config, self.method, self.world = config, method, world
        self.autocast = autocast_for(config.train.precision, world.device)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=config.train.precision == "fp16")
        self.batchnorm_stats = BatchNormStats(method, world)
        self.optimizer = self._new_optimizer()
        self.wrapped: nn.Module = method
        self.trained: set[str] = set()  # names of the parameters that are trained now
        self.nonfinite = torch.zeros((), device=world.device)  # consecutive steps whose gradient was not finite

    def _new_optimizer(self) -> torch.optim.Optimizer:
        learn = dict(trainable_parameters(self.method))
        optimizer = make_optimizer(parameter_groups(self.method, learn, self.config.optim), self.config.optim)
        for p in learn.values():  # averages start from zero; some parameters are trained only in a later stage
            optimizer.state[p] = fresh_state(self.config.optim, p)
        return optimizer

    def begin_stage(self, stage: Stage, resuming: bool) -> None:
        if stage.fresh_optimizer and not resuming:
            self.optimizer = self._new_optimizer()
        optim = stage.optim or self.config.optim
        set_options(self.optimizer, optim)
        self.clip = optim.clip
        self.set_trainable(stage.trainable)

    def set_trainable(self, prefixes: tuple[str, ...]) -> None:
        """Train only the parameters with these prefixes that do not rest in this epoch. DDP must know, because it waits
        for every gradient."""
        trained = trained_parameters(self.method, prefixes)
        if trained.keys() == self.trained:
            return
        first, self.trained = not self.trained, set(trained)
        require_gradients(self.method, trained)
        if self.world.size > 1:
            with warnings.catch_warnings():
                # No broadcast of buffers: beliefs are equal on all ranks already, large, and of types gloo cannot send.
                # The newer argument would still broadcast once.
                warnings.simplefilter("ignore", FutureWarning)
                self.wrapped = DistributedDataParallel(
                    self.method,
                    device_ids=[self.world.local_rank] if self.world.device.type == "cuda" else None,
                    broadcast_buffers=False,
                    init_sync=first,
                    gradient_as_bucket_view=True,
                    # DDP arranges its buckets anew after the first step, unless it looks for unused parameters. A
                    # restart would then add gradients of three or more ranks in another order.
                    find_unused_parameters=self.config.train.deterministic,
                )

    def step(self, batch: Batch, lr: float) -> dict[str, Tensor]:
        """Forward and backward of one micro-batch; the optimiser steps after the last of a global batch."""
        self.batchnorm_stats.snapshot(batch)
        with self._sync(batch.last):
            with self.autocast:
                losses = self.wrapped(batch)
            self.world.timer.mark_wait()  # DDP all-reduces gradients in the backward pass
            self.scaler.scale(losses["loss"] * batch.share).backward()
        if batch.last:
            self._update(lr)
        return {name: value.detach() for name, value in losses.items()}

    @contextlib.contextmanager
    def _sync(self, last: bool) -> Iterator[None]:
        skip_sync = isinstance(self.wrapped, DistributedDataParallel) and not last
        with self.wrapped.no_sync() if skip_sync else contextlib.nullcontext():  # type: ignore[operator]
            yield

    def _update(self, lr: float) -> None:
        set_lr(self.optimizer, lr)
        self.scaler.unscale_(self.optimizer) if self.scaler.is_enabled() else None
        trained = [p for p in self.method.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        if self.clip:
            torch.nn.utils.clip_grads_with_norm_(trained, self.clip, norm)
        finite = torch.isfinite(norm)
        self.nonfinite = torch.where(finite, 0.0, self.nonfinite + 1)
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:  # gradients are equal on all ranks after the all-reduce, so all ranks decide alike
            self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.batchnorm_stats.commit(finite)
        self.method.after_step()

    def nonfinite_steps(self) -> int:
        return int(self.nonfinite)

    # -- state, independent of ranks and engine -------------------------------------------------------------

    def optimizer_state_dict(self) -> OptimizerState:
        state: OptimizerState = {"scaler": self.scaler.state_dict(), "nonfinite_steps": int(self.nonfinite)}
        learn = dict(trainable_parameters(self.method))
        for ours, theirs in STATE[self.config.optim.name].items():
            state[ours] = {name: self.optimizer.state[p][theirs] for name, p in learn.items()}  # type: ignore[literal-required]
        if self.config.optim.name == "adamw":
            done = torch.stack([self.optimizer.state[p]["step"] for p in learn.values()]).tolist()
            state["steps"] = dict(zip(learn, map(int, done)))
        return state

    def load_optimizer_state_dict(self, state: OptimizerState) -> None:
        steps = state.get("steps", {})
        for name, p in trainable_parameters(self.method):  # parameters that were never trained may be missing
            own = self.optimizer.state[p] = fresh_state(self.config.optim, p, steps.get(name, 0))
            for ours, theirs in STATE[self.config.optim.name].items():
                if name in state[ours]:  # type: ignore[literal-required]
                    own[theirs].copy_(state[ours][name])  # type: ignore[literal-required]
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.nonfinite.fill_(state["nonfinite_steps"])

    def model_state_dict(self) -> dict[str, Tensor]:
        return self.method.state_dict()

    def load_model_state_dict(self, weights: dict[str, Tensor]) -> None:
        self.method.load_state_dict(weights)

    def dummy_forward(self, forward: Callable[[Tensor], object]) -> None:
        """Not needed: every rank has all weights."""

    def close(self) -> None:
        self.wrapped, self.trained = self.method, set()
