"""From shards to batches on the device: threads decode and cut uint8 views ahead, the device does the rest.

What a batch holds is decided by `order` and keyed random numbers before anything is read, so threads, ranks
and restarts change nothing in it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from pipeline.config import DataConfig
from pipeline.data import augment, order
from pipeline.data.batch import Batch, Pass
from pipeline.data.decode import DRAWS, GREY, DecodeError, Views, decode
from pipeline.data.randoms import uniform
from pipeline.world import World
from shards.settings import UserError

LEAST_ROWS = 2  # batch norm needs two
MAIN, BESIDE = 0, 1  # streams of a pass
_AUGMIX = crc32(b"augmix")


class Samples(Protocol):
    """What the loader asks of a split of shards (`shards.reader.Split`)."""

    given: Any  # (N,) int32
    shard_sizes: Sequence[int]

    def __len__(self) -> int: ...
    def read(self, index: int) -> Any: ...
    def will_need(self, shards: Any) -> None: ...


@dataclass
class Part:
    """This rank's rows of one stream in one micro-batch, first as a plan, then with pixels."""

    index: np.ndarray  # (B,) int64
    valid: np.ndarray  # (B,) float32
    groups: np.ndarray  # (B,) int64
    rows: tuple[int, ...]
    views: tuple[str, ...]
    choices: dict[str, np.ndarray]  # view -> (B, DRAWS)
    plans: dict[str, augment.Plan]  # strong views
    buffer: Tensor  # uint8, at least as long as the pixels
    pixels: Tensor  # (V, B, S, S, 3) uint8, in the buffer
    bad: dict[int, str] = field(default_factory=dict)  # row -> reason
    cut_short: list[int] = field(default_factory=list)  # rows


@dataclass
class Job:
    """One micro-batch."""

    step: int
    parts: list[Part]
    share: float = 1.0
    last: bool = True


class Loader:
    """Batches of one split. Its state is the (tick, step) the caller asks for."""

    def __init__(
        self, split: Samples, config: DataConfig, seed: int, world: World, accumulate: int = 1
    ) -> None:
        self.split, self.config, self.seed, self.world, self.accumulate = (
            split,
            config,
            seed,
            world,
            accumulate,
        )
        self.views = Views(config)
        self.given = np.asarray(split.given)
        self.bad: dict[int, str] = {}  # sample -> why it did not decode
        self.cut_short: set[int] = set()  # samples whose file ends early; what is there was used
        self.wait_seconds = 0.0  # time the consumer stood waiting for pictures
        self._pinned = world.device.type == "cuda"
        self._free: list[tuple[Tensor, torch.cuda.Event | None]] = []  # pixel buffers to use again

    def steps(self, walk: Pass) -> int:
        """Optimiser steps of a pass."""
        return order.steps(len(walk.order), walk.batch or self.config.batch)

    def batches(self, walk: Pass, tick: int, first_step: int = 0) -> Iterator[Batch]:
        """This rank's micro-batches from `first_step` on."""
        allowed = int(np.ceil(self.config.max_bad * len(walk.order) / self.world.size))
        failed: dict[int, str] = {}
        with closing(self._fill(self._jobs(walk, tick, first_step))) as filled:
            for job in filled:
                failed.update(self._note(job))
                if len(failed) > allowed:
                    raise self._too_many(failed, len(walk.order))
                batch, *beside = [self._batch(job, part, tick) for part in job.parts]
                batch.beside = beside[0] if beside else None
                yield batch

    def survey(self, first_row: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """(index, images) of this rank's contiguous part of the split, from its row `first_row` on.

        Test view; nothing is padded or repeated.
        """
        with closing(self._fill(self._survey_jobs(first_row))) as filled:
            for job in filled:
                self._note(job)
                batch = self._batch(job, job.parts[0], 0)
                yield batch.index, batch.views["test"]

    # -- what is in a batch ----------------------------------------------------------------------------------

    def _jobs(self, walk: Pass, tick: int, first_step: int) -> Iterator[Job]:
        streams = [_Stream(MAIN, walk.order, walk.batch or self.config.batch, self.accumulate, self.config)]
        if walk.beside is not None and len(walk.beside):
            batch = walk.beside_batch or streams[0].batch
            streams.append(_Stream(BESIDE, walk.beside, batch, self.accumulate, self.config))
        foretell = [self._foretell(stream.order) for stream in streams]
        for step in range(first_step, self.steps(walk)):
            whole = [stream.rows(step) for stream in streams]
            # All streams are cut into the same number of micro-batches, none of them empty.
            parts = min(len(stream.micro_batches(len(rows))) for stream, rows in zip(streams, whole))
            cuts = [stream.micro_batches(len(rows), parts) for stream, rows in zip(streams, whole)]
            for stream, rows, tell in zip(streams, whole, foretell):
                tell(int(rows[0]) % len(stream.order), len(rows))
            for micro in range(parts):
                share = (cuts[0][micro].stop - cuts[0][micro].start) / len(whole[0])
                held = [
                    self._part(s, rows, cut[micro], tick, walk.views)
                    for s, rows, cut in zip(streams, whole, cuts)
                ]
                yield Job(step, held, share, micro == parts - 1)

    def _part(
        self, stream: _Stream, rows: np.ndarray, micro: slice, tick: int, views: tuple[str, ...]
    ) -> Part:
        """rows: the global batch, as positions in the stream; micro: which of them this micro-batch holds."""
        n, world = micro.stop - micro.start, self.world
        slices = [order.rank_rows(n, rank, world.size, stream.group) for rank in range(world.size)]
        mine = slices[world.rank]
        place = np.arange(micro.start + mine.start, micro.start + mine.stop)  # rows of the global batch
        real = len(place)
        if real < LEAST_ROWS:  # stand-ins that do not count
            place = np.concatenate([place, np.full(LEAST_ROWS - real, place[0] if real else micro.start)])
        groups = place // stream.group
        groups[real:] = -(
            -len(rows) // stream.group
        )  # a group of their own, so that nothing real mixes with them
        index, seen = stream.samples(rows[place])
        held = tuple(max(LEAST_ROWS, s.stop - s.start) for s in slices)
        valid = (np.arange(len(place)) < real).astype(np.float32)
        return self._plan(index, valid, groups, held, views, (self.seed, tick, stream.number), seen)

    def _plan(
        self,
        index: np.ndarray,
        valid: np.ndarray,
        groups: np.ndarray,
        rows: tuple[int, ...],
        views: tuple[str, ...],
        key: tuple[int, ...],
        seen: np.ndarray,
    ) -> Part:
        """Draw all random choices. A sample that comes again in a pass (`seen` before) gets other ones."""
        config, size = self.config, self.config.size
        choices, plans = {}, {}
        ident = index + len(self.given) * seen
        for name in views:
            number = crc32(name.encode())
            if name.startswith(("weak", "strong")):
                choices[name] = self.views.choices(uniform((*key, number), ident, DRAWS))
            elif name != "test":
                raise ValueError(f"a view is called weak..., strong... or test, not {name}")
            if name.startswith("strong") and config.augmix != "none":
                draws = uniform((*key, number, _AUGMIX), ident, augment.DRAWS)
                plans[name] = augment.plan(draws, size, config.augmix, config.augmix_severity)
        shape = (len(views), len(index), size, size, 3)
        buffer = self._buffer(int(np.prod(shape)))
        pixels = buffer[: int(np.prod(shape))].view(shape)
        return Part(index, valid, groups, rows, views, choices, plans, buffer, pixels)

    def _survey_jobs(self, first_row: int) -> Iterator[Job]:
        mine = self.world.slice_of(len(self.given))
        batch = max(1, self.config.batch // self.world.size)
        tell = self._foretell(np.arange(mine.start, mine.stop))
        for start in range(mine.start + first_row, mine.stop, batch):
            index = np.arange(start, min(start + batch, mine.stop))
            tell(start - mine.start, len(index))
            blank = np.zeros(len(index), np.int64)
            part = self._plan(index, np.ones(len(index), np.float32), blank, (), ("test",), (), blank)
            yield Job(0, [part])

    def _foretell(self, walk: np.ndarray) -> Callable[[int, int], None]:
        """A function of (row, rows) that tells the split what comes next when the walk enters a new shard."""
        shard = np.searchsorted(np.cumsum(np.asarray(self.split.shard_sizes)), walk, side="right")
        numbers, first = np.unique(shard, return_index=True)
        by_use = np.argsort(first)
        numbers, first = numbers[by_use], first[by_use]
        told = False

        def tell(row: int, rows: int) -> None:
            nonlocal told
            start, stop = np.searchsorted(first, [row, row + rows])
            if stop > start or not told:
                self.split.will_need(numbers[start:].tolist())
                told = True

        return tell

    # -- pixels ----------------------------------------------------------------------------------------------

    def _fill(self, jobs: Iterator[Job]) -> Generator[Job]:
        """Jobs in order with their pixels in place, `ahead` of them in work while the consumer has one."""
        pool = ThreadPoolExecutor(self.config.threads, thread_name_prefix="decode")
        pending: deque[tuple[Job, list[Future[None]]]] = deque()
        try:
            while True:
                while len(pending) <= self.config.ahead and (job := next(jobs, None)) is not None:
                    pending.append((job, self._submit(pool, job)))
                if not pending:
                    return
                job, work = pending.popleft()
                start = time.perf_counter()
                for future in work:
                    future.result()
                self.wait_seconds += time.perf_counter() - start
                yield job
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, job: Job) -> list[Future[None]]:
        futures = []
        for part in job.parts:
            out = part.pixels.numpy()
            chunk = -(-len(part.index) // self.config.threads)
            for start in range(0, len(part.index), chunk):
                rows = range(start, min(start + chunk, len(part.index)))
                futures.append(pool.submit(self._decode, part, out, rows))
        return futures

    def _decode(self, part: Part, out: np.ndarray, rows: range) -> None:
        for row in rows:
            try:
                picture, cut_short = decode(self.split.read(int(part.index[row])), self.views.least)
            except DecodeError as error:
                part.bad[row] = str(error)
                out[:, row] = GREY
                continue
            if cut_short:
                part.cut_short.append(row)
            for number, name in enumerate(part.views):
                choices = part.choices[name][row] if name in part.choices else None
                self.views.cut(picture, choices, out[number, row])

    def _buffer(self, need: int) -> Tensor:
        if self._free:
            buffer, copied = self._free.pop(0)
            if copied is not None:
                copied.synchronize()
            if buffer.numel() >= need:
                return buffer
        return torch.empty(need, dtype=torch.uint8, pin_memory=self._pinned)

    def _release(self, part: Part) -> None:
        """The part's pixels are on the device, or on their way to it."""
        copied = None
        if self._pinned:
            copied = torch.cuda.Event()
            copied.record()
        self._free.append((part.buffer, copied))

    # -- on the device ---------------------------------------------------------------------------------------

    def _batch(self, job: Job, part: Part, tick: int) -> Batch:
        def move(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(self.world.device)

        views = {
            name: self._picture(name, part.pixels[i], part.plans.get(name))
            for i, name in enumerate(part.views)
        }
        self._release(part)
        return Batch(
            index=move(part.index),
            label=move(self.given[part.index].astype(np.int64)),
            valid=move(part.valid),
            views=views,
            rows=part.rows,
            key=(self.seed, tick, job.step),
            groups=move(part.groups),
            share=job.share,
            last=job.last,
        )

    def _picture(self, name: str, pixels: Tensor, todo: augment.Plan | None) -> Tensor:
        """(B, S, S, 3) uint8 on the host to (B, 3, S, S) float32 on the device."""
        config, device = self.config, self.world.device
        levels = pixels.to(device, non_blocking=True).permute(0, 3, 1, 2).contiguous()
        if not name.startswith("strong"):
            return augment.normalise(levels, config.mean, config.std)
        mean, std = config.strong_mean or config.mean, config.strong_std or config.std
        if todo is None:
            return augment.normalise(levels, mean, std)
        mixture, total = augment.augmix(levels, todo.to(device))
        return augment.normalise(mixture, mean, std, total)

    # -- what went wrong -------------------------------------------------------------------------------------

    def _note(self, job: Job) -> dict[int, str]:
        """Remember the bad pictures of a job; returns those that should have counted."""
        found: dict[int, str] = {}
        for part in job.parts:
            self.cut_short.update(int(part.index[row]) for row in part.cut_short)
            found.update({int(part.index[row]): why for row, why in part.bad.items() if part.valid[row]})
            part.valid[list(part.bad)] = 0
        self.bad.update(found)
        return found

    def _too_many(self, failed: dict[int, str], n: int) -> UserError:
        some = "; ".join(f"sample {index}: {why}" for index, why in list(failed.items())[:3])
        return UserError(
            f"{len(failed)} pictures did not decode on rank {self.world.rank} in an epoch of {n}, more than "
            f"data.max_bad={self.config.max_bad:g} allows ({some}). Check the shards with python -m "
            "shards.verify and build them again, or raise data.max_bad."
        )


class _Stream:
    """An order of samples and how it is cut. The one beside goes round as often as needed."""

    def __init__(
        self, number: int, walk: np.ndarray, batch: int, accumulate: int, config: DataConfig
    ) -> None:
        self.number, self.order, self.batch, self.accumulate = (
            number,
            np.asarray(walk, np.int64),
            batch,
            accumulate,
        )
        self.group = min(
            config.mix_group, max(1, batch // accumulate)
        )  # a micro-batch holds at least one group
        self.seen = order.occurrence(self.order)
        self.rounds = int(self.seen.max(initial=0)) + 1

    def rows(self, step: int) -> np.ndarray:
        """Positions of the global batch of this step; beyond the end they mean the next round."""
        n = len(self.order)
        whole = slice(step * self.batch, (step + 1) * self.batch)
        cut = order.batch_rows(n, self.batch, step) if self.number == MAIN else whole
        return np.arange(cut.start, cut.stop)

    def micro_batches(self, n: int, parts: int = 0) -> list[slice]:
        return order.micro_batches(n, parts or self.accumulate, self.group)

    def samples(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(sample index, how often it came before)."""
        turn, place = np.divmod(rows, len(self.order))
        return self.order[place], self.seen[place] + turn * self.rounds
