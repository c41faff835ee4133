"""Local copies of remote shards."""

from __future__ import annotations

from pathlib import Path

from shards.config import CacheConfig
from shards.manifest import FileInfo
from shards.storage import Store


class Cache:
    def __init__(self, store: Store, config: CacheConfig, verify: bool) -> None:
        self.store, self.config, self.verify = store, config, verify

    def local(self, file: FileInfo) -> Path:
        assert self.store.root is not None
        return self.store.root / file.name

    def ahead(self, files: list[FileInfo]) -> None: ...
