"""Small checkpoints to try things on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint import Checkpointer
from pipeline.world import World


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
