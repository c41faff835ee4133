"""Which device a rank computes on."""

from __future__ import annotations

import torch


def use_device(device: torch.device) -> None:
    """Choose the device for the calling thread. A thread that has not chosen works on GPU 0, and opens a context there."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
