"""`python -m shards.verify URL`: are these shards what their manifest says? Exit code 1 if not."""

from __future__ import annotations

import hashlib
import json
import mmap
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from pydantic import Field

from shards import manifest
from shards.base import cli
from shards.base.errors import UserError
from shards.base.progress import Progress
from shards.base.redact import redact
from shards.base.settings import Settings
from shards.base.storage import Store, store_at, with_retries
from shards.bias import counts_of
from shards.config import OLD_COLUMNS, CacheConfig
from shards.manifest import FileInfo, Manifest, ShardInfo, SplitInfo
from shards.picture import EXTENSIONS, open_picture, pixel_limit
from shards.reader import read_manifest
from shards.sources import Rejected
from shards.tar import BLOCK, header

ABOUT = "Check finished shards: hashes, counts, indices and, if asked, that every picture can be decoded."
MAX_JSON = 1 << 20

Report = Callable[[str], None]


class VerifyConfig(Settings):
    url: str = Field(min_length=1, description="the shards: a folder or URL")
    decode: bool = Field(default=False, description="decode every picture")
    max_pixels: int = Field(
        default=0, ge=0, description="larger pictures count as wrong; 0: the limit the shards were built with"
    )
    cache: CacheConfig = Field(default_factory=CacheConfig, description="copies of remote shards, one at a time")


COMMAND = cli.Command("python -m shards.verify", ABOUT, VerifyConfig, words=("url",))


def verify(config: VerifyConfig, report: Report) -> int:
    """Report every problem; returns their number."""
    store = store_at(config.url)
    about = read_manifest(config.url)
    problems = 0

    def wrong(text: str) -> None:
        nonlocal problems
        problems += 1
        report(text)

    listed = {manifest.FILE, "build.json", *(file.name for file in files(about))}
    present = store.sizes() or {name: size for name in listed if (size := store.size(name)) is not None}
    checked = _Files(store, present, config.cache, wrong)
    for name, info in about.splits.items():
        _SplitCheck(name, info, about, checked, config, wrong).check()
    if about.rejected.table:
        with checked.opened(about.rejected.table):
            pass
    for name in sorted(set(present) - listed):
        wrong(f"{name}: is not listed in the manifest")
    return problems


def files(about: Manifest) -> Iterator[FileInfo]:
    for info in about.splits.values():
        yield from (info.table, *info.shards)
        if info.beton:
            yield info.beton
    if about.rejected.table:
        yield about.rejected.table


class _Files:
    """The files of a store, one at a time. They are read from the store itself, not from the cache."""

    def __init__(self, store: Store, present: dict[str, int], config: CacheConfig, wrong: Report) -> None:
        self.store, self.present, self.config, self.wrong = store, present, config, wrong

    @contextmanager
    def opened(self, file: FileInfo) -> Iterator[Path | None]:
        """Checks presence, size and sha256; yields a local path, None if the file is missing."""
        size = self.present.get(file.name)
        if size is None:
            self.wrong(f"{file.name}: is missing")
            yield None
            return
        if size != file.bytes:
            self.wrong(f"{file.name}: has {size} bytes instead of {file.bytes}")
        with self._copy(file.name, size) as path:
            with open(path, "rb") as handle:
                if hashlib.file_digest(handle, "sha256").hexdigest() != file.sha256:
                    self.wrong(f"{file.name}: sha256 is not that of the manifest")
            yield path

    @contextmanager
    def _copy(self, name: str, size: int) -> Iterator[Path]:
        if self.store.root is not None:
            yield self.store.root / name
            return
        parent = self.config.folder or tempfile.gettempdir()
        with ExitStack() as stack:
            try:
                Path(parent).mkdir(parents=True, exist_ok=True)
                path = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent))) / name
                with_retries(lambda: self._fetch(name, size, path), redact(self.store.at(name)), self.config.deadline)
            except OSError as error:
                raise UserError(
                    f"No copy of {redact(self.store.at(name))} can be kept in {parent} ({error.strerror or error}). "
                    "Make room there, or set cache.folder."
                ) from None
            yield path

    def _fetch(self, name: str, size: int, path: Path) -> None:
        self.store.fetch(name, path)
        if path.stat().st_size != size:
            raise OSError(f"{path.stat().st_size} of {size} bytes received")


class _SplitCheck:
    """The checks of one split."""

    def __init__(
        self,
        name: str,
        info: SplitInfo,
        about: Manifest,
        files: _Files,
        config: VerifyConfig,
        wrong: Report,
    ) -> None:
        self.name, self.info, self.about, self.config = name, info, about, config
        self.files, self.wrong = files, wrong
        self.names = dict(enumerate(about.classes))

    def check(self) -> None:
        if self.info.beton:
            with self.files.opened(self.info.beton):
                pass
        with self.files.opened(self.info.table) as path:
            table = self._table(path) if path else None
        if table is None:
            return
        start = 0
        with Progress(self.info.samples, "samples", None, bar=True) as progress:
            for number, shard in enumerate(self.info.shards):
                rows = table.slice(start, shard.samples).to_pydict()
                with self.files.opened(shard) as path:
                    if path is not None and shard.bytes:
                        self._shard(number, shard, start, rows, path)
                start += shard.samples
                progress.step(shard.samples)

    def _table(self, path: Path) -> pa.Table | None:
        """The sample table, None if it cannot be used; checks it against the manifest."""
        name, info, classes = self.info.table.name, self.info, len(self.about.classes)
        try:
            table = pa.parquet.read_table(path)
            if table.schema.names != manifest.TABLE.names:
                raise pa.ArrowInvalid("other columns than expected")
        except (pa.ArrowException, OSError) as error:
            self.wrong(f"{name}: cannot be read ({error})")
            return None
        if len(table) != info.samples:
            self.wrong(f"{name}: has {len(table)} rows instead of {info.samples}")
            return None
        if not np.array_equal(table["index"].to_numpy(), np.arange(len(table))):
            self.wrong(f"{name}: indices are not 0..{len(table) - 1}")
        given = table["given"].to_numpy()
        if len(given) and (given.min() < 0 or given.max() >= classes):
            self.wrong(f"{name}: a label is outside 0..{classes - 1}")
        elif counts_of(given, classes).tolist() != info.given_counts:
            self.wrong(f"{name}: class counts are not those of the manifest")
        if self.name == "train" and int(np.sum(table["flipped"].to_numpy())) != self.about.bias.flipped:
            self.wrong(f"{name}: the number of flipped labels is not that of the manifest")
        return table

    def _shard(self, number: int, shard: ShardInfo, start: int, rows: dict[str, Any], path: Path) -> None:
        """Compare every header and JSON of the tar with the table."""
        if not path.stat().st_size:
            return  # its size was reported
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            damaged = hashlib.sha256(data).hexdigest() != shard.sha256
            position: int | None = 0
            for row in range(shard.samples):
                sample = {name: column[row] for name, column in rows.items()}
                # After a damaged sample the table says where the next one should be.
                start_at = position if position is not None else sample["offset"] - BLOCK
                problem, position = self._sample(data, start_at, number, start + row, sample)
                if problem is None and (damaged or self.config.decode):
                    problem = self._decode(data, sample)
                if problem:
                    self.wrong(f"{shard.name}: sample {start + row} ({sample['key']!r}): {problem}")
            if position is not None and data[position:] != b"\0" * (2 * BLOCK):
                self.wrong(f"{shard.name}: does not end after its last sample")

    def _sample(
        self, data: mmap.mmap, position: int, number: int, index: int, sample: dict[str, Any]
    ) -> tuple[str | None, int | None]:
        """(what is wrong or None, where the next sample starts or None if that is unknown)"""
        size, extension = sample["size"], sample["format"]
        if extension not in EXTENSIONS:
            return f"format {extension!r} is not allowed", None
        if sample["shard"] != number or sample["offset"] != position + BLOCK:
            return "the table points to another place", None
        if data[position : position + BLOCK] != header(f"{index:08d}.{extension}".encode(), size):
            return "the tar header of the picture is wrong", None
        position = sample["offset"] + size + -size % BLOCK
        try:
            length = int(data[position + 124 : position + 135], 8)
            if data[position : position + BLOCK] != header(f"{index:08d}.json".encode(), length) or length > MAX_JSON:
                raise ValueError
        except ValueError:
            return "the tar header of the JSON is wrong", None
        body = data[position + BLOCK : position + BLOCK + length]
        position += BLOCK + length + -length % BLOCK
        expected = {
            "index": index,
            "given": sample["given"],
            "class": self.names.get(sample["given"]),
            "true": sample["true"] if sample["true"] >= 0 else None,
            "flipped": sample["flipped"],
            "key": sample["key"],
        }
        try:
            same = json.loads(body) in (expected, {OLD_COLUMNS.get(key, key): expected[key] for key in expected})
        except ValueError:
            same = False
        return (None if same else "its JSON does not say what the table says"), position

    def _decode(self, data: mmap.mmap, sample: dict[str, Any]) -> str | None:
        content = data[sample["offset"] : sample["offset"] + sample["size"]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with open_picture(content, self.config.max_pixels or pixel_limit(self.about.options)) as image:
                    image.load()
            except Rejected as reason:
                return str(reason)
        return None


def main(argv: list[str]) -> int:
    config = COMMAND.load(argv)
    problems = verify(config, print)
    about = read_manifest(config.url)
    samples = sum(info.samples for info in about.splits.values())
    tars = any(shard.bytes for info in about.splits.values() for shard in info.shards)
    how = ("and decoded " if tars else "(an FFCV file by its hash only) ") if config.decode else ""
    if problems:
        print(f"{redact(config.url)}: {problems} problems. Copy the files again, or build them anew.")
        return 1
    print(f"{redact(config.url)}: {samples} samples in {len(list(files(about)))} files checked {how}- all well.")
    return 0


def start() -> None:
    cli.run(main)


if __name__ == "__main__":
    start()
