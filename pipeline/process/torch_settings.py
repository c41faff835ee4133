"""Settings of torch for the whole process: TF32, the choice of cuDNN's algorithms, determinism."""

from __future__ import annotations

import os

import torch

from pipeline.config import TrainConfig


def apply_torch_settings(train: TrainConfig) -> None:
    """Called once, before CUDA starts. Most of it changes nothing on a CPU.

    TF32 is for convolutions alone. Matrix products stay in float32, because cosines, prototypes and the neighbour search need
    it, and their backward pass runs after any `with` block has ended. Set by the older of torch's two interfaces:
    torch.compile reads that one, and refuses settings made by the newer.
    """
    torch.set_float32_matmul_precision("highest")  # NVIDIA's images lower it by an environment variable
    torch.backends.cudnn.allow_tf32 = train.tf32
    torch.backends.cudnn.benchmark = not train.deterministic
    torch.backends.cudnn.deterministic = train.deterministic
    torch.use_deterministic_algorithms(train.deterministic)
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats its results only with this
        os.environ.setdefault("NCCL_ALGO", "^NVLS")  # sums made inside NVSwitch may differ from run to run
