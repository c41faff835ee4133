"""CPU, memory, disk and GPU use, under the names MLflow's system page knows."""

from __future__ import annotations

from pathlib import Path

import psutil

MEGABYTE = 1e6
psutil.cpu_percent()  # the first value means nothing; each later one covers the time since the call before


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
    """Use of every GPU, from the driver: torch would open a context on each of them."""
    try:
        import pynvml
    except ImportError:
        return {}
    out: dict[str, float] = {}
    try:
        pynvml.nvmlInit()
        for number in range(pynvml.nvmlDeviceGetCount()):
            device = pynvml.nvmlDeviceGetHandleByIndex(number)
            memory = pynvml.nvmlDeviceGetMemoryInfo(device)
            out[f"system/gpu_{number}_memory_usage_percentage"] = 100 * memory.used / memory.total
            out[f"system/gpu_{number}_memory_usage_megabytes"] = memory.used / MEGABYTE
            out[f"system/gpu_{number}_utilization_percentage"] = float(pynvml.nvmlDeviceGetUtilizationRates(device).gpu)
    except pynvml.NVMLError:  # no driver, or one that does not report everything
        pass
    return out
