"""Mixtures of two Gaussians over one number per sample: samples of the better component are believed.

The fit is scikit-learn's. Where it cannot be made (no sample, one sample, equal values), all samples are believed.
n samples, K classes.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from pipeline.models.precision import full_precision

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

Better = Literal["small", "large"]


@dataclass(frozen=True)
class Fit:
    """How long expectation-maximisation runs, and the least variance of a component."""

    iterations: int = 100
    tolerance: float = 1e-3
    floor: float = 1e-6


def normalised(values_n: np.ndarray, better: Better) -> np.ndarray:
    """(n,) float64 between 0 and 1. What is not finite counts as the worst; all the same gives zeros."""
    values = np.asarray(values_n, np.float64)
    finite = np.isfinite(values)
    if not finite.any():
        return np.zeros_like(values)
    least, most = values[finite].min(), values[finite].max()
    values = np.where(finite, values, most if better == "small" else least)
    return (values - least) / (most - least) if most > least else np.zeros_like(values)


def posterior(values_n: np.ndarray, better: Better, fit: Fit) -> np.ndarray:
    """(n,) float32: chance of each sample to belong to the component with the better mean; values in 0..1."""
    if len(values_n) < 2 or np.ptp(values_n) < 1e-12:
        return np.ones(len(values_n), np.float32)
    from sklearn.mixture import GaussianMixture

    mixture = GaussianMixture(2, max_iter=fit.iterations, tol=fit.tolerance, reg_covar=fit.floor, random_state=0)
    column = np.asarray(values_n, np.float64)[:, None]
    # One thread: the fit is small, and other threads decode pictures.
    with _threads().limit(limits=1), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ten iterations need not converge
        chances: np.ndarray = mixture.fit(column).predict_proba(column)
    means = mixture.means_[:, 0]
    return chances[:, means.argmin() if better == "small" else means.argmax()].astype(np.float32)


@functools.cache
def _threads() -> ThreadpoolController:
    """Looking for libraries with threads takes as long as a small fit, so it is done once."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def posterior_by_class(values_n: np.ndarray, label_n: np.ndarray, classes: int, better: Better, fit: Fit) -> np.ndarray:
    """(n,) float32: a mixture of its own, over values normalised on their own, for every class."""
    out = np.ones(len(values_n), np.float32)
    ends = np.bincount(label_n, minlength=classes).cumsum()[:-1]
    for members in np.split(np.argsort(label_n, kind="stable"), ends):
        out[members] = posterior(normalised(values_n[members], better), better, fit)
    return out


@full_precision
def sharpen(probability_BK: Tensor, temperature: float) -> Tensor:
    """Distributions sharpened towards their largest class; temperature 1 changes nothing, near 0 gives one-hot."""
    powered = probability_BK ** (1 / temperature)
    return powered / powered.sum(1, keepdim=True).clamp_min(torch.finfo(powered.dtype).tiny)
