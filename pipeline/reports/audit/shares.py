"""The share of labels that are wrong, in all and by class, with intervals.

The sum of the probabilities that labels are wrong is too high where a class is small, and its naive interval far too
narrow. Simulations (`judge.py`) show the error of the same estimate where the truth is known: its mean is taken off, its
spread gives the interval. Simulated labels are a little easier than real ones, so the spread is widened by a
factor, and a picture untypical of its class can never be told from a wrong label, so no interval is narrower than a point on
either side. `benchmarks/audit.py` has the coverage. M simulations, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.reports.audit.judge import Judgement

MIN_JUDGED = 10  # labels that a class needs
WIDEN = 1.4  # real errors against simulated ones
UNTYPICAL = 0.01  # share of labels that no interval can exclude
Z = 1.959964  # 95 %


@dataclass(frozen=True)
class Share:
    """Labels of a class, or all labels of judged classes."""

    total: int
    flagged: int
    share: float  # estimated to be wrong; of what is not judged, the part that is flagged
    low: float
    high: float
    judged: bool  # out of sample, with enough labels; else nothing is estimated

    @property
    def interval(self) -> tuple[float, float]:
        return self.low, self.high


def not_judged(total: int, flagged: int) -> Share:
    return Share(total, flagged, flagged / total if total else math.nan, 0.0, 1.0, False)


def judged_classes(given: np.ndarray, classes: int) -> np.ndarray:
    """(K,) bool: classes with enough given labels."""
    return np.bincount(given, minlength=classes) >= MIN_JUDGED


def by_class(
    judgement: Judgement | None, simulated: Sequence[Judgement], given: np.ndarray, suspicious: np.ndarray, classes: int
) -> list[Share]:
    total = np.bincount(given, minlength=classes)
    flagged = np.bincount(given[suspicious], minlength=classes)
    judged = total >= MIN_JUDGED
    if judgement is None or len(simulated) < 2 or not judged.any():
        return [not_judged(int(n), int(f)) for n, f in zip(total, flagged)]
    estimate, _ = _wrong(judgement, classes)
    count_MK = np.array([np.bincount(one.given, minlength=classes) for one in simulated])
    error_MK = np.array([np.subtract(*_wrong(one, classes)) for one in simulated])
    bias_K = (error_MK * count_MK).sum(0) / np.maximum(count_MK.sum(0), 1)
    # Few simulations say little about the spread of one class. Of all together it is that of a mean of n_k samples.
    variance = (count_MK * (error_MK - bias_K) ** 2)[:, judged].sum() / ((len(simulated) - 1) * judged.sum())
    out = []
    for k in range(classes):
        if not judged[k]:
            out.append(not_judged(int(total[k]), int(flagged[k])))
            continue
        out.append(_share(int(total[k]), int(flagged[k]), estimate[k] - bias_K[k], variance / total[k], len(simulated)))
    return out


def overall(
    judgement: Judgement | None, simulated: Sequence[Judgement], given: np.ndarray, suspicious: np.ndarray, classes: int
) -> Share:
    """Of all labels in judged classes."""
    judged = judged_classes(given, classes)
    inside = judged[given]
    if judgement is None or len(simulated) < 2 or not inside.any():
        return not_judged(len(given), int(suspicious.sum()))
    return estimate_of(
        int(inside.sum()),
        int(suspicious[inside].sum()),
        float(1 - judgement.right[inside].mean()),
        [_mean_error(one, judged[one.given]) for one in simulated],
    )


def estimate_of(total: int, flagged: int, estimate: float, errors: Sequence[float]) -> Share:
    """A share from its raw estimate and the errors of the same estimate in simulations."""
    return _share(total, flagged, estimate - float(np.mean(errors)), float(np.var(errors, ddof=1)), len(errors))


def _share(total: int, flagged: int, share: float, variance: float, simulations: int) -> Share:
    half = Z * WIDEN * math.sqrt(variance * (1 + 1 / simulations)) + UNTYPICAL
    share = min(max(share, 0.0), 1.0)
    return Share(total, flagged, share, max(share - half, 0.0), min(share + half, 1.0), True)


def _wrong(judgement: Judgement, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """(K,) estimated and, where known, true share of wrong labels by given label."""
    count = np.maximum(np.bincount(judgement.given, minlength=classes), 1)
    estimated = np.bincount(judgement.given, 1 - judgement.right.astype(np.float64), minlength=classes) / count
    if judgement.true is None:
        return estimated, np.full(classes, np.nan)
    wrong = (judgement.given != judgement.true).astype(np.float64)
    return estimated, np.bincount(judgement.given, wrong, minlength=classes) / count


def _mean_error(one: Judgement, inside: np.ndarray) -> float:
    assert one.true is not None
    if not inside.any():
        return 0.0
    return float((1 - one.right[inside]).mean() - (one.given != one.true)[inside].mean())
