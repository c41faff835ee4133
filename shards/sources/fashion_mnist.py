"""Fashion-MNIST: 70 000 grey pictures of clothes, 28x28, from IDX files as published, as torchvision or as Debian keeps them."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from shards.base.errors import UserError
from shards.base.progress import Log
from shards.config import BuildConfig
from shards.sources import Collection, SourceTable
from shards.sources.idx import NotIdx, find_idx, read_idx
from shards.sources.labels import with_labels

CLASSES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
FILES = {"train": "train", "test": "t10k"}  # how the file names begin
PLACES = ("data/raw", "/usr/share/datasets/fashion-mnist")  # looked at without `path`; the second is Debian's
BELOW = ("", "FashionMNIST/raw")  # the second is torchvision's
SIDE, MOST = 28, 60_000
# Of pictures and labels, unpacked. MNIST has files of the same names and sizes, and would be taken for clothes.
SHA256 = {
    "train": "16d82e2b505296aa2b78bd5ea0992634f30419a4c97def7c907d154a35ac6157",
    "test": "9f1ec356a747bfe4ebab3cfb722d3694c9ca737e2570f6f90cf31d7b6fd689d4",
}
AGAIN = "Get Fashion-MNIST again."


@dataclass(frozen=True)
class FashionReader:
    """Encodes pictures as grey PNG, without loss; each process loads the set once."""

    folder: str

    def read(self, split: str, row: int, key: str) -> bytes:
        out = io.BytesIO()
        number = int(key.rpartition("-")[2])
        Image.fromarray(load(self.folder)[split][0][number]).save(out, "png", compress_level=6)
        return out.getvalue()


def collect(config: BuildConfig, log: Log) -> Collection:
    folder = str(_find(config.path))
    splits = {}
    for split, (_, labels) in load(folder).items():
        keys = pa.array([f"{split}-{number}" for number in range(len(labels))])
        splits[split] = SourceTable(keys, labels, labels)
    return with_labels(Collection("fashion_mnist", CLASSES, splits, FashionReader(folder)), config)


@cache
def load(folder: str) -> dict[str, tuple[NDArray[np.uint8], NDArray[np.int32]]]:
    """Pictures (N, 28, 28) and labels of both splits."""
    out = {}
    for split, begin in FILES.items():
        pictures = _read(Path(folder), f"{begin}-images-idx3-ubyte", 3, MOST * SIDE * SIDE)
        labels = _read(Path(folder), f"{begin}-labels-idx1-ubyte", 1, MOST)
        if pictures.shape[1:] != (SIDE, SIDE) or len(pictures) != len(labels):
            shape = " x ".join(map(str, pictures.shape))
            raise UserError(f"{folder}: the {split} files hold {shape} pictures and {len(labels)} labels. {AGAIN}")
        digest = hashlib.sha256(pictures.data)
        digest.update(labels.data)
        if digest.hexdigest() != SHA256[split]:
            raise UserError(
                f"{folder}: the {split} files are not those of Fashion-MNIST (sha256 differs). MNIST, for example, has files of "
                f"the same names. {AGAIN}"
            )
        out[split] = pictures, labels.astype(np.int32)
    return out


def _read(folder: Path, name: str, dimensions: int, most: int) -> NDArray[np.uint8]:
    file = find_idx(folder, name)
    if file is None:
        raise UserError(f"{folder} has no file {name} or {name}.gz. {AGAIN}")
    try:
        return read_idx(file, dimensions, most)
    except NotIdx as error:
        raise UserError(f"{file} is not the file it should be: {error}. {AGAIN}") from None


def _find(path: str) -> Path:
    """The folder with the files: below `path`, or where they usually are."""
    for place in (path,) if path else PLACES:
        for below in BELOW:
            if find_idx(Path(place) / below, f"{FILES['train']}-images-idx3-ubyte"):
                return Path(place) / below
    where = path or " or ".join(PLACES)
    target = path or PLACES[0]
    raise UserError(
        f"Fashion-MNIST is not in {where}. On Debian and Ubuntu: apt-get install dataset-fashion-mnist (then leave path out). "
        f"Elsewhere: python -c \"from torchvision.datasets import FashionMNIST; FashionMNIST('{target}', download=True)\", or put "
        "the four files train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz and "
        f"t10k-labels-idx1-ubyte.gz into {target}. Then run the same command again."
    )
