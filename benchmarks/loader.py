"""How fast do pictures come out of the shards?

Measured on 1 393 supermarket photographs (about 464 x 348 JPEG), random resized crops of 299 pixels, batches
of 64, the same number of threads or worker processes for all:

- limit: threads decode and crop chunks of pictures held in memory, and do nothing else;
- ours: `pipeline.data.loader` from tar shards, uint8 batches ready for the device (the device's own work is
  left out by giving the loader torch's `meta` device), with one view and with two; and whole float32 batches;
- ours_ffcv: the same from the FFCV file (`data.loader=ffcv`);
- ffcv: FFCV as its users write it, uint8 batches;
- webdataset: the stock WebLoader with Pillow and torchvision, float32 batches.

Arms run in turns, each once per round; ratios are taken within a round. Processor time per picture is given
too: it says less about waiting, but holds on a busy machine. On a quiet machine:

    python benchmarks/loader.py [rounds]        # writes benchmarks/results/loader.json
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pack import ROOT, photographs, spread_out
from record import ratios, summary, write

from pipeline.config import DataConfig
from pipeline.data import sampling
from pipeline.data.batch import Pass
from pipeline.data.crops import DRAWS, Views
from pipeline.data.keyed_random import uniform
from pipeline.data.loader import open_loader
from pipeline.distributed.world import World
from shards.build import ensure
from shards.config import BuildConfig
from shards.decode import decode
from shards.reader import Split, open_split

THREADS = len(os.sched_getaffinity(0))
BATCH, SIZE = 64, 299
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NOWHERE = World(device=torch.device("meta"))
Arm = Callable[[], Iterator[Any]]  # one epoch, batch by batch


def config(loader: str = "tar") -> DataConfig:
    return DataConfig(
        batch=BATCH,
        size=SIZE,
        crop="resized",
        area=(0.4, 1.0),
        flip=True,
        mean=MEAN,
        std=STD,
        threads=THREADS,
        loader=loader,
    )


def ours(split: Split, views: tuple[str, ...], world: World, loader: str = "tar") -> Arm:
    source = open_loader(split, config(loader), 0, world)
    ticks = iter(range(1_000_000))

    def epoch() -> Iterator[Any]:
        order_key = next(ticks)
        return source.batches(Pass(sampling.shuffled(len(split), 0, order_key), views), order_key)

    return epoch


def limit(split: Split) -> Arm:
    """No order, no batches ahead, no labels: bytes in memory, decoded and cropped in chunks by threads."""
    views = Views(config())
    encoded = [bytes(split.read(index)) for index in range(len(split))]
    choices = views.choices(uniform((0, 0, 0), np.arange(len(encoded)), DRAWS))
    out = np.empty((THREADS, SIZE, SIZE, 3), np.uint8)

    def work(thread: int) -> None:
        for index in range(thread, len(encoded), THREADS):
            views.crop(decode(encoded[index], views.min_side)[0], choices[index], out[thread])

    def epoch() -> Iterator[Any]:
        with ThreadPoolExecutor(THREADS) as pool:
            yield list(pool.map(work, range(THREADS)))

    return epoch


def webdataset(split: Split) -> Arm:
    import webdataset as wds

    from pipeline.models import torchvision_compat

    torchvision_compat.patch_torchvision()
    from torchvision import transforms

    change = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE, scale=(0.4, 1.0)),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    tars = [str(Path(split.url) / shard.name) for shard in split.info.shards]
    samples = (
        wds.WebDataset(tars, shardshuffle=len(tars), empty_check=False)
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg", "json")
        .map_tuple(change, lambda about: about["given"])
        .batched(BATCH)
    )

    def epoch() -> Iterator[Any]:
        return iter(wds.WebLoader(samples, batch_size=None, num_workers=THREADS))

    return epoch


def ffcv(split: Split) -> Arm:
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor

    crop = RandomResizedCropRGBImageDecoder((SIZE, SIZE), scale=(0.4, 1.0))
    loader = Loader(
        split.beton,
        batch_size=BATCH,
        num_workers=THREADS,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        seed=0,
        pipelines={
            "image": [crop, RandomHorizontalFlip(), ToTensor()],
            "given": [IntDecoder(), ToTensor()],
            "true": None,
            "index": None,
            "flipped": None,
            "key": None,
        },
    )
    return lambda: iter(loader)


def processor_seconds() -> float:
    """Of this process, its threads, and its children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def measure(arm: Arm, pictures: int) -> tuple[float, float]:
    """(pictures per second, milliseconds of processor time per picture) of one epoch."""
    start, worked = time.perf_counter(), processor_seconds()
    for _ in arm():
        pass
    return pictures / (time.perf_counter() - start), 1000 * (processor_seconds() - worked) / pictures


def first_batch(make: Callable[[], Arm]) -> tuple[Arm, float]:
    """The arm, and seconds until it first gave a batch, compilation included."""
    start = time.perf_counter()
    arm = make()
    batches = arm()
    next(batches)
    seconds = time.perf_counter() - start
    for _ in batches:  # to the end: half-read epochs would go on working behind the next arm
        pass
    return arm, seconds


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        raw = Path(place) / "raw"
        spread_out(photographs(ROOT / "data" / "raw"), raw, 1)
        built = BuildConfig(source="folder", path=str(raw), output=f"{place}/built", format="both", shard_samples=200)
        split = open_split(ensure(built), "train")
        torch.set_num_threads(1)
        makers: dict[str, Callable[[], Arm]] = {
            "limit": lambda: limit(split),
            "ours": lambda: ours(split, ("weak",), NOWHERE),
            "ours_two_views": lambda: ours(split, ("weak", "weak2"), NOWHERE),
            "ours_float32": lambda: ours(split, ("weak",), World()),
            "ours_ffcv": lambda: ours(split, ("weak",), NOWHERE, "ffcv"),
            "ffcv": lambda: ffcv(split),
            "webdataset": lambda: webdataset(split),
        }
        arms, first = {}, {}
        for name, make in makers.items():
            arms[name], first[name] = first_batch(make)
            torch.set_num_threads(1)  # FFCV changes it
        rates: dict[str, list[float]] = {name: [] for name in arms}
        work: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(rounds):
            for name, arm in arms.items():
                speed, effort = measure(arm, len(split))
                rates[name].append(speed)
                work[name].append(effort)
            print(
                f"round {number + 1}: " + ", ".join(f"{n} {r[-1]:.0f}/s" for n, r in rates.items()),
                flush=True,
            )

    def ratio(above: str, below: str) -> dict[str, float]:
        return ratios(rates[above], rates[below])

    result = {
        "what": "pictures per second from shards, random resized crop 299; ratios within rounds",
        "pictures": len(split),
        "threads": THREADS,
        "pictures_per_second": {name: summary(values) for name, values in rates.items()},
        "processor_ms_per_picture": {name: summary(values) for name, values in work.items()},
        "processor_time_ours_over_limit": ratios(work["ours"], work["limit"]),
        "processor_time_two_views_over_one": ratios(work["ours_two_views"], work["ours"]),
        "ours_over_limit": ratio("ours", "limit"),
        "ours_over_ffcv": ratio("ours", "ffcv"),
        "ours_float32_over_webdataset": ratio("ours_float32", "webdataset"),
        "ours_ffcv_over_ffcv": ratio("ours_ffcv", "ffcv"),
        "cost_of_two_views_over_one": ratio("ours", "ours_two_views"),
        "seconds_to_first_batch": {name: round(value, 2) for name, value in first.items() if name != "limit"},
    }
    write(result, "torch", "torchvision", "webdataset", "ffcv", "simplejpeg", "pillow", "numpy")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
