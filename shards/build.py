"""`python -m shards.build`: pictures become shards, once.

scan the source -> plan (bias, order) -> write shards -> if pictures are unusable, plan again without them
-> sample tables -> manifest, last. Finished shards survive a kill; the next start writes the rest.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from shards import manifest
from shards.base import cli
from shards.base.errors import UserError
from shards.base.files import removed_lock
from shards.base.progress import Log
from shards.base.storage import Store, store_at
from shards.builder import Build, remove_leftovers
from shards.config import BuildConfig, combine, in_old_spelling, with_young
from shards.reader import read_manifest
from shards.record import read_record
from shards.sources import collect
from shards.write import leave_out_pandas, prepare

ABOUT = "Turn pictures into shards: webdataset tars or an FFCV file, a sample table and a manifest."
COMMAND = cli.Command("python -m shards.build", ABOUT, BuildConfig, combine=combine)


def ensure(config: BuildConfig, log: Log = print, rank: int = 0, world: int = 1) -> str:
    """Build the configured shards unless they exist; returns their URL."""
    store = store_at(config.place())
    if config.url:
        if store.size(manifest.FILE) is None:
            raise UserError(f"There are no finished shards at {store}. Build them with python -m shards.build.")
        return store.url
    if _finished(store, config):
        return store.url
    if store.url.startswith("http"):
        raise UserError(f"Nothing can be written to {store}. Choose a folder or an object store as output.")
    if config.format != "tar":
        from shards.beton import require_ffcv

        require_ffcv()
    with _build_lock(store, world):
        if not _finished(store, config):
            Build(store, config, collect(config, log), log, rank, world).run()
    return store.url


def _finished(store: Store, config: BuildConfig) -> bool:
    """Whether the wanted shards exist already; UserError if other shards are in this place."""
    data = store.read(manifest.FILE, manifest.MAX_BYTES)
    if data is None:
        return False
    record = read_record(store)
    options = record["options"] if record else manifest.parse(data, repr(store)).options
    made = in_old_spelling(with_young(BuildConfig().content() | options))  # one younger than the shards had its default
    # A copy of the shards alone does not know where the input was.
    wanted = in_old_spelling(with_young(config.content(inputs=record is not None)))
    differing = [key for key in wanted if made[key] != wanted[key]]
    if differing:
        listed = ", ".join(f"{key}={made[key]!r} (now {wanted[key]!r})" for key in differing[:4])
        raise UserError(
            f"{store} holds shards built with other options: {listed}. Give another output, remove that one, "
            f"or read it as it is with url={store}."
        )
    return True


@contextmanager
def _build_lock(store: Store, world: int) -> Iterator[None]:
    """One builder at a time; the next one finds finished shards. The kernel releases the lock if we are killed."""
    if store.root is None or world > 1:  # every builder publishes the same complete shards, so several do no harm
        yield
        return
    path = store.root.parent / f".{store.root.name}.lock"
    if store.root.is_dir() and not os.access(store.root.parent, os.W_OK):  # a mounted volume
        path = store.root / ".build" / "lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise UserError(f"Cannot write to {path.parent} ({error.strerror}). Choose another output.") from None
    with removed_lock(path):
        yield


def main(argv: list[str]) -> int:
    config = COMMAND.load(argv)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    log: Log = print if rank == 0 else lambda text: None
    if world == 1 and config.writers != 1 and not config.url:
        prepare()
    place = ensure(config, log, rank, world)
    if rank == 0 and not config.url:
        remove_leftovers(store_at(place), read_manifest(place))
    shown = repr(store_at(place))
    inspect = cli.command_name("python -m shards.inspect")
    log(f"Finished shards: {shown}. Look at them with: {inspect} {shlex.quote(shown)}")
    return 0


def start() -> None:
    leave_out_pandas()
    cli.run(main)


if __name__ == "__main__":
    start()
