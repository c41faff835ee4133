"""Thumbnails for the audit page: inside the page while they are few, else files beside it."""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shards.decode import DecodeError, decode

if TYPE_CHECKING:
    from shards.reader import Split

THUMBNAIL = 128
TINY = 72  # a picture smaller than this stays as it is; the page enlarges its pixels
INLINE = 20_000_000  # bytes of base64 inside the page
FOLDER = "audit_pictures"
BLOCK = 256  # pictures read ahead


@dataclass
class Pictures:
    """Where the page finds its thumbnails, by permanent index."""

    inline: dict[int, str] = field(default_factory=dict)  # base64 of JPEGs
    folder: str = ""  # else files of this folder
    unreadable: list[int] = field(default_factory=list)


def file_name(index: int) -> str:
    return f"{index:09d}.jpg"


def make_pictures(split: Split, indices: np.ndarray, beside: Path, inline: int = INLINE) -> Pictures:
    """Thumbnails of these samples, for a page in the folder `beside`. Those of an older page there are removed."""
    folder = beside / FOLDER
    _remove_old(folder)
    out, size = Pictures(), 0
    for index, data in _thumbnails(split, indices):
        if not data:
            out.unreadable.append(index)
        elif out.folder:
            (folder / file_name(index)).write_bytes(data)
        else:
            out.inline[index] = base64.b64encode(data).decode()
            size += len(out.inline[index])
            if size > inline:
                folder.mkdir(exist_ok=True)
                for earlier, text in out.inline.items():
                    (folder / file_name(earlier)).write_bytes(base64.b64decode(text))
                out.inline, out.folder = {}, FOLDER
    return out


def thumbnail(split: Split, index: int) -> bytes:
    """A JPEG; nothing for a picture that cannot be read."""
    from PIL import Image

    try:
        picture, _ = decode(split.read(index), THUMBNAIL)
    except DecodeError:
        return b""
    image = Image.fromarray(np.ascontiguousarray(picture))
    tiny = max(image.size) < TINY
    if not tiny:
        image.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    image.save(file, "jpeg", quality=95 if tiny else 80)
    return file.getvalue()


def _thumbnails(split: Split, indices: np.ndarray) -> Iterator[tuple[int, bytes]]:
    """In the order of the shards, decoded by a thread for each core."""
    order = iter(np.unique(indices).tolist())
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        while block := list(islice(order, BLOCK)):
            yield from zip(block, threads.map(lambda index: thumbnail(split, index), block))


def _remove_old(folder: Path) -> None:
    """Only what an audit wrote there."""
    if folder.is_dir() and not folder.is_symlink():
        for file in folder.iterdir():
            if re.fullmatch(r"\d{9,}\.jpg", file.name):
                file.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
