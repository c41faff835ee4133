"""Run a function on several real gloo ranks and bring home what each returns."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pipeline.distributed.world import World


def on_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """[function(world, *args) of rank 0, 1, ...]; one rank runs right here."""
    if size == 1:
        return [function(World(), *args)]
    return on_started_ranks(size, function, *args)


def on_started_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The same, where one rank gets a process and a process group, too."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (size, folder, function, args), nprocs=size, start_method="fork")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _rank(rank: int, size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    result = function(World(rank, size, rank), *args)
    torch.save(result, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def worker_env() -> dict[str, str]:
    """Environment for commands started by tests: quiet, one thread, restarts that work."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
