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
from pipeline.engines.parameters import trainable_parameters
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
        self.prefixes: tuple[str, ...] | None = None
        self.nonfinite = torch.zeros((), device=world.device)  # consecutive steps whose gradient was not finite

    def _new_optimizer(self) -> torch.optim.SGD:
        optim = self.config.optim
        # Fused, because a fused step can be skipped on the device (found_inf) without asking the host.
        learn = [p for _, p in trainable_parameters(self.method)]
        optimizer = torch.optim.SGD(learn, optim.lr, optim.momentum, weight_decay=optim.weight_decay, fused=True)
        for p in learn:  # SGD starts from zero momentum; some parameters are trained only in a later stage
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return optimizer

    def begin_stage(self, stage: Stage, resuming: bool) -> None:
        if stage.fresh_optimizer and not resuming:
            self.optimizer = self._new_optimizer()
        optim = stage.optim or self.config.optim
        for group in self.optimizer.param_groups:
            group.update(momentum=optim.momentum, weight_decay=optim.weight_decay)
        self.clip = optim.clip
        self.set_trainable(stage.trainable)

    def set_trainable(self, prefixes: tuple[str, ...]) -> None:
        """Train only the parameters with these prefixes. DDP must know, because it waits for every gradient."""
        if prefixes == self.prefixes:
            return
        first, self.prefixes = self.prefixes is None, prefixes
        for name, parameter in trainable_parameters(self.method):
            parameter.requires_grad_(name.startswith(prefixes))
            parameter.grad = None
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
        for group in self.optimizer.param_groups:
            group["lr"] = lr
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
        return {
            "momentum": self._momentum(),
            "scaler": self.scaler.state_dict(),
            "nonfinite_steps": int(self.nonfinite),
        }

    def _momentum(self) -> dict[str, Tensor]:
        return {name: self.optimizer.state[p]["momentum_buffer"] for name, p in trainable_parameters(self.method)}

    def load_optimizer_state_dict(self, state: OptimizerState) -> None:
        for name, buffer in self._momentum().items():  # parameters that were never trained may be missing
            buffer.copy_(state["momentum"][name]) if name in state["momentum"] else buffer.zero_()
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
        self.wrapped, self.prefixes = self.method, None
