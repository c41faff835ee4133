"""Mixed precision: autocast for a step, and float32 for functions that need it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def autocast_for(precision: str, device: torch.device) -> torch.autocast:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return torch.autocast(device.type, dtype=dtype, enabled=precision != "fp32")


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Run outside autocast with float32 tensors: cosines, softmaxes and sums must not lose digits."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next((a.device.type for a in args if isinstance(a, Tensor)), "cpu")
        with torch.autocast(device, enabled=False):
            up = [
                a.float() if isinstance(a, Tensor) and a.is_floating_point() and a.dtype != torch.float64 else a
                for a in args
            ]
            return function(*up, **kwargs)  # type: ignore[arg-type]

    return wrapped
