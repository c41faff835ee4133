"""A folder of shards, local or at any fsspec URL: listing, reading and publishing whole files."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shards.settings import UserError

SCHEMES = ("file", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hdfs", "http", "https")
# Stores where an upload becomes visible whole or not at all; elsewhere a temporary name and a move do that.
_ATOMIC = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")


def redact(url: str) -> str:
    """The URL without anything secret, for messages."""
    clean = re.sub(r"//[^/@]*@", "//***@", url)
    return clean.split("?")[0] if "://" in clean else clean


@functools.lru_cache(maxsize=64)
def _filesystem(scheme: str, authority: str, process: int) -> Any:
    # Keyed by process: a file system made before a fork must not be used after it.
    import fsspec

    try:
        return fsspec.filesystem(scheme, skip_instance_cache=scheme != "memory")
    except ImportError as error:
        extra = " (pip install 'evenhand[s3]')" if scheme.startswith("s3") else ""
        raise UserError(f"{scheme}:// needs another package: {error}{extra}.") from None


class Store:
    """Files in one place. Names are plain or one level deep (`.build/x`)."""

    def __init__(self, url: str) -> None:
        scheme = urlsplit(url).scheme if "://" in url else ""
        if scheme and scheme not in SCHEMES:
            raise UserError(
                f"'{redact(url)}': shards are not read from {scheme}:// URLs. Known: {', '.join(SCHEMES)}."
            )
        if not scheme and re.match(r"[a-z]+:", url):
            raise UserError(
                f"'{redact(url)}' is neither a folder nor a URL. Write a path, or s3://bucket/folder."
            )
        if scheme and "@" in urlsplit(url).netloc:
            raise UserError(
                f"{redact(url)} carries a password. Give credentials by environment variables instead."
            )
        self.scheme = "" if scheme == "file" else scheme
        self.url = urlsplit(url).path if scheme == "file" else url.rstrip("/")
        self.root = Path(self.url) if not self.scheme else None

    def __repr__(self) -> str:
        return redact(self.url)

    @property
    def fs(self) -> Any:
        return _filesystem(self.scheme, urlsplit(self.url).netloc, os.getpid())

    def at(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if there is none."""
        try:
            return (
                (self.root / name).stat().st_size if self.root else int(self.fs.info(self.at(name))["size"])
            )
        except (FileNotFoundError, NotADirectoryError):
            return None

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Names and sizes of all files in a folder, by one listing."""
        if self.root:
            try:
                with os.scandir(self.root / folder) as entries:
                    return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
            except (FileNotFoundError, NotADirectoryError):
                return {}
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(self.at(folder), detail=True)
        except FileNotFoundError:
            return {}
        return {item["name"].rsplit("/", 1)[-1]: item["size"] for item in found if item["type"] == "file"}

    def read(self, name: str, limit: int) -> bytes | None:
        """All bytes of a small file, None if there is none."""
        size = self.size(name)
        if size is None:
            return None
        if size > limit:
            raise UserError(
                f"{redact(self.at(name))} has {size} bytes, more than any such file should. Check the path."
            )
        try:
            return (self.root / name).read_bytes() if self.root else self.fs.cat_file(self.at(name))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """A small file, all of it or nothing."""
        if self.root:
            temporary = self.temporary()
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self.publish(temporary, name)
        elif self.scheme in _ATOMIC:
            self.fs.pipe_file(self.at(name), data)
        else:
            temporary_name = self.at(f".build/{uuid.uuid4().hex}.tmp")
            self.fs.pipe_file(temporary_name, data)
            self._move(temporary_name, name)

    def temporary(self) -> Path:
        """A fresh local path to write to before publishing; beside the target if that is local."""
        import tempfile

        folder = self.root / ".build" if self.root else Path(tempfile.gettempdir())
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{uuid.uuid4().hex}.tmp"

    def publish(self, local: Path, name: str) -> None:
        """Give a finished local file its name here; it appears whole."""
        if self.root:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(local, self.root / name)
            return
        if self.scheme in _ATOMIC:
            self.fs.put_file(str(local), self.at(name))
        else:
            temporary_name = self.at(f".build/{uuid.uuid4().hex}.tmp")
            self.fs.makedirs(self.at(".build"), exist_ok=True)
            self.fs.put_file(str(local), temporary_name)
            self._move(temporary_name, name)
        sent = local.stat().st_size
        self.fs.invalidate_cache()
        if self.size(name) != sent:
            raise OSError(
                f"{redact(self.at(name))} did not arrive whole ({self.size(name)} of {sent} bytes)."
            )
        local.unlink()

    def _move(self, temporary: str, name: str) -> None:
        self.fs.mv(temporary, self.at(name))

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self.root:
                (self.root / name).unlink()
            else:
                self.fs.rm_file(self.at(name))

    def remove_folder(self, name: str) -> None:
        if self.root:
            import shutil

            shutil.rmtree(self.root / name, ignore_errors=True)
            return
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self.at(name), recursive=True)
