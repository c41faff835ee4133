"""IDX files, the format of MNIST and its relatives: a magic number, the sizes, then bytes. Packed with gzip or not."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BYTES = 0x08  # the type of the items; other types are not read


class NotIdx(Exception):
    """The file is not what it should be; the message says how."""


def find_idx(folder: Path, name: str) -> Path | None:
    """The file `name` or `name.gz` in a folder."""
    return next((file for file in (folder / name, folder / f"{name}.gz") if file.is_file()), None)


def read_idx(file: Path, dimensions: int, most: int) -> NDArray[np.uint8]:
    """The array in a file of bytes with so many dimensions and at most `most` items; NotIdx for anything else.

    Never more than that is read or unpacked, whatever the file says of itself.
    """
    header = 4 + 4 * dimensions
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else open(file, "rb") as stream:
            data = stream.read(header + most + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise NotIdx(f"it cannot be unpacked ({error})") from None
    magic = bytes([0, 0, BYTES, dimensions])
    if len(data) < header or data[:4] != magic:
        raise NotIdx(f"it does not begin like an IDX file of bytes in {dimensions} dimension{'s' * (dimensions > 1)}")
    sizes = [int.from_bytes(data[at : at + 4], "big") for at in range(4, header, 4)]
    if len(data) > header + most or math.prod(sizes) > most:
        raise NotIdx(f"it is larger than the {most:,} items there can be")
    if math.prod(sizes) != len(data) - header:
        shown = " x ".join(map(str, sizes))
        raise NotIdx(f"it says it has {shown} items, but holds {len(data) - header:,}")
    return np.frombuffer(data, np.uint8, offset=header).reshape(sizes)
