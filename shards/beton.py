"""Writing the same samples as an FFCV file. Only this module imports `ffcv` for writing.

JPEG bytes are stored as they are in the tars, so both give the same pixels; other formats become raw pixels.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from shards.base.errors import UserError
from shards.base.progress import Log
from shards.base.storage import Store
from shards.config import CacheConfig
from shards.manifest import FileInfo, Manifest
from shards.picture import to_rgb
from shards.write import ignore_sigint

if TYPE_CHECKING:
    from shards.reader import Split

MIN_PAGE = 1 << 21
FIELDS = ("image", "given", "true", "index", "flipped", "key")


class _Samples:
    """The data set that FFCV's writer reads, by index."""

    def __init__(self, split: Split) -> None:
        self.split, self.flipped, self.keys = split, split.flipped, split.keys()

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        index = int(index)
        split = self.split
        labels = (int(split.given[index]), int(split.true[index]), index, int(self.flipped[index]))
        return (split.read(index), *labels, self.keys[index])


def _store_image(destination: Any, data: memoryview, malloc: Any) -> None:
    """What FFCV's image field does, but a JPEG keeps its bytes."""
    from ffcv.fields.rgb_image import IMAGE_MODES

    with Image.open(io.BytesIO(data)) as image:
        width, height = image.size
        if image.format == "JPEG":
            mode, content = "jpg", np.frombuffer(data, np.uint8)
        else:
            mode, content = "raw", np.asarray(to_rgb(image)).reshape(-1)
    destination["mode"] = IMAGE_MODES[mode]
    destination["height"], destination["width"] = height, width
    destination["data_ptr"], storage = malloc(content.nbytes)
    storage[:] = content


def _write(url: str, about: Manifest, paths: dict[str, str]) -> None:
    """Write each split to its path. Runs in a child process, because FFCV's writer forks."""
    from shards.reader import Split

    os.environ["TQDM_DISABLE"] = "1"
    multiprocessing.set_start_method("fork", force=True)
    with tempfile.TemporaryDirectory() as folder:  # copies, if the tars are remote
        for name, path in paths.items():
            _write_split(Split(url, name, about, CacheConfig(folder=folder), verify=True), path)


def _write_split(split: Split, path: str) -> None:
    from ffcv.fields import IntField, JSONField, RGBImageField
    from ffcv.writer import DatasetWriter

    image = RGBImageField()
    # Set on the object: FFCV finds the type of a field by its exact class.
    image.encode = _store_image
    fields = {"image": image, **{name: IntField() for name in FIELDS[1:-1]}, "key": JSONField()}
    page = MIN_PAGE
    while page < _largest(split) + (1 << 16):
        page *= 2
    # One worker: with more, the order of pages depends on their speed.
    writer = DatasetWriter(path, fields, page_size=page, num_workers=1)
    writer.from_indexed_dataset(_Samples(split))


def _largest(split: Split) -> int:
    """Bytes of the largest stored image."""
    largest = 0
    for index in range(len(split)):
        data = split.read(index)
        largest = max(largest, len(data))
        with Image.open(io.BytesIO(data)) as image:
            if max(image.size) > 65535:
                raise UserError(f"{split.keys([index])[0]} is {image.size}; FFCV stores at most 65535 pixels a side.")
            if image.format != "JPEG":
                largest = max(largest, 3 * image.size[0] * image.size[1])
    return largest


def _exit_with_builder(builder: Connection) -> None:
    """Exit when the builder has ended or a worker of FFCV has died. FFCV itself would wait for ever."""
    children: set[Any] = set()
    while True:
        builder_ended = builder.poll(0.2)  # nothing is ever sent: true means that the other end was closed
        children.update(multiprocessing.active_children())
        if builder_ended or any(child.exitcode not in (None, 0) for child in children):
            for child in children:
                child.kill()
            os._exit(1)


def _start_child(builder: Connection, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_exit_with_builder, args=(builder,), daemon=True).start()
    target(*arguments)


def run_in_child(target: Callable[..., None], *arguments: Any) -> bool:
    """Call it in a new process; returns whether it succeeded. The process and its children end with the caller."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_start_child, args=(receiver, target, arguments))
    with ignore_sigint():
        child.start()
    receiver.close()
    try:
        child.join()
    finally:
        sender.close()
        child.join()
    return child.exitcode == 0


def require_ffcv() -> None:
    """UserError if the package is not installed."""
    if importlib.util.find_spec("ffcv") is None:
        raise UserError(
            "format=beton needs the ffcv package. Install the headers it is compiled with (Debian: "
            "libopencv-dev libturbojpeg0-dev pkg-config), then pip install 'evenhand[ffcv]', or use "
            "format=tar."
        )


def add_betons(store: Store, about: Manifest, only: bool, log: Log) -> Manifest:
    """The manifest with an FFCV file for each split, made from its tars; with `only`, without the tars."""
    paths = {name: store.temporary() for name in about.splits}
    log("Writing FFCV files ...")
    try:
        if not run_in_child(_write, store.url, about, {name: str(path) for name, path in paths.items()}):
            raise UserError("Writing FFCV files failed; the reason is printed above. Try format=tar.")
        return _publish(store, about, paths, only)
    finally:
        for path in paths.values():
            path.unlink(missing_ok=True)


def _publish(store: Store, about: Manifest, paths: dict[str, Path], only: bool) -> Manifest:
    splits = {}
    for name, path in paths.items():
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        beton = FileInfo(name=f"{name}.beton", bytes=path.stat().st_size, sha256=digest)
        store.publish(path, beton.name)
        info = about.splits[name]
        splits[name] = info.model_copy(update={"beton": beton, "shards": [] if only else info.shards})
    return about.model_copy(update={"splits": splits})
