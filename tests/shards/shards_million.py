"""Builds or opens a large generated set in a process of its own, and prints what it took."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image


@cache
def jpegs() -> list[bytes]:
    out = []
    for grey in range(256):
        file = io.BytesIO()
        Image.new("L", (1, 1), grey).save(file, "jpeg")
        out.append(file.getvalue())
    return out


@dataclass(frozen=True)
class Generated:
    def read(self, split: str, row: int, key: str) -> bytes:
        return jpegs()[row % 256]


def peak_mib(process: str = "self") -> float:
    # Not ru_maxrss: that starts from the peak of whoever forked this process.
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


class Watch(threading.Thread):
    """The highest peak of all that this process starts, and what these start: writers are grandchildren."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peaks: dict[str, float] = {}

    def run(self) -> None:
        while True:
            for process in below(str(os.getpid())):
                with suppress(OSError, IndexError):  # it has just ended
                    self.peaks[process] = peak_mib(process)
            time.sleep(0.05)


def below(process: str) -> Iterator[str]:
    with suppress(OSError):
        for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
            yield child
            yield from below(child)


def build(samples: int, output: str) -> dict[str, float]:
    from shards.base.storage import store_at
    from shards.build import Build
    from shards.config import BuildConfig
    from shards.sources import Collection, SourceTable

    labels = (np.arange(samples) % 1000).astype(np.int32)
    chunks = [
        pa.array(
            [f"q{i % 1632:04d}/a_name_as_long_as_usual_{i:09d}.jpg" for i in range(start, min(start + 50000, samples))]
        )
        for start in range(0, samples, 50000)
    ]
    keys = pa.concat_arrays(chunks)
    splits = {
        "train": SourceTable(keys, labels, labels),
        "test": SourceTable(keys[:1000], labels[:1000], labels[:1000]),
    }
    found = Collection("generated", [f"class {k}" for k in range(1000)], splits, Generated())
    config = BuildConfig(output=output, rho=1, noise=0.5, writers=2)
    watch = Watch()
    watch.start()
    begun = time.perf_counter()
    Build(store_at(output), config, found, lambda text: None).run()
    seconds = time.perf_counter() - begun
    highest, count = max(watch.peaks.values()), len(watch.peaks)
    return {"seconds": seconds, "peak_mib": peak_mib(), "others": count, "highest_of_others_mib": highest}


def current_bytes() -> int:
    return int(open("/proc/self/statm").read().split()[1]) * 4096


def opened(url: str) -> dict[str, float]:
    import pyarrow.parquet  # noqa: F401

    from shards.reader import open_split

    open_split(url, "test").read(0)  # imports and first use apart
    before = current_bytes()
    begun = time.perf_counter()
    split = open_split(url, "train")
    seconds = time.perf_counter() - begun
    held = (current_bytes() - before) / len(split)
    begun = time.perf_counter()
    for index in np.random.default_rng(0).integers(0, len(split), 1000):
        split.read(int(index))
    each = (time.perf_counter() - begun) / 1000
    return {"seconds": seconds, "bytes_a_sample": held, "peak_mib": peak_mib(), "read_us": each * 1e6}


if __name__ == "__main__":
    action, argument, place = sys.argv[1:]
    print(json.dumps(build(int(argument), place) if action == "build" else opened(place)))
