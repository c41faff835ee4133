"""Settings of torch for the whole process: TF32, the choice of cuDNN's algorithms, determinism."""

from __future__ import annotations

import ctypes
import os

import torch

from pipeline.config import TrainConfig
from pipeline.process.amx import avoid_broken_amx
from pipeline.process.log import log


def apply_torch_settings(train: TrainConfig) -> None:
    """Called once, before CUDA starts and before torch computes anything. Most of it changes nothing on a CPU.

    TF32 is for convolutions alone. Matrix products stay in float32, because cosines, prototypes and the neighbour search need
    it, and their backward pass runs after any `with` block has ended. Set by the older of torch's two interfaces:
    torch.compile reads that one, and refuses settings made by the newer.
    """
    keep_freed_memory()
    if train.precision != "fp32" and avoid_broken_amx():
        log.info("this processor announces AMX but cannot use it; half precision goes without")
    torch.set_float32_matmul_precision("highest")  # NVIDIA's images lower it by an environment variable
    torch.backends.cudnn.allow_tf32 = train.tf32
    torch.backends.cudnn.benchmark = not train.deterministic
    torch.backends.cudnn.deterministic = train.deterministic
    if (
        train.deterministic != torch.are_deterministic_algorithms_enabled()
    ):  # the call imports the compiler, for seconds
        torch.use_deterministic_algorithms(train.deterministic)
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats its results only with this
        os.environ.setdefault("NCCL_ALGO", "^NVLS")  # sums made inside NVSwitch may differ from run to run


def keep_freed_memory() -> None:
    """glibc gives the memory of every large tensor back to the system when it is freed, and the system clears it for the next
    one. On a CPU that is a good part of a forward pass.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return
    set_option(-3, 1 << 28)  # M_MMAP_THRESHOLD: what is larger has its own mapping
    set_option(-1, 1 << 30)  # M_TRIM_THRESHOLD: free memory that is kept
