"""Batch normalisation with the statistics of the whole global batch, whatever the number of ranks.

Rows that do not count (padding, pictures that did not decode) are normalised, but are not in the statistics. Ranks share one
sum per layer in the forward and one in the backward pass; the host is never asked. The same code runs with gloo and NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.distributed.world import World
from shards.base.errors import UserError

PLAIN = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "BatchNormAct2d"}  # classes whose forward is known


class CountedRows:
    """Which rows of the current forward pass count. One object for all normalisations of a network."""

    def __init__(self, world: World | None = None) -> None:
        """`world`: the ranks that share statistics; None: each has its own."""
        self.world = world if world is not None and world.size > 1 else None
        self.mask: Tensor | None = None  # (B,) 1 or 0; None: all rows count
        self.recomputing = False  # a checkpointed block runs again: running statistics were updated already

    @contextmanager
    def use(self, mask: Tensor | None, recomputing: bool = False) -> Iterator[None]:
        before = self.mask, self.recomputing
        self.mask, self.recomputing = mask, recomputing
        try:
            yield
        finally:
            self.mask, self.recomputing = before


class BatchNorm(nn.modules.batchnorm._BatchNorm):
    """Takes the place of a batch norm, with its parameters, names, dropout and activation."""

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm, rows: CountedRows) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        self.weight, self.bias, self.rows = norm.weight, norm.bias, rows
        self.running_mean, self.running_var = norm.running_mean, norm.running_var
        self.num_batches_tracked = norm.num_batches_tracked
        self.train(norm.training)
        for name in ("drop", "act"):  # timm has normalisation, dropout and activation in one module
            if hasattr(norm, name):
                self.add_module(name, getattr(norm, name))

    def forward(self, x: Tensor) -> Tensor:
        out = self._normalise(x)
        for name in ("drop", "act"):
            if name in self._modules:
                out = self._modules[name](out)  # type: ignore[misc]
        return out

    def _normalise(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        if not self.training and mean is not None:
            return F.batch_norm(x, mean, var, self.weight, self.bias, False, 0.0, self.eps)
        update = self.training and mean is not None and not self.rows.recomputing
        if update and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.rows.world is None and self.rows.mask is None:  # what torch has is faster
            momentum = self.momentum or 0.0 if update else 0.0
            return F.batch_norm(x, mean, var, self.weight, self.bias, True, momentum, self.eps)
        out, batch_mean, batch_var, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self.rows.mask, self.eps, self.rows.world
        )
        if update:
            self._update(batch_mean, batch_var * (count / (count - 1).clamp_min(1)), count)
        normalised: Tensor = out
        return normalised

    @torch.no_grad()
    def _update(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """A batch without a row that counts changes nothing.

        torch's own kernel saves these tensors for the backward pass, where it does not read them: `data` lets it pass.
        """
        assert self.running_mean is not None
        assert self.running_var is not None
        part = (count > 0).to(mean.dtype) * (self.momentum or 0.0)
        self.running_mean.data.lerp_(mean, part)
        self.running_var.data.lerp_(var, part)


def convert_batchnorm(module: nn.Module, rows: CountedRows) -> nn.Module:
    """Replace every batch norm below `module`. Evaluation is unchanged to the bit."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and type(module).__name__ in PLAIN and module.momentum:
        return BatchNorm(module, rows)
    if getattr(module, "running_mean", None) is not None:  # one that is left out would count padding
        raise UserError(
            f"model.backbone: its normalisation {type(module).__name__} keeps running statistics in a way that is not known "
            "here. Choose another backbone, or one without batch normalisation."
        )
    for name, child in module.named_children():
        module.add_module(name, convert_batchnorm(child, rows))
    return module


# -- the operation ---------------------------------------------------------------------------------------------------------


def _statistics(x: Tensor, mask: Tensor | None, world: World | None) -> tuple[Tensor, Tensor, Tensor]:
    """(C,) mean and variance, and the number of values per channel, over the rows of all ranks that count.

    Sums over the area of each row are taken in float32, sums over rows and ranks in float64.
    """
    area = tuple(range(2, x.ndim))
    wide = torch.promote_types(x.dtype, torch.float32)
    first = x.sum(area, dtype=wide) if area else x.to(wide)
    second = torch.linalg.vector_norm(x, 2, area, dtype=wide).square() if area else first.square()
    rows = torch.stack([torch.full_like(first, x.shape[2:].numel()), first, second]).double()  # (3,B,C)
    sums = (rows if mask is None else rows * mask[:, None]).sum(1)
    if world is not None:
        sums = _sum_over_ranks(sums, world)
    count = sums[0].clamp_min(1)
    mean = sums[1] / count
    return mean.to(wide), (sums[2] / count - mean.square()).clamp_min(0).to(wide), sums[0].to(wide)


def _sum_over_ranks(value: Tensor, world: World) -> Tensor:
    if torch.compiler.is_compiling():
        total: Tensor = _compiled_sum(value)
        return total
    return world.all_reduce_sum(value)


@torch.library.custom_op("evenhand::sum_over_ranks", mutates_args=())
def _compiled_sum(value: Tensor) -> Tensor:
    """Inside a compiled network: one operator that the compiler does not look into."""
    total = value.clone()
    dist.all_reduce(total)
    return total


@_compiled_sum.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


class _Normalise(torch.autograd.Function):
    """(normalised x, mean, variance, count). Big tensors pass only through torch's fused kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mask: Tensor | None,
        eps: float,
        world: World | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, var, count = _statistics(x, mask, world)
        ctx.save_for_backward(x, weight, bias, mask, mean, var, count)
        ctx.eps, ctx.world = eps, world
        ctx.mark_non_differentiable(mean, var, count)
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps), mean, var, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mask, mean, var, count = ctx.saved_tensors
        if torch.is_grad_enabled():  # gradients of gradients
            return *_differentiable_backward(grads[0], x, weight, bias, mask, ctx.eps, ctx.world), None, None, None
        scale = torch.rsqrt(var + ctx.eps)
        # With fixed statistics: dx = dy * weight * scale, and the sums over rows of dy * normalised x and of dy.
        dx, d_weight, d_bias = torch.ops.aten.native_batch_norm_backward(
            grads[0], x, weight, mean, var, mean, scale, False, ctx.eps, [True, True, True]
        )
        sums = torch.stack([d_weight, d_bias])
        if ctx.world is not None:
            sums = _sum_over_ranks(sums, ctx.world)
        # The statistics depend on every row that counts.
        factor = scale / count.clamp_min(1) * (1 if weight is None else weight)
        through = F.batch_norm(x, mean, var, factor * sums[0], factor * sums[1], False, 0.0, ctx.eps)
        if mask is not None:
            through = through * mask.to(through.dtype).view(-1, *[1] * (x.ndim - 1))
        return (
            dx - through,
            None if weight is None else d_weight,
            None if bias is None else d_bias,
            None,
            None,
            None,
        )


def _differentiable_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    eps: float,
    world: World | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The same gradients, by operations that can be differentiated again."""
    across = (0, *range(2, x.ndim))
    shape = (1, -1, *[1] * (x.ndim - 2))
    rows = x.new_ones(len(x)) if mask is None else mask.to(x.dtype)
    rows = rows.view(-1, *[1] * (x.ndim - 1))

    def total(value: Tensor) -> Tensor:
        """(C,) sum over rows, area and ranks."""
        summed = value.sum(across)
        return summed if world is None else _SumOverRanks.apply(summed, world)  # type: ignore[no-untyped-call]

    count = total(rows.expand_as(x)).clamp_min(1)
    mean = (total(x * rows) / count).view(shape)
    var = (total((x - mean).square() * rows) / count).view(shape)
    scale = torch.rsqrt(var + eps)
    normalised = (x - mean) * scale
    scaled = dy if weight is None else dy * weight.view(shape)
    through = total(scaled).view(shape) + normalised * total(scaled * normalised).view(shape)
    dx = scale * (scaled - rows * through / count.view(shape))
    return (
        dx,
        None if weight is None else (dy * normalised).sum(across),
        None if bias is None else dy.sum(across),
    )


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, world: World) -> Tensor:
        ctx.world = world
        return _sum_over_ranks(value, world)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _SumOverRanks.apply(grads[0], ctx.world), None  # type: ignore[no-untyped-call]
