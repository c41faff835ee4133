"""How a measurement is written down: values with their spread, the command, the machine and how busy it was."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_BUSY_BEFORE = round(os.getloadavg()[0], 2)


def summary(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 3), "q1": round(low, 3), "q3": round(high, 3), "n": len(values)}


def ratios(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Spread of the ratios within pairs."""
    return summary([a / b for a, b in zip(above, below)])


def write(result: dict[str, Any], *packages: str) -> None:
    """Print the result and keep it as results/NAME.json, where NAME is the benchmark that is running."""
    print(keep(result, *packages))


def keep(result: dict[str, Any], *packages: str) -> str:
    """Keep the result there; returns what was written."""
    script = Path(sys.argv[0])
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "processor": model,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "load_average": [_BUSY_BEFORE, round(os.getloadavg()[0], 2)],
    }
    command = " ".join(["python", f"benchmarks/{script.name}", *sys.argv[1:]])
    text = json.dumps({"command": command, "date": time.strftime("%Y-%m-%d"), "machine": machine} | result, indent=1)
    out = script.parent / "results" / f"{script.stem}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(text + "\n")
    return text
