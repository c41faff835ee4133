"""Small checkpoints to try things on, and a small disk to run out of."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoints.checkpointer import Checkpointer
from pipeline.distributed.world import World


def tree_of(step: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(step)
    return {
        "model": {
            "weight": torch.randn(7, 5, generator=made),
            "bias": torch.randn(5, generator=made).bfloat16(),
        },
        "optimizer": {
            "state": {"0": {"momentum": torch.randn(7, 5, generator=made).double()}},
            "lr": 0.1 / 3,
        },
        "beliefs": {"clean": torch.rand(9, generator=made) > 0.5, "count": torch.tensor(step)},
        "position": {"epoch": step // 10, "seen": [step, None, True, "ä \u0000"]},
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other))
    return type(one) is type(other) and one == other


def saved(folder: Path, steps: list[int], keep: int = 5) -> Checkpointer:
    checkpointer = Checkpointer(str(folder), keep, World())
    for step in steps:
        checkpointer.save(step, tree_of(step))
    checkpointer.close()
    return checkpointer


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@dataclass
class SmallDisk:
    """Two megabytes: a file system of its own where one may be mounted, else a limit on the size of files."""

    path: Path
    mounted: bool

    @property
    def when_full(self) -> str:
        return "No space left on device" if self.mounted else "File too large"

    @contextlib.contextmanager
    def full(self, folder: str) -> Iterator[None]:
        """No byte fits meanwhile, or else the folder is in the way of itself."""
        if not self.mounted:
            with self.unwritable(folder):
                yield
            return
        filler = self.path / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"\0" * 4096):
                pass
        yield
        filler.unlink()

    @contextlib.contextmanager
    def unwritable(self, folder: str) -> Iterator[str]:
        """Nothing can be written meanwhile; the reason the system gives."""
        if self.mounted:
            subprocess.run(["mount", "-o", "remount,ro", self.path], check=True)
            yield "Read-only file system"
            subprocess.run(["mount", "-o", "remount,rw", self.path], check=True)
        else:
            os.rename(folder, f"{folder}.away")
            Path(folder).touch()
            yield "Not a directory"
            os.unlink(folder)
            os.rename(f"{folder}.away", folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, before[1]))
    yield SmallDisk(place, mounted)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    if mounted:
        subprocess.run(["umount", "-l", place], check=True)
