"""Pictures that the tests of shards share."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image


def picture(
    seed: int = 0, size: tuple[int, int] = (24, 16), kind: str = "jpeg", mode: str = "RGB", **save: object
) -> bytes:
    """An encoded picture; smooth, so that JPEG keeps it nearly as it is."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (3, 4, 3), np.uint8))
    out = io.BytesIO()
    small.resize(size, Image.Resampling.BICUBIC).convert(mode).save(out, kind, **save)
    return out.getvalue()


def pixels(data: bytes | memoryview) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def fill(root: Path, counts: dict[str, int], kind: str = "jpeg") -> Path:
    """A folder for each class with so many pictures."""
    seed = 0
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            seed += 1
            (root / name / f"{number:03d}.{'jpg' if kind == 'jpeg' else kind}").write_bytes(picture(seed, kind=kind))
    return root


Build = Callable[..., str]
