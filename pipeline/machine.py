"""What the machine is doing: CPU, memory, disk and GPU, under the names MLflow's system page knows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import psutil

MEGABYTE = 1e6


def usage(folder: Path) -> dict[str, float]:
    memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(folder))
    return {
        "system/cpu_utilization_percentage": psutil.cpu_percent(),
        "system/system_memory_usage_megabytes": memory.used / MEGABYTE,
        "system/system_memory_usage_percentage": memory.percent,
        "system/process_memory_usage_megabytes": psutil.Process().memory_info().rss / MEGABYTE,
        "system/disk_usage_percentage": disk.percent,
        **_gpus(),
    }


def _gpus() -> dict[str, float]:
    torch: Any = sys.modules.get("torch")  # this must not be what imports torch
    if torch is None or not torch.cuda.is_available():
        return {}
    out: dict[str, float] = {}
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        out[f"system/gpu_{number}_memory_usage_percentage"] = 100 * (1 - free / total)
        out[f"system/gpu_{number}_memory_usage_megabytes"] = (total - free) / MEGABYTE
        try:
            out[f"system/gpu_{number}_utilization_percentage"] = float(torch.cuda.utilization(number))
        except Exception:  # needs NVIDIA's management library, which a container may lack
            continue
    return out
