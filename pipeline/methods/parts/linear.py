"""A linear classifier on features: scores x W' + b. Sums and multiples of such classifiers are such classifiers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Linear:
    weight: Tensor  # (K,D) float64
    bias: Tensor  # (K,) float64

    def __call__(self, x_nD: Tensor) -> Tensor:
        """(n,K) scores, in the precision of the features."""
        return torch.addmm(self.bias.to(x_nD.dtype), x_nD, self.weight.to(x_nD.dtype).T)

    def __add__(self, other: Linear) -> Linear:
        return Linear(self.weight + other.weight, self.bias + other.bias)

    def __mul__(self, factor: float) -> Linear:
        return Linear(self.weight * factor, self.bias * factor)

    def shifted(self, by_K: Tensor) -> Linear:
        return Linear(self.weight, self.bias + by_K)
