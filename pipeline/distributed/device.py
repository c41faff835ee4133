"""Which device a rank computes on; refuses to train on CPUs by mistake where GPUs are."""

from __future__ import annotations

import json
import os
import time
from glob import glob

import torch
from torch.distributed.distributed_c10d import Store

from shards.base.errors import UserError

GPU_FILES = "/dev/nvidia[0-9]*"  # one for each GPU the NVIDIA driver gives this machine or container
ON_CPU = "choose the CPU by train.device=cpu, or for any command by an empty CUDA_VISIBLE_DEVICES in its environment"
ANSWER_SECONDS = 30.0  # for the other ranks to read that the devices do not fit


def choose_device(wanted: str = "auto", local_rank: int = 0) -> torch.device:
    """The device of this rank. `auto`: a GPU where there is one; UserError if there is one that torch cannot use."""
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        found = sorted(glob(GPU_FILES))
        if wanted == "cuda":
            what = f"there is {found[0]}" if found else f"there is no {GPU_FILES}"
            raise UserError(f"train.device=cuda, but torch can use no GPU here ({what}). {_advice()}")
        if found and not hidden:
            raise UserError(f"This machine has a GPU ({found[0]}) that torch cannot use. {_advice()}")
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"More ranks than GPUs on this machine: this is its rank {local_rank} (LOCAL_RANK, from 0), and torch sees {count} "
            f"(CUDA_VISIBLE_DEVICES may hide others). Give torchrun --nproc_per_node={count}, or {ON_CPU}."
        )
    return torch.device("cuda", local_rank)


def _advice() -> str:
    built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is a build without CUDA"
    return (
        f"torch {torch.__version__} {built}; nvidia-smi shows the driver and the newest CUDA version it knows. Install a "
        f"build of torch that fits it (README, GPUs), or a newer driver, or {ON_CPU}."
    )


def use_device(device: torch.device) -> None:
    """Choose the device for the calling thread. A thread that has not chosen works on GPU 0, and opens a context there."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def describe(device: torch.device) -> str:
    """`cpu`, or `cuda (NVIDIA H100 80GB HBM3)`"""
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


def compare_devices(store: Store, rank: int, size: int, device: str) -> list[str]:
    """The devices of all ranks, each kind once. UserError on all ranks if some have a GPU and some have not.

    By the store, because ranks on different devices cannot make a process group. Called by all ranks together.
    """
    store.set(f"device/{rank}", device)
    if rank == 0:
        every = [store.get(f"device/{other}").decode() for other in range(size)]
        ranks = {kind: [r for r in range(size) if every[r] == kind] for kind in dict.fromkeys(every)}
        store.set("devices", json.dumps(ranks))
    found: dict[str, list[int]] = json.loads(store.get("devices"))
    if len({kind.split()[0] for kind in found}) == 1:
        return list(found)
    store.add("devices/read", 1)
    until = time.monotonic() + ANSWER_SECONDS
    while rank == 0 and store.add("devices/read", 0) < size and time.monotonic() < until:
        time.sleep(0.05)  # the store may live in this process
    listed = "; ".join(f"{kind}: rank {', '.join(map(str, numbers[:16]))}" for kind, numbers in found.items())
    raise UserError(
        f"The ranks have different devices ({listed}). Start the same build of torch on every machine, each with as many ranks "
        f"as it has GPUs, or {ON_CPU}."
    )
