"""Pictures and processes that the tests of shards share."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = str(Path(__file__).parents[2])


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


def contents(folder: str | Path) -> dict[str, bytes]:
    names = sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.name != "build.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in names}


def start(program: list[str], arguments: list[str], **environment: str) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": ROOT} | environment
    command = [sys.executable, *program, *arguments]
    # A shell that runs the tests in its background has them ignore Ctrl-C, and all they start.
    hear = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=hear)


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def words(options: dict[str, object], output: Path) -> list[str]:
    return [f"{key}={value}" for key, value in {**options, "output": output}.items()]
