"""One pass over the pictures of a split: each is decoded once, and everything that is asked about it is computed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import sched_getaffinity

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shards.decode import DecodeError, decode
from shards.duplicates import CHROMA, SIDE, THUMBNAIL
from shards.picture import read_jpeg_header
from shards.reader import Split

WORK = 256  # short side at which details are measured; a large JPEG is decoded smaller, but not below
MIN_SHARPNESS_SIDE = 64  # sharpness of smaller pictures is not measured
_CHUNK = 64


@dataclass
class Measured:
    """What was measured, by sample index. Of a picture that does not decode only `bytes` and `content` are known."""

    width: NDArray[np.int32]
    height: NDArray[np.int32]
    bytes: NDArray[np.int32]
    content: NDArray[np.uint64]  # digest of the encoded bytes
    pixels: NDArray[np.uint64]  # digest of the decoded ones
    broken: NDArray[np.bool_]  # does not decode
    cut_short: NDArray[np.bool_]  # a part of the picture is missing
    darkest: NDArray[np.float32]  # brightness that 1 % of the pixels do not reach, 0 to 255
    brightest: NDArray[np.float32]  # and that 1 % exceed
    contrast: NDArray[np.float32]  # standard deviation of the thumbnail, of the channel where it is largest
    colour: NDArray[np.float32]  # mean difference between the largest and the smallest channel
    sharpness: NDArray[np.float32]  # strongest fine detail over the range of brightness; nan: too small to say

    @classmethod
    def empty(cls, samples: int) -> Measured:
        def whole() -> NDArray[np.int32]:
            return np.zeros(samples, np.int32)

        def digests() -> NDArray[np.uint64]:
            return np.zeros(samples, np.uint64)

        def flags() -> NDArray[np.bool_]:
            return np.zeros(samples, np.bool_)

        def scores() -> NDArray[np.float32]:
            return np.full(samples, np.nan, np.float32)

        return cls(
            whole(), whole(), whole(), digests(), digests(), flags(), flags(),
            scores(), scores(), scores(), scores(), scores(),
        )  # fmt: skip


def measure(
    split: Split, thumbnails: NDArray[np.uint8], step: Callable[[int], None] = lambda count: None, threads: int = 0
) -> Measured:
    """Measure every picture, and write its thumbnail into `thumbnails` (N, THUMBNAIL), perhaps a memory map."""
    out = Measured.empty(len(split))
    split.prefetch(range(len(split.info.shards)))

    def some(start: int) -> int:
        stop = min(start + _CHUNK, len(split))
        for index in range(start, stop):
            thumbnails[index] = _measure_one(split.read(index), index, out, split.max_pixels)
        return stop - start

    with ThreadPoolExecutor(threads or len(sched_getaffinity(0))) as pool:
        for done in pool.map(some, range(0, len(split), _CHUNK)):
            step(done)
    return out


def digest(*parts: bytes | memoryview) -> int:
    """64 bits of SHA-256: among a million pictures two have the same by chance once in 40 million sets."""
    made = hashlib.sha256()
    for part in parts:
        made.update(part)
    return int.from_bytes(made.digest()[:8], "little")


def _measure_one(data: memoryview, index: int, out: Measured, max_pixels: int) -> NDArray[np.uint8]:
    """Fill in row `index`; returns the thumbnail."""
    out.bytes[index], out.content[index] = len(data), digest(data)
    try:
        pixels, out.cut_short[index] = decode(data, WORK, max_pixels)
    except DecodeError:
        out.broken[index] = True
        return np.zeros(THUMBNAIL, np.uint8)
    height, width = pixels.shape[:2]
    header = read_jpeg_header(data, max_pixels)
    if header is not None and min(header.height, header.width) > min(height, width):  # it was decoded smaller
        height, width = header.height, header.width
    out.height[index], out.width[index] = height, width
    out.pixels[index] = digest(f"{width} {height}".encode(), np.ascontiguousarray(pixels).data)
    image = Image.fromarray(pixels)
    small = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    colours = np.asarray(small)
    out.contrast[index] = colours.std((0, 1)).max()
    out.colour[index] = (colours.max(2) - colours.min(2)).mean()
    _details(image.convert("L"), index, out)
    grey, *chroma = small.convert("YCbCr").split()
    tiny = (np.asarray(part.resize((CHROMA, CHROMA), Image.Resampling.BOX)).ravel() for part in chroma)
    return np.concatenate([np.asarray(grey).ravel(), *tiny])


def _details(grey: Image.Image, index: int, out: Measured) -> None:
    short = min(grey.size)
    if short > WORK:
        size = (max(WORK, round(side * WORK / short)) for side in grey.size)
        grey = grey.resize((next(size), next(size)), Image.Resampling.BILINEAR)
    levels = np.asarray(grey)
    low, high = _quantiles(np.bincount(levels.ravel(), minlength=256))
    out.darkest[index], out.brightest[index] = low, high
    if short >= MIN_SHARPNESS_SIDE:
        wide = levels.astype(np.int16)
        curve = 4 * wide[1:-1, 1:-1] - wide[:-2, 1:-1] - wide[2:, 1:-1] - wide[1:-1, :-2] - wide[1:-1, 2:]
        _, strong = _quantiles(np.bincount(np.abs(curve).ravel()))
        out.sharpness[index] = strong / max(high - low, 1)


def _quantiles(counts: NDArray[np.int64]) -> tuple[int, int]:
    """The values that 1 % of the pixels do not reach, and that 1 % exceed."""
    below = np.cumsum(counts)
    low, high = np.searchsorted(below, (0.01 * below[-1], 0.99 * below[-1]))
    return int(low), int(high)
