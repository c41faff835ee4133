"""How much host memory a piece of work needs at its peak: the whole process (Linux), or its tensors alone."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")
MB = 1 << 20


def peak_growth(work: Callable[[], T]) -> tuple[T, float]:
    """What `work` returns, and by how many MB the process grew beyond its size before, at the highest."""
    libc = ctypes.CDLL(None)
    for option in (
        -3,
        -1,
    ):  # as the C library begins: what another test set (keep_freed_memory) would hide what `work` takes
        libc.mallopt(option, 128 << 10)
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now the present size
    before = _size("VmRSS")
    result = work()
    return result, (_size("VmHWM") - before) / 1024


def peak_of_tensors(work: Callable[[], object]) -> int:
    """How many bytes the tensors hold that `work` makes, at the highest: what no library's own buffers blur."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    results = found.profiler.kineto_results  # type: ignore[union-attr]
    memory = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    return max(itertools.accumulate(size for _, size in memory))


def _size(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))
