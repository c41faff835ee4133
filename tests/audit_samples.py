"""Samples made up for the audit page: labels, findings and pictures, without a model."""

from __future__ import annotations

import io
from collections.abc import Iterable
from types import SimpleNamespace

import numpy as np
from PIL import Image

from pipeline.reports.audit.findings import Findings


class MadeUpSplit:
    """What the page and the decisions use of a split."""

    def __init__(self, given: np.ndarray, classes: list[str], keys: list[str] | None = None, side: int = 0) -> None:
        self.given, self.classes = given.astype(np.int32), classes
        self.manifest = SimpleNamespace(hash="0123abcd")
        self._keys = keys or [f"photos/{index:06d}.jpg" for index in range(len(given))]
        self._pictures = [_picture(k, side) for k in range(7)] if side else [b"no picture"]

    def __len__(self) -> int:
        return len(self.given)

    def keys(self, indices: Iterable[int] | None = None) -> list[str]:
        return self._keys if indices is None else [self._keys[index] for index in indices]

    def read(self, index: int) -> bytes:
        return self._pictures[index % len(self._pictures)]


def _picture(number: int, side: int) -> bytes:
    y, x = np.mgrid[:side, :side] / side
    waves = [np.sin((number + 2) * (x + k * y) + k) * 100 + 128 for k in range(3)]
    file = io.BytesIO()
    Image.fromarray(np.stack(waves, -1).astype(np.uint8)).save(file, "png")
    return file.getvalue()


def made_up(
    samples: int, classes: list[str], suspicious: int | None = None, keys: list[str] | None = None, side: int = 0
) -> tuple[Findings, MadeUpSplit]:
    """The first `suspicious` samples are suspicious (all of them, unless told); sample 0 is the worst."""
    given = np.arange(samples) % len(classes)
    doubted = np.arange(samples) < (samples if suspicious is None else suspicious)
    trusted = np.flatnonzero(~doubted)
    near = [
        [int(trusted[(3 * index + k) % len(trusted)]) for k in range(3)] if len(trusted) else []
        for index in range(samples)
    ]
    findings = Findings(
        given,
        true=np.full(samples, -1),
        suggested=(given + 1) % len(classes),
        score=np.linspace(0, 0.9, samples),
        suggested_score=np.full(samples, 0.93),
        weight=None,
        epochs_flagged=np.ones(samples, int),
        suspicious=doubted,
        rule="the model prefers another label",
        neighbours=near,
    )
    return findings, MadeUpSplit(given, classes, keys, side)
