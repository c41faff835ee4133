"""Finding copies of photographs: recall by kind of change, false pairs, and time over bare decoding.

Constants of shards/duplicates.py were chosen on half of the 1 393 supermarket photographs; results are those of the other half:
200 changed copies of each kind among its photographs. A pair of two distinct photographs counts as false, also where
somebody pressed the button twice.

    python benchmarks/duplicates.py
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from photos import photographs
from PIL import Image, ImageEnhance
from record import ratios, write

from shards.decode import decode
from shards.duplicates import THUMBNAIL, near_pairs
from shards.measure import Measured, _measure_one
from shards.picture import MAX_PIXELS

COPIES, ROUNDS = 200, 7
Change = Callable[[Image.Image, np.random.Generator], Image.Image]


def crop(image: Image.Image, rng: np.random.Generator, sides: int = 1) -> Image.Image:
    """3 to 5 % of width and height, anywhere; with sides=2 as much from each side."""
    lost = [int(side * rng.uniform(0.03, 0.05)) for side in image.size]
    left, top = lost if sides == 2 else (int(rng.integers(0, part + 1)) for part in lost)
    return image.crop((left, top, left + image.width - sides * lost[0], top + image.height - sides * lost[1]))


def resize(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    scale = rng.uniform(0.5, 0.9)
    return image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.BICUBIC)


def brightness(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(1 + rng.choice([-0.15, 0.15]))


CHANGES: dict[str, Change] = {
    "recompressed": lambda image, rng: image,
    "resized": resize,
    "cropped 3-5 %": crop,
    "cropped 3-5 % on each side": lambda image, rng: crop(image, rng, 2),
    "brightness +-15 %": brightness,
    "mirrored": lambda image, rng: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "cropped, resized, brightness": lambda image, rng: brightness(resize(crop(image, rng), rng), rng),
}


def encoded(image: Image.Image, quality: int) -> bytes:
    out = io.BytesIO()
    image.save(out, "jpeg", quality=quality)
    return out.getvalue()


def thumbnails(pictures: list[bytes]) -> np.ndarray:
    measured, out = Measured.empty(len(pictures)), np.empty((len(pictures), THUMBNAIL), np.uint8)
    for index, data in enumerate(pictures):
        out[index] = _measure_one(memoryview(data), index, measured, MAX_PIXELS)
    return out


def main() -> None:
    pictures, _, _ = photographs()
    pictures = list(dict.fromkeys(pictures))
    rng = np.random.default_rng(0)
    half = [pictures[k] for k in rng.permutation(len(pictures))[len(pictures) // 2 :]]
    originals = thumbnails(half)
    false = near_pairs(originals, np.ones(len(half), bool))
    result: dict[str, Any] = {
        "photographs": len(half),
        "pairs of distinct photographs": [
            {"pictures": [pictures.index(half[a]), pictures.index(half[b])], "distance": round(float(d), 3)}
            for a, b, d in zip(false.first, false.second, false.distance)
        ],
        "of so many pairs": len(half) * (len(half) - 1) // 2,
        "recall": {},
    }
    for name, change in CHANGES.items():
        chosen = rng.choice(len(half), COPIES, replace=False)
        copies = [
            encoded(change(Image.open(io.BytesIO(half[k])).convert("RGB"), rng), int(rng.integers(40, 91)))
            for k in chosen
        ]
        pairs = near_pairs(np.concatenate([originals, thumbnails(copies)]), np.ones(len(half) + COPIES, bool))
        found = set(zip(pairs.first.tolist(), pairs.second.tolist()))
        hits = sum((int(k), len(half) + turn) in found for turn, k in enumerate(chosen))
        result["recall"][name] = hits / COPIES
    decoding, measuring, searching = [], [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for data in half:
            decode(data)
        middle = time.perf_counter()
        made = thumbnails(half)
        end = time.perf_counter()
        near_pairs(made, np.ones(len(half), bool))
        decoding.append(middle - start)
        measuring.append(end - middle)
        searching.append(time.perf_counter() - end)
    result["measuring over bare decoding, time"] = ratios(measuring, decoding)
    result["measuring and search over bare decoding, time"] = ratios(np.add(measuring, searching).tolist(), decoding)
    result["seconds for 1000 pictures, one thread"] = {
        name: round(1000 / len(half) * float(np.median(values)), 2)
        for name, values in (("decoding", decoding), ("measuring", measuring), ("search", searching))
    }
    write(result, "numpy", "pillow", "simplejpeg")


if __name__ == "__main__":
    main()
