"""Checkpoints of a run: written behind its back, verified before use, the newest and the best kept.

Only the lead writes, so only the lead reads: it picks the newest checkpoint whose every byte verifies and sends it to the
other ranks. That works where ranks share no disk, reads the store once, and all ranks get the same verified bytes.

A checkpoint gets a name of its own (`step-000000123`, or `step-000000123.1` if that name is taken) and is never
overwritten, so there is no moment without a complete one. On a local disk it is written under a temporary name and
renamed; in an object store it counts from the moment its manifest, the last object, is there.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline import snapshot
from pipeline.snapshot import MANIFEST, NAME, Damaged, Snapshot, Tree
from pipeline.world import World
from shards.settings import UserError
from shards.storage import Store

log = logging.getLogger(__name__)
TEMPORARY = ".tmp-"


class SaveError(RuntimeError):
    """The last checkpoint could not be written. Worth another try, unlike a UserError."""


@dataclass
class Loaded:
    name: str
    step: int
    tree: Tree
    best: bool = False
    rejected: list[str] = field(default_factory=list)  # sentences about newer checkpoints that were refused


class Checkpointer:
    """Saves and loads the checkpoints of one run. Every rank makes one and calls the same methods."""

    def __init__(self, url: str, keep: int, world: World, background: bool = True) -> None:
        self.store, self.keep, self.world, self.background = Store(url), keep, world, background
        self._host: dict[str, Tensor] = {}
        self._thread: Thread | None = None
        self._failure: str | None = None
        problem = world.share(self._try_folder() if world.leads else None)
        if problem:
            raise UserError(problem)

    # -- saving --------------------------------------------------------------------------------------------------------

    def save(self, step: int, tree: Tree, *, best: bool = False, wait: bool = False) -> None:
        """Copy the tree and write it in the background; the caller may change its tensors when this returns.

        With wait=True it returns when the checkpoint is safe, and raises SaveError if it is not. Else a failed write is
        told as a warning by the next save, and training goes on.
        """
        if not self.world.leads:
            return
        if failure := self._settle():
            log.warning("%s Training goes on.", failure)
        tensors, state = snapshot.encode(tree)
        copies = self._copy(tensors)
        self._thread = Thread(target=self._write, args=(step, best, copies, state), name="checkpoint")
        self._thread.start()
        if wait or not self.background:
            failure = self._settle()
            if failure and wait:
                raise SaveError(failure)
            if failure:
                log.warning("%s Training goes on.", failure)

    def close(self) -> None:
        """Wait for the last write; SaveError if it failed."""
        failure = self._settle()
        self._host.clear()
        if failure:
            raise SaveError(failure)

    def _settle(self) -> str | None:
        """Wait for the write under way; the sentence about it if it failed."""
        if self._thread:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        return failure

    def _copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Host copies; the memory is kept for the next save, since allocating it costs more than copying."""
        kept, self._host = self._host, {}
        for name, tensor in tensors.items():
            tensor = tensor.detach()
            copy = kept.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._host[name] = copy.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return self._host

    def _write(self, step: int, best: bool, tensors: dict[str, Tensor], state: bytes) -> None:
        try:
            taken = [number for found, number, _ in self._listed() if found == step]
            name = f"step-{step:09d}" + (f".{max(taken) + 1}" if taken else "")
            publish = _write_local if self.store.root else _write_remote
            publish(self.store, name, step, best, tensors, state)
        except Exception as error:
            if self.store.root is None and not isinstance(error, OSError):
                log.debug("checkpoint write failed", exc_info=True)
            reason = (
                os.strerror(error.errno)
                if isinstance(error, OSError) and error.errno
                else f"{type(error).__name__}: {error}"
            )
            self._failure = (
                f"The checkpoint of step {step} could not be written to {self.store}: {reason}. "
                f"{_ADVICE.get(getattr(error, 'errno', None), 'Look after the store, or set checkpoint.url to another one.')}"
            )
            return
        try:
            self._prune(name)
        except OSError as error:
            log.warning("Old checkpoints in %s could not be removed: %s.", self.store, error)

    def _prune(self, newest: str) -> None:
        """Remove what is older than the last `keep`, but not the best. Nothing ahead of `newest` is touched: if there is
        something, it was refused or belongs to another try, and is not ours to judge."""
        names = [name for _, _, name in self._listed() if _key(name) <= _key(newest)]
        complete: list[str] = []
        best: str | None = None
        for name in reversed(names):
            try:
                manifest = snapshot.read_manifest(self.store, name)
            except (Damaged, UserError):
                continue
            complete.append(name)
            best = name if best is None and manifest["best"] else best
        for name in set(names) - set(complete[: self.keep]) - {best}:
            _remove(self.store, name)

    # -- loading -------------------------------------------------------------------------------------------------------

    def load(self, name: str | None = None) -> Loaded | None:
        """The newest checkpoint that verifies (or the one named), the same on all ranks; None if there is none yet."""
        return self._load([name] if name else None)

    def best(self) -> Loaded | None:
        """The newest checkpoint that was saved as the best one."""
        names = None
        if self.world.leads:
            names = [name for _, _, name in self._listed() if _is_best(self.store, name)]
        names = self.world.share(names)
        return self._load(names) if names else None

    def _load(self, names: list[str] | None) -> Loaded | None:
        found: Snapshot | None = None
        rejected: list[str] = []
        problem: str | None = None
        if self.world.leads:
            self._settle()
            try:
                found, rejected = choose(
                    self.store, names if names else [name for _, _, name in self._listed()]
                )
            except UserError as error:
                problem = str(error)
        problem = self.world.share(problem)
        if problem:
            raise UserError(problem)
        for sentence in rejected:
            log.warning(sentence)
        snap = self._spread(found)
        rejected = self.world.share(rejected)
        return Loaded(snap.name, snap.step, snap.tree(), snap.best, rejected) if snap else None

    def _spread(self, found: Snapshot | None) -> Snapshot | None:
        """The lead's snapshot on every rank."""
        if self.world.size == 1:
            return found
        facts = (found.name, found.step, found.best, found.state, len(found.tensors)) if found else None
        facts = self.world.share(facts)
        if facts is None:
            return None
        data = found.tensors if found else bytearray(facts[4])
        whole = torch.frombuffer(data, dtype=torch.uint8)
        for piece in whole.split(256 << 20):
            dist.broadcast(piece, src=0)
        return Snapshot(*facts[:4], tensors=data)

    # -- the folder ----------------------------------------------------------------------------------------------------

    def _listed(self) -> list[tuple[int, int, str]]:
        return listed(self.store)

    def _try_folder(self) -> str | None:
        """Find out before training, not after the first epoch, whether checkpoints can be written at all."""
        name = f"{TEMPORARY}probe-{uuid.uuid4().hex}"
        try:
            if self.store.root:
                self.store.root.mkdir(parents=True, exist_ok=True)
                for left in self.store.root.glob(
                    f"{TEMPORARY}*"
                ):  # of a process that was killed while writing
                    shutil.rmtree(left, ignore_errors=True)
                (self.store.root / name).mkdir()
                (self.store.root / name).rmdir()
            else:
                self.store.fs.pipe_file(self.store.at(name), b"probe")
                self.store.fs.rm_file(self.store.at(name))
        except (OSError, NotImplementedError) as error:
            if self.store.root is None and not isinstance(
                error, PermissionError | FileNotFoundError | NotImplementedError
            ):
                raise
            reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
            return f"Checkpoints cannot be written to {self.store}: {reason}. Make it writable, or set checkpoint.url to another place."
        return None


_ADVICE: dict[int | None, str] = {
    errno.ENOSPC: "Free some space there, lower checkpoint.keep, or set checkpoint.url to another place.",
    errno.EDQUOT: "Raise the quota, lower checkpoint.keep, or set checkpoint.url to another place.",
    errno.EROFS: "Make it writable, or set checkpoint.url to another place.",
    errno.EACCES: "Make it writable, or set checkpoint.url to another place.",
}


def listed(store: Store) -> list[tuple[int, int, str]]:
    """(step, number, name) of everything that looks like a checkpoint, oldest first."""
    if store.root:
        names = (
            [entry.name for entry in os.scandir(store.root) if entry.is_dir()] if store.root.is_dir() else []
        )
    else:
        store.fs.invalidate_cache()
        try:
            names = [path.rstrip("/").rsplit("/", 1)[-1] for path in store.fs.ls(store.at(""), detail=False)]
        except FileNotFoundError:
            names = []
    return sorted((*_key(name), name) for name in names if NAME.fullmatch(name))


def choose(store: Store, names: list[str]) -> tuple[Snapshot | None, list[str]]:
    """The newest of `names` (oldest first) that verifies, and a sentence for each newer one that does not."""
    rejected: list[str] = []
    lost = False
    for name in reversed(names):
        try:
            found = snapshot.read(store, name)
            found.tree()
            return found, rejected
        except Damaged as error:
            rejected.append(f"Checkpoint {store}/{name} is not used: {error}.".replace("//step", "/step"))
            # A killed upload leaves objects without a manifest, and that is no loss; a local folder gets its name
            # only when it is complete, so there something was damaged.
            lost = lost or store.root is not None or store.size(f"{name}/{MANIFEST}") is not None
    if lost:
        raise UserError(
            "\n".join(rejected)
            + f"\nNo other checkpoint is left in {store}. Bring back a good copy, or delete or rename the folder to start anew."
        )
    return None, rejected


def read_checkpoint(url: str, best: bool = False) -> Loaded:
    """The newest (or best) good checkpoint of a run's output folder or checkpoint folder, or the one at `url` itself."""
    store = Store(str(url))
    if store.size(MANIFEST) is not None:
        try:
            one = snapshot.read(store, "")
            return Loaded(store.url.rsplit("/", 1)[-1], one.step, one.tree(), one.best)
        except Damaged as error:
            raise UserError(f"The checkpoint {store} cannot be used: {error}. Take another one.") from None
    for place in (store, Store(store.at("checkpoints"))):
        names = [name for _, _, name in listed(place)]
        if best:
            names = [name for name in names if _is_best(place, name)] or names
        if not names:
            continue
        found, rejected = choose(place, names)
        for sentence in rejected:
            log.warning(sentence)
        if found:
            return Loaded(found.name, found.step, found.tree(), found.best, rejected)
    raise UserError(
        f"There is no checkpoint in {store}. Give the output folder of a training run, or a folder named step-…."
    )


def _key(name: str) -> tuple[int, int]:
    match = NAME.fullmatch(name)
    assert match
    return int(match[1]), int(match[2] or 0)


def _is_best(store: Store, name: str) -> bool:
    try:
        return bool(snapshot.read_manifest(store, name)["best"])
    except Damaged:
        return False


def _write_local(
    store: Store, name: str, step: int, best: bool, tensors: dict[str, Tensor], state: bytes
) -> None:
    assert store.root
    temporary = store.root / f"{TEMPORARY}{name}-{uuid.uuid4().hex}"

    def put(file: str, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
        return snapshot.put_file(open(temporary / file, "xb"), pieces)  # noqa: SIM115

    try:
        temporary.mkdir(parents=True)
        snapshot.write(put, step, best, tensors, state)
        _flush_folder(temporary)
        os.rename(temporary, store.root / name)
        _flush_folder(store.root)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_remote(
    store: Store, name: str, step: int, best: bool, tensors: dict[str, Tensor], state: bytes
) -> None:
    def put(file: str, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
        return snapshot.put_file(store.fs.open(store.at(f"{name}/{file}"), "wb"), pieces)

    try:
        snapshot.write(put, step, best, tensors, state)
    except BaseException:
        _remove(store, name)
        raise


def _remove(store: Store, name: str) -> None:
    """Take the manifest first: from then on it is no checkpoint, whatever happens to the rest."""
    if store.root:
        trash = store.root / f"{TEMPORARY}old-{uuid.uuid4().hex}"
        os.rename(store.root / name, trash)
        shutil.rmtree(trash, ignore_errors=True)
    else:
        store.remove(f"{name}/{MANIFEST}")
        store.remove_folder(name)


def _flush_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


# -- one job per folder ------------------------------------------------------------------------------------------------


class Lock:
    """Held until closed or until the process is gone, however it went."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None


def lock(output: str | Path, world: World | None = None, patience: float = 2.0) -> Lock:
    """Make the output folder this job's own; a UserError on all ranks if another living job has it."""
    world = world or World()
    mine: Lock | None = None
    problem: str | None = None
    if world.leads:
        mine, problem = _take(Path(output), patience)
    problem = world.share(problem)
    if problem:
        raise UserError(problem)
    return mine or Lock(None)


def _take(folder: Path, patience: float) -> tuple[Lock | None, str | None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "lock", "a+")  # noqa: SIM115
    except OSError as error:
        return (
            None,
            f"The output folder {folder} cannot be written ({error.strerror}). Make it writable, or set output to another folder.",
        )
    until = time.monotonic() + patience  # a job that was just killed needs a moment to be gone
    while True:
        try:
            # A record lock: unlike flock, it is not inherited by forked children that may outlive the job.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                file.close()
                log.warning(
                    "The file system of %s knows no locks (%s): take care not to start two jobs on it.",
                    folder,
                    error.strerror,
                )
                return Lock(None), None
            if time.monotonic() > until:
                file.seek(0)
                holder = file.read(200).strip() or "unknown"
                file.close()
                return (
                    None,
                    f"Another job ({holder}) is writing to {folder}. Wait for it, stop it, or set output to another folder.",
                )
            time.sleep(0.1)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return Lock(file), None
