"""CIFAR-N: labels that people gave to CIFAR's training pictures, in the file of its authors (CIFAR-10_human.pt).

It is a zip with one pickle, written by torch. It is read like CIFAR's own pickles: nothing in it is run.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shards.base.errors import UserError
from shards.sources.plain_pickle import NotPlainData, read_batch

CLEAN = "clean_label"
MAX_BYTES = 64 << 20  # the files of the authors have 2.4 MB and 1 MB
WHERE = "https://github.com/UCSC-REAL/cifar-10-100n, folder data"


def read_cifar_n(file: str, column: str, true: NDArray[np.int32], classes: int) -> NDArray[np.int32]:
    """The labels called `column`; UserError if they do not belong to these training pictures in this order."""
    path = Path(file)
    if not path.is_file():
        raise UserError(f"There is no label file {file}. The authors' is at {WHERE}; labels= says where it lies here.")
    try:
        tree = read_batch(_pickle(path))
    except (
        NotPlainData,
        zipfile.BadZipFile,
        zlib.error,
        OSError,
        EOFError,
        RuntimeError,
    ) as error:  # damaged or encrypted
        raise UserError(f"{file} is not a file of CIFAR-N: {error}. Take the authors' ({WHERE}).") from None
    known = [name for name, value in tree.items() if isinstance(value, np.ndarray) and name != CLEAN]
    if column not in known:
        raise UserError(f"{file} has no labels '{column}'; it has {', '.join(known) or 'none'}. Set label_column.")
    labels, clean = tree[column], tree.get(CLEAN)
    if labels.shape != true.shape or not ((labels >= 0) & (labels < classes)).all():
        raise UserError(f"{file}: '{column}' does not hold one of {classes} classes for each of {len(true)} pictures.")
    if clean is None or clean.shape != true.shape or (clean != true).any():
        raise UserError(
            f"{file}: its {CLEAN} is not that of these pictures, so its labels are of another set, or in another order. Take "
            f"the file for this set ({WHERE})."
        )
    return np.asarray(labels, np.int32)


def _pickle(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        inside = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
        if len(inside) != 1 or inside[0].file_size > MAX_BYTES:
            raise NotPlainData("it holds no pickle, or one that is too large")
        with archive.open(inside[0]) as stream:
            return stream.read(MAX_BYTES)
