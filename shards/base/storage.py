"""A folder of shards, local or at any fsspec URL: listing, reading and publishing whole files."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import re
import shutil
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from shards.base.errors import Unreachable, UserError
from shards.base.redact import redact

T = TypeVar("T")
CreateFile = Callable[[str], Any]  # from a file name to a binary file, open for writing
SCHEMES = ("file", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hdfs", "http", "https")
_TEMPORARY = ".tmp-"  # begins the names of folders that are not complete
# Stores where an upload becomes visible whole or not at all; elsewhere a temporary name and a move do that.
_ATOMIC = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")


@functools.lru_cache(maxsize=64)
def _filesystem(scheme: str, process: int) -> Any:
    # Keyed by process: a file system made before a fork must not be used after it.
    import fsspec

    try:
        return fsspec.filesystem(scheme, skip_instance_cache=scheme != "memory")
    except ImportError as error:
        extra = " (pip install 'evenhand[s3]')" if scheme.startswith("s3") else ""
        raise UserError(f"{scheme}:// needs another package: {error}{extra}.") from None


def with_retries(action: Callable[[], T], what: str, deadline: float = 60.0) -> T:
    """Do it, again with growing pauses if it fails, until the deadline; what cannot improve fails at once."""
    end = time.monotonic() + deadline
    usual = 0.25
    while True:
        pause = usual * random.uniform(0.5, 1.5)
        try:
            return action()
        except UserError:
            raise
        except FileNotFoundError:
            raise UserError(f"{what} is missing, or its bucket. Check the address.") from None
        except Exception as error:
            text = redact(str(error)) or type(error).__name__  # HTTP clients put the signed URL into their errors
            if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
                raise UserError(f"{what} may not be read or written: {text}. Check the credentials.") from None
            if getattr(error, "errno", None) == errno.ENOSPC:
                raise
            if time.monotonic() + pause > end:
                raise Unreachable(f"{what} could not be had within {deadline:g} s: {text}. Try again later.") from None
        time.sleep(pause)
        usual = min(usual * 2, 15.0)


class Store(ABC):
    """Files in one place; names are plain or one level deep (`.build/x`). Made by `store_at`."""

    root: Path | None = None  # the folder, if it is local
    folders_appear_whole: bool  # `write_folder` shows nothing until all files are written

    def __init__(self, url: str) -> None:
        self.url = url

    def __repr__(self) -> str:
        return redact(self.url)

    def at(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of a file, None if there is none."""

    @abstractmethod
    def sizes(self, folder: str = "") -> dict[str, int]:
        """Names and sizes of all files in a folder, by one listing; of the web none."""

    @abstractmethod
    def _bytes(self, name: str) -> bytes | None: ...

    def read(self, name: str, limit: int) -> bytes | None:
        """All bytes of a small file, None if there is none."""
        size = self.size(name)
        if size is not None and size > limit:
            raise UserError(
                f"{redact(self.at(name))} has {size} bytes, more than any such file should. Check the path."
            )
        return None if size is None else self._bytes(name)  # it may have gone since

    @abstractmethod
    def read_range(self, name: str, start: int, end: int) -> bytes:
        """A part of a file."""

    @abstractmethod
    def write(self, name: str, data: bytes, lasting: bool = True) -> None:
        """A small file, all of it or nothing; `lasting`: even if the power fails the next moment."""

    @abstractmethod
    def temporary(self) -> Path:
        """A fresh local path to write to before publishing."""

    @abstractmethod
    def publish(self, local: Path, name: str) -> None:
        """Give a finished temporary file its name here; it appears whole."""

    @abstractmethod
    def fetch(self, name: str, local: Path) -> None:
        """One try to copy a file here to a local path."""

    @abstractmethod
    def remove(self, name: str) -> None: ...

    @abstractmethod
    def remove_folder(self, name: str) -> None: ...

    @abstractmethod
    def folders(self) -> list[str]:
        """Names of the folders here."""

    @abstractmethod
    def write_folder(self, name: str) -> AbstractContextManager[CreateFile]:
        """A new folder: the block creates its files in order. If it fails, nothing is left."""

    @abstractmethod
    def discard_folder(self, name: str, first: str) -> None:
        """Remove a folder. If that is interrupted, its file `first` is gone already."""

    @abstractmethod
    def check_writable(self) -> None:
        """Raises what stands in the way of `write_folder`, and removes what killed processes left."""


class LocalStore(Store):
    root: Path
    folders_appear_whole = True

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.root = Path(path)

    def size(self, name: str) -> int | None:
        try:
            return (self.root / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def sizes(self, folder: str = "") -> dict[str, int]:
        try:
            with os.scandir(self.root / folder) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def _bytes(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None

    def read_range(self, name: str, start: int, end: int) -> bytes:
        with open(self.root / name, "rb") as file:
            file.seek(start)
            return file.read(end - start)

    def write(self, name: str, data: bytes, lasting: bool = True) -> None:
        temporary = self.temporary()
        with open(temporary, "wb") as file:
            file.write(data)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        self.publish(temporary, name)

    def temporary(self) -> Path:
        folder = self.root / ".build"  # on the disk of the target, so that publishing is a rename
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{uuid.uuid4().hex}.tmp"

    def publish(self, local: Path, name: str) -> None:
        os.replace(local, self.root / name)

    def fetch(self, name: str, local: Path) -> None:
        shutil.copyfile(self.root / name, local)

    def remove(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def remove_folder(self, name: str) -> None:
        shutil.rmtree(self.root / name, ignore_errors=True)

    def folders(self) -> list[str]:
        return [entry.name for entry in os.scandir(self.root) if entry.is_dir()] if self.root.is_dir() else []

    @contextlib.contextmanager
    def write_folder(self, name: str) -> Iterator[CreateFile]:
        temporary = self.root / f"{_TEMPORARY}{name}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
            temporary.mkdir(parents=True)
            yield lambda file: (temporary / file).open("xb")
            _flush_folder(temporary)
            os.rename(temporary, self.root / name)
            _flush_folder(self.root)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def discard_folder(self, name: str, first: str) -> None:
        trash = self.root / f"{_TEMPORARY}old-{name}"
        shutil.rmtree(trash, ignore_errors=True)
        os.rename(self.root / name, trash)
        shutil.rmtree(trash, ignore_errors=True)

    def check_writable(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        for left in self.root.glob(f"{_TEMPORARY}*"):  # of a process that was killed while writing
            shutil.rmtree(left, ignore_errors=True)
        probe = self.root / f"{_TEMPORARY}probe"
        probe.mkdir()
        probe.rmdir()


def _flush_folder(folder: Path) -> None:
    """Make renames in a folder last through a power cut."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


class RemoteStore(Store):
    folders_appear_whole = False

    def __init__(self, url: str, scheme: str) -> None:
        super().__init__(url.rstrip("/"))
        self.scheme = scheme

    @property
    def fs(self) -> Any:
        return _filesystem(self.scheme, os.getpid())

    def _with_retries(self, action: Callable[[], T], name: str) -> T:
        return with_retries(action, redact(self.at(name)))

    def size(self, name: str) -> int | None:
        def ask() -> int | None:
            try:
                return int(self.fs.info(self.at(name), **self._fresh)["size"])
            except FileNotFoundError:
                return None

        return self._with_retries(ask, name)

    @property
    def _fresh(self) -> dict[str, bool]:
        return {"refresh": True} if self.scheme in ("s3", "s3a") else {}

    def sizes(self, folder: str = "") -> dict[str, int]:
        def ask() -> list[dict[str, Any]]:
            try:
                self.fs.invalidate_cache()
                # Of the web there are no listings, or pages of links without sizes.
                return [] if self.scheme.startswith("http") else self.fs.ls(self.at(folder), detail=True)
            except FileNotFoundError:
                return []

        found = self._with_retries(ask, folder)
        return {item["name"].rsplit("/", 1)[-1]: item["size"] for item in found if item["type"] == "file"}

    def _bytes(self, name: str) -> bytes | None:
        def ask() -> bytes | None:
            try:
                data: bytes = self.fs.cat_file(self.at(name))
                return data
            except FileNotFoundError:
                return None

        return self._with_retries(ask, name)

    def read_range(self, name: str, start: int, end: int) -> bytes:
        def ask() -> bytes:
            data: bytes = self.fs.cat_file(self.at(name), start=start, end=end)
            if len(data) > end - start:  # a web server that knows no ranges sends everything
                data = data[start:end]
            if len(data) != end - start:
                raise OSError(f"{len(data)} of {end - start} bytes arrived")
            return data

        return self._with_retries(ask, name)

    def write(self, name: str, data: bytes, lasting: bool = True) -> None:
        if self.scheme in _ATOMIC:
            self._with_retries(lambda: self.fs.pipe_file(self.at(name), data), name)
            return
        temporary = self.temporary()
        try:
            temporary.write_bytes(data)
            self.publish(temporary, name)
        finally:
            temporary.unlink(missing_ok=True)

    def temporary(self) -> Path:
        return Path(tempfile.gettempdir()) / f"evenhand-{uuid.uuid4().hex}.tmp"

    def publish(self, local: Path, name: str) -> None:
        sent = local.stat().st_size

        def attempt() -> None:
            if self.scheme in _ATOMIC:
                self.fs.put_file(str(local), self.at(name))
            else:
                self.fs.makedirs(self.at(".build"), exist_ok=True)
                temporary = self.at(f".build/{uuid.uuid4().hex}.tmp")
                self.fs.put_file(str(local), temporary)
                self.fs.mv(temporary, self.at(name))
            arrived = self.size(name)
            if arrived != sent:
                raise OSError(f"{arrived} of {sent} bytes arrived")

        self._with_retries(attempt, name)
        local.unlink()

    def fetch(self, name: str, local: Path) -> None:
        self.fs.get_file(self.at(name), str(local))

    def remove(self, name: str) -> None:
        def attempt() -> None:
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(self.at(name))

        self._with_retries(attempt, name)

    def remove_folder(self, name: str) -> None:
        def attempt() -> None:
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm(self.at(name), recursive=True)

        self._with_retries(attempt, name)

    def folders(self) -> list[str]:
        """Everything at this level: object stores know no folders of their own."""

        def ask() -> list[str]:
            self.fs.invalidate_cache()
            try:
                return [path.rstrip("/").rsplit("/", 1)[-1] for path in self.fs.ls(self.at(""), detail=False)]
            except FileNotFoundError:
                return []

        return self._with_retries(ask, "")

    @contextlib.contextmanager
    def write_folder(self, name: str) -> Iterator[CreateFile]:
        try:
            yield lambda file: self.fs.open(self.at(f"{name}/{file}"), "wb")
        except BaseException:
            self.remove_folder(name)
            raise

    def discard_folder(self, name: str, first: str) -> None:
        self.remove(f"{name}/{first}")
        self.remove_folder(name)

    def check_writable(self) -> None:
        probe = self.at(f"{_TEMPORARY}probe")
        self.fs.pipe_file(probe, b"probe")
        self.fs.rm_file(probe)


def store_at(url: str) -> Store:
    """The store at a folder or URL. Refuses schemes that could run a program, and URLs with a password."""
    try:
        parts = urlsplit(url) if "://" in url else None
    except ValueError as error:
        raise UserError(f"'{redact(url)}' is not a URL ({error}). Write a path, or s3://bucket/folder.") from None
    scheme = parts.scheme if parts else ""
    if scheme and scheme not in SCHEMES:
        known = ", ".join(SCHEMES)
        raise UserError(f"'{redact(url)}': shards are not read from {scheme}:// URLs. Known: {known}.")
    if not scheme and re.match(r"[a-z][a-z0-9]*:", url):
        raise UserError(f"'{redact(url)}' is neither a folder nor a URL. Write a path, or s3://bucket/folder.")
    if redact(url).startswith(f"{scheme}://***@"):
        raise UserError(f"{redact(url)} carries a password. Give credentials by environment variables instead.")
    if scheme == "file":
        path = unquote(url.removeprefix("file://"))
        if not path.startswith("/"):
            raise UserError(
                f"'{redact(url)}' is not a folder: after file:// comes an absolute path, as in file:///data/shards."
            )
        return LocalStore(path)
    if not scheme:
        return LocalStore(os.path.expanduser(url))
    return RemoteStore(url, scheme)
