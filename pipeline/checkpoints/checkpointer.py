"""Checkpoints of a run: written in the background, verified before use; the newest and the best are kept.

Only rank 0 writes, so only rank 0 reads: it picks the newest checkpoint whose every byte verifies and sends it to
the other ranks. Ranks need no shared disk, the store is read once, and all ranks get the same bytes.

A checkpoint gets a name of its own (`step-000000123`, or `step-000000123.1` if that one is taken) and is
never overwritten, so a complete one exists at every moment. On a local disk it is written under a
temporary name and renamed; in an object store it counts from the moment its manifest, the last object, is
there.
"""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.checkpoints import file_format
from pipeline.checkpoints.file_format import MANIFEST, Damaged, Snapshot, Tree
from pipeline.checkpoints.upgrade import upgrade_checkpoint
from pipeline.distributed.world import World
from shards.base.errors import UserError
from shards.base.storage import Store, store_at

log = logging.getLogger(__name__)
BROADCAST_BYTES = 64 << 20


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
        self.store, self.keep, self.world, self.background = store_at(url), keep, world, background
        self._host: dict[str, Tensor] = {}
        self._thread: Thread | None = None
        self._failure: str | None = None
        self.newest: str | None = None  # the last one written or loaded, on rank 0
        self._refused: set[str] = set()  # did not verify when loading

    def check_writable(self) -> None:
        """Find out before training, not after the first epoch, whether checkpoints can be written at all."""
        if problem := self.world.on_main(lambda: _try_folder(self.store)):
            raise UserError(problem)

    # -- saving ------------------------------------------------------------------------------------

    def save(self, step: int, tree: Mapping[str, object], *, best: bool = False, wait: bool = False) -> None:
        """Copy the tree and write it in the background. The caller may change its tensors when this returns.

        The next save logs a warning about a failed write, and training goes on. With wait=True this returns when the
        checkpoint is on disk, and raises SaveError if it could not be written.
        """
        if not self.world.is_main:
            return
        self._warn(self._finish_write())
        tensors, state = file_format.encode(tree)
        copies = self._copy(tensors)
        self._thread = Thread(target=self._write, args=(step, best, copies, state), name="checkpoint")
        self._thread.start()
        if wait:
            self._raise(self._finish_write())
        elif not self.background:
            self._warn(self._finish_write())

    def close(self) -> None:
        """Wait for the last write; SaveError if it failed."""
        self._raise(self._finish_write())

    def _finish_write(self) -> str | None:
        """Wait for the current write; returns a sentence if it failed."""
        if self._thread:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        return failure

    def _warn(self, failure: str | None) -> None:
        if failure:
            log.warning("%s Training goes on.", failure)

    def _raise(self, failure: str | None) -> None:
        if failure:
            raise SaveError(failure)

    def _copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Host copies. Their memory is kept for the next save, because allocating costs more than copying."""
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
        """Runs in the writer's thread. A failure becomes a sentence that the training thread logs."""
        try:
            taken = [number for found, number in map(file_format.key, file_format.listed(self.store)) if found == step]
            name = f"step-{step:09d}" + (f".{max(taken) + 1}" if taken else "")
            file_format.write(self.store, name, step, best, tensors, state)
            self.newest = name
        except Exception as error:
            number = error.errno if isinstance(error, OSError) else None
            reason = os.strerror(number) if number else f"{type(error).__name__}: {error}"
            advice = _ADVICE.get(number, "Check the store, or set checkpoint.url to another one.")
            self._failure = f"The checkpoint of step {step} could not be written to {self.store}: {reason}. {advice}"
            return
        try:
            self._prune(name)
        except Exception as error:
            log.warning("Old checkpoints in %s could not be removed: %s.", self.store, error)

    def _prune(self, newest: str) -> None:
        """Keep the last `keep` good ones and the best. Steps after `newest` were refused or belong to another attempt; they
        stay for the user to decide."""
        names = [name for name in file_format.listed(self.store) if file_format.key(name) <= file_format.key(newest)]
        complete: list[str] = []
        best: str | None = None
        for name in reversed([name for name in names if name not in self._refused]):
            try:
                manifest = file_format.read_manifest(self.store, name)
            except (Damaged, UserError):
                continue
            complete.append(name)
            best = name if best is None and manifest["best"] else best
        for name in set(names) - set(complete[: self.keep]) - {best}:
            file_format.remove(self.store, name)

    # -- loading -----------------------------------------------------------------------------------

    def load(self, name: str | None = None, rows: Mapping[str, slice] | None = None) -> Loaded | None:
        """The newest checkpoint that verifies (or the one named), the same on all ranks; None if none is
        there.

        `rows`: of the tensors with these paths, such as `method/memory`, a rank other than rank 0 needs only these rows.

        UserError if there are checkpoints and none of them can be used: a silent new start would
        hide it.
        """
        return self._load([name] if name else None, rows or {})

    def best(self) -> Loaded | None:
        """The newest checkpoint that was saved as the best one."""
        self._warn(self._finish_write())
        names = self.world.on_main(lambda: _best(self.store, file_format.listed(self.store)))
        return self._load(names, {}) if names else None

    def _load(self, names: list[str] | None, rows: Mapping[str, slice]) -> Loaded | None:
        found: Snapshot | None = None
        self._warn(self._finish_write())

        def read() -> dict[str, str]:
            nonlocal found  # on rank 0; `_broadcast` sends it in pieces
            found, refused = choose(self.store, names or file_format.listed(self.store))
            self._refused |= set(refused)
            for sentence in refused.values():
                log.warning(sentence)
            return refused

        refused = self.world.on_main(read)
        loaded = self._broadcast(found, rows)
        self.newest = loaded.name if loaded else None
        if loaded:
            loaded.tree, loaded.rejected = upgrade_checkpoint(loaded.tree), [*refused.values()]
        return loaded

    def _broadcast(self, found: Snapshot | None, rows: Mapping[str, slice]) -> Loaded | None:
        """Rank 0's snapshot on every rank, tensor by tensor."""
        if self.world.size == 1:
            return Loaded(found.name, found.step, found.tree, found.best) if found else None
        header = None
        if found:
            layout = [(name, tensor.shape, tensor.dtype) for name, tensor in found.by_name.items()]
            header = (found.name, found.step, found.best, found.state, layout)
        header = self.world.broadcast_object(header)
        if header is None:
            return None
        name, step, best, state, layout = header
        tensors: dict[str, Tensor] = {}
        for path, shape, dtype in layout:
            if found:
                _send(found.by_name[path])
            else:
                tensors[path] = _receive(shape, dtype, rows.get(path))
        return Loaded(name, step, found.tree if found else file_format.decode(state, tensors), best)


def _send(tensor: Tensor) -> None:
    """From rank 0 to all, as bytes: gloo knows few types."""
    for piece in tensor.reshape(-1).view(torch.uint8).split(BROADCAST_BYTES) if tensor.numel() else ():
        dist.broadcast(piece, src=0)


def _receive(shape: torch.Size, dtype: torch.dtype, rows: slice | None) -> Tensor:
    """What rank 0 sends; of its rows only those asked for are kept."""
    row, size = math.prod(shape[1:]) * dtype.itemsize, math.prod(shape) * dtype.itemsize
    first, last = (rows.start * row, rows.stop * row) if rows else (0, size)
    out, scratch = (torch.empty(n, dtype=torch.uint8) for n in (last - first, min(size, BROADCAST_BYTES)))
    for at in range(0, size, BROADCAST_BYTES):
        piece = scratch[: size - at]
        dist.broadcast(piece, src=0)
        start, stop = max(at, first), min(at + len(piece), last)
        if start < stop:
            out[start - first : stop - first] = piece[start - at : stop - at]
    return out.view(dtype).reshape([rows.stop - rows.start, *shape[1:]] if rows else shape)


_ADVICE: dict[int | None, str] = {
    errno.ENOSPC: "Free some space there, lower checkpoint.keep, or set checkpoint.url to another place.",
    errno.EDQUOT: "Raise the quota, lower checkpoint.keep, or set checkpoint.url to another place.",
    errno.EROFS: "Make it writable, or set checkpoint.url to another place.",
    errno.EACCES: "Make it writable, or set checkpoint.url to another place.",
}


def _try_folder(store: Store) -> str | None:
    """Why the store cannot be written; None if it can."""
    try:
        store.check_writable()
    except (OSError, NotImplementedError) as error:
        permanent = (PermissionError, FileNotFoundError, NotImplementedError)
        if store.root is None and not isinstance(error, permanent):
            raise  # a store that does not answer may answer at the next try
        reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        advice = "Make it writable, or set checkpoint.url to another place."
        return f"Checkpoints cannot be written to {store}: {reason}. {advice}"
    return None


def choose(store: Store, names: list[str]) -> tuple[Snapshot | None, dict[str, str]]:
    """The newest of `names` (oldest first) that verifies, and by name a sentence for each newer one."""
    refused: dict[str, str] = {}
    lost = False
    for name in reversed(names):
        try:
            found = file_format.read(store, name)
            _ = found.tree
            return found, refused
        except Damaged as error:
            refused[name] = f"Checkpoint {store}/{name} is not used: {error}."
            # A killed upload leaves objects without a manifest, and nothing is lost by that. A local folder
            # gets its name only when it is complete, so one without a manifest has been damaged.
            lost = lost or store.folders_appear_whole or store.size(f"{name}/{MANIFEST}") is not None
    if lost:
        raise UserError(
            "\n".join(refused.values()) + f"\nNo good checkpoint is left in {store}. "
            "Bring back a good copy, or delete or rename that folder to start anew."
        )
    return None, refused


def read_checkpoint(url: str | Path, best: bool = False) -> Loaded:
    """The newest (or best) good checkpoint of a run's output folder or of its checkpoint folder, or the one
    at `url` itself."""
    store = store_at(str(url))
    for place in (store, store_at(store.at("checkpoints"))):
        names = file_format.listed(place)
        found, refused = choose(place, (_best(place, names) or names) if best else names)
        for sentence in refused.values():
            log.warning(sentence)
        if found:
            return Loaded(found.name, found.step, upgrade_checkpoint(found.tree), found.best, [*refused.values()])
    if store.size(MANIFEST) is not None:
        try:
            one = file_format.read(store, "")
            return Loaded(store.url.rsplit("/", 1)[-1], one.step, upgrade_checkpoint(one.tree), one.best)
        except Damaged as error:
            raise UserError(f"The checkpoint {store} cannot be used: {error}. Take another one.") from None
    raise UserError(f"There is no checkpoint in {store}. Give the output folder of a run, or a folder step-….")


def _best(store: Store, names: list[str]) -> list[str]:
    def is_best(name: str) -> bool:
        try:
            return bool(file_format.read_manifest(store, name)["best"])
        except Damaged:
            return False

    return [name for name in names if is_best(name)]
