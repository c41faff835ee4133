"""From shards to batches on the device: threads decode and crop uint8 views ahead, the device does the rest.

The order and keyed random numbers decide what a batch holds before anything is read. Threads, ranks and restarts change
nothing in it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from pipeline.config import DataConfig
from pipeline.data import augment, colour_jitter, sampling
from pipeline.data.batch import Batch, Pass
from pipeline.data.crops import CONTRAST, DRAWS, GREY, Views, center_crop
from pipeline.data.keyed_random import uniform
from pipeline.data.partition import MicroBatch, RankBatch, micro_batches, survey_batches
from pipeline.distributed.device import use_device
from pipeline.distributed.world import World
from shards.base.errors import UserError
from shards.decode import DecodeError, decode
from shards.picture import MAX_PIXELS

KEEP_BYTES = 256 << 20
_AUGMIX, _COLOURS = crc32(b"augmix"), crc32(b"colours")


Encoded = bytes | memoryview  # a JPEG, PNG or WebP file
Change = augment.AugMixDraws | Tensor  # of a strong view, or of the colours of a contrast view


class Samples(Protocol):
    """What the loader needs of a split (`shards.reader.Split`)."""

    given: np.ndarray  # (N,) int32

    @property
    def shard_sizes(self) -> Sequence[int]: ...
    def __len__(self) -> int: ...
    def read(self, index: int) -> Encoded: ...
    def prefetch(self, shards: Iterable[int]) -> None: ...


@dataclass
class Part:
    """Rows with their random draws, and a buffer for their pixels."""

    rows: RankBatch
    views: tuple[str, ...]
    choices: dict[str, np.ndarray]  # random views -> (B, DRAWS)
    changes: dict[str, Change]  # strong and contrast views, on the device
    buffer: Tensor  # uint8, at least as long as the pixels
    pixels: Tensor  # (V, B, S, S, 3) uint8, in the buffer
    bad: dict[int, str] = field(default_factory=dict)  # row -> reason
    cut_short: list[int] = field(default_factory=list)  # rows


Filled = tuple[MicroBatch, list[Part]]


def open_loader(
    split: Samples, config: DataConfig, seed: int, world: World, accumulate: int = 1, channels_last: bool = False
) -> Loader:
    """The loader chosen by data.loader."""
    if config.loader == "ffcv":
        from pipeline.data.ffcv_loader import BetonLoader

        return BetonLoader(split, config, seed, world, accumulate, channels_last)
    return Loader(split, config, seed, world, accumulate, channels_last)


def _constants(values: Sequence[float], world: World) -> Tensor:
    return torch.tensor(values, device=world.device)


class Loader:
    """Batches of one split. Which ones depends only on (order_key, step) of the call."""

    def __init__(
        self,
        split: Samples,
        config: DataConfig,
        seed: int,
        world: World,
        accumulate: int = 1,
        channels_last: bool = False,
    ) -> None:
        """`channels_last`: memory layout of the images, that of the network (model.channels_last)."""
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.split, self.config, self.seed = split, config, seed
        self._max_pixels = getattr(split, "max_pixels", MAX_PIXELS)
        self.world, self.accumulate = world, accumulate
        self.views = Views(config)
        self.given = np.asarray(split.given)
        self.encode: Callable[[Tensor], Tensor] = lambda images: images  # a frozen backbone, for a method on features
        self.bad: dict[int, str] = {}  # sample -> why it did not decode
        self.cut_short: set[int] = set()  # samples whose file is truncated; the part that decodes is used
        self.wait_seconds = 0.0  # time the consumer waited for pictures
        n, size = len(self.given), config.size
        # If all views are cut from one small square and all squares fit, pictures are decoded once in a run.
        keep = self.views.from_square and n * size * size * 3 <= KEEP_BYTES
        self._cached = np.zeros(n, bool) if keep else None
        self._cache = np.zeros((n if keep else 0, size, size, 3), np.uint8)
        self._mean, self._std = _constants(config.mean, world), _constants(config.std, world)
        self._strong_mean = _constants(config.strong_mean or config.mean, world)
        self._strong_std = _constants(config.strong_std or config.std, world)
        self._pinned = world.device.type == "cuda"
        self._free: list[tuple[Tensor, torch.cuda.Event | None]] = []  # pixel buffers to use again

    def steps(self, pass_: Pass) -> int:
        """Optimiser steps of a pass."""
        return sampling.steps(len(pass_.order), pass_.batch or self.config.batch)

    def batches(self, pass_: Pass, order_key: int, first_step: int = 0) -> Iterator[Batch]:
        """This rank's micro-batches from `first_step` on."""
        config, world = self.config, self.world
        allowed = int(np.ceil(config.max_bad * len(pass_.order) / world.size))
        failed: dict[int, str] = {}
        todo = micro_batches(pass_, config.batch, self.accumulate, config.mix_group, world.rank, world.size, first_step)
        prefetch = self._prefetcher(pass_.order, pass_.second)
        with closing(self._fill(todo, pass_.views_by_stream, order_key, prefetch)) as filled:
            for micro, parts in filled:
                failed.update(self._mask_undecodable(parts))
                if len(failed) > allowed:
                    raise self._too_many(failed, len(pass_.order))
                batch, *second = [self._batch(micro, part, order_key, pass_.learner) for part in parts]
                batch.second = second[0] if second else None
                yield batch

    def survey(self, first_row: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """(index, images) of this rank's contiguous part of the split, in the test view, without padding."""
        mine = self.world.rank_slice(len(self.given))
        rows = slice(mine.start + first_row, mine.stop)
        for batch in self.consecutive(rows, ("test",), self.config.eval_rows(self.world.size)):
            yield batch.index, batch.views["test"]

    def consecutive(self, rows: slice, views: tuple[str, ...], size: int) -> Iterator[Batch]:
        """Samples `rows` in index order, `size` at a time, without padding."""
        prefetch = self._prefetcher(np.arange(rows.start, rows.stop), None)
        with closing(self._fill(survey_batches(rows, size), (views,), 0, prefetch)) as filled:
            for micro, parts in filled:
                self._mask_undecodable(parts)
                yield self._batch(micro, parts[0], 0)

    # -- pixels --------------------------------------------------------------------------------------------

    def _fill(
        self,
        todo: Iterator[MicroBatch],
        views: tuple[tuple[str, ...], ...],
        order_key: int,
        prefetch: Callable[[np.ndarray], None],
    ) -> Generator[Filled]:
        """Micro-batches in order with their pixels, the views by stream; `prefetch` more are decoded while the consumer has one."""
        pool = self._threads(self.config.threads)
        pending: deque[tuple[Filled, list[Future[None]]]] = deque()
        try:
            while True:
                while len(pending) <= self.config.prefetch and (micro := next(todo, None)) is not None:
                    parts = [self._draw_random(rows, views[rows.stream], order_key) for rows in micro.parts]
                    for rows in micro.parts:
                        prefetch(rows.index)
                    work = [f for part in parts for f in self._submit(pool, self._decode, part)]
                    pending.append(((micro, parts), work))
                if not pending:
                    return
                filled, work = pending.popleft()
                start = time.perf_counter()
                for future in work:
                    future.result()
                self.wait_seconds += time.perf_counter() - start
                yield filled
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _threads(self, count: int) -> ThreadPoolExecutor:
        """Threads of this loader, each on the device of the rank."""
        return ThreadPoolExecutor(count, "decode", initializer=use_device, initargs=(self.world.device,))

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[..., None], part: Part) -> list[Future[None]]:
        """The rows of a part, split into one run per thread."""
        n = len(part.rows.index)
        run = -(-n // self.config.threads)
        return [pool.submit(work, part, range(start, min(start + run, n))) for start in range(0, n, run)]

    def _draw_random(self, rows: RankBatch, views: tuple[str, ...], order_key: int) -> Part:
        """Draw all random numbers. A sample that is repeated in a pass gets other ones."""
        config = self.config
        choices: dict[str, np.ndarray] = {}
        changes: dict[str, Change] = {}
        ident = rows.index + len(self.given) * rows.seen
        for name in views:
            key = (self.seed, order_key, rows.stream, crc32(name.encode()))
            if name.startswith(("weak", "strong", CONTRAST)):
                choices[name] = self.views.choices(uniform(key, ident, DRAWS), name.startswith(CONTRAST))
            elif name != "test":
                raise ValueError(f"a view is called weak..., strong..., contrast... or test, not {name}")
            if name.startswith("strong") and config.augmix != "none":
                draws = uniform((*key, _AUGMIX), ident, augment.DRAWS)
                changes[name] = augment.draw_augmix(draws, config.size, config.augmix, config.augmix_severity)
            if name.startswith(CONTRAST):
                changes[name] = colour_jitter.draw(uniform((*key, _COLOURS), ident, colour_jitter.DRAWS))
        shape = (len(views), len(rows.index), config.size, config.size, 3)
        buffer = self._buffer(int(np.prod(shape)))
        return Part(rows, views, choices, changes, buffer, buffer[: int(np.prod(shape))].view(shape))

    def _decode(self, part: Part, rows: range) -> None:
        for row in rows:
            index = int(part.rows.index[row])
            if self._cached is not None and self._cached[index]:
                self._crop_views(part, row, self._cache[index])
            else:
                self._decode_row(part, row, self.split.read(index))

    def _decode_row(self, part: Part, row: int, data: Encoded) -> None:
        try:
            picture, cut_short = decode(data, self.views.min_side, self._max_pixels)
        except DecodeError as error:
            part.bad[row] = str(error)
            part.pixels[:, row] = GREY
            return
        if cut_short:
            part.cut_short.append(row)
        if self._cached is not None:
            index = int(part.rows.index[row])
            size = self.config.size
            self._cache[index] = picture = center_crop(picture, size, size, self.config.interpolation)
            self._cached[index] = True
        self._crop_views(part, row, picture)

    def _crop_views(self, part: Part, row: int, picture: np.ndarray) -> None:
        """All views of a row from its picture."""
        out = part.pixels.numpy()
        for number, name in enumerate(part.views):
            choices = part.choices[name][row] if name in part.choices else None
            self.views.crop(picture, choices, out[number, row], name.startswith(CONTRAST))

    def _prefetcher(self, order: np.ndarray, second: np.ndarray | None) -> Callable[[np.ndarray], None]:
        """A function to call with samples about to be read. At the first of a shard the split prefetches the next shards."""
        ends = np.cumsum(np.asarray(self.split.shard_sizes))
        orders = [order] if second is None else [order, second]
        uses = np.concatenate([np.searchsorted(ends, samples, side="right") for samples in orders])
        numbers, first = np.unique(uses, return_index=True)
        waiting = dict.fromkeys(numbers[np.argsort(first)].tolist())  # in order of first use

        def prefetch(samples: np.ndarray) -> None:
            opened = set(np.searchsorted(ends, samples, side="right").tolist()) & waiting.keys()
            if opened:
                self.split.prefetch(list(waiting))
                for number in opened:
                    del waiting[number]

        return prefetch

    def _buffer(self, need: int) -> Tensor:
        if self._free:
            buffer, copied = self._free.pop(0)
            if copied is not None:
                copied.synchronize()
            if buffer.numel() >= need:
                return buffer
        return torch.empty(need, dtype=torch.uint8, pin_memory=self._pinned)

    def _release(self, part: Part) -> None:
        """The pixels are on the device, or being copied to it: the buffer may be used again after that."""
        copied = None
        if self._pinned:
            copied = torch.cuda.Event()
            copied.record()
        self._free.append((part.buffer, copied))

    # -- on the device -------------------------------------------------------------------------------------

    def _batch(self, micro: MicroBatch, part: Part, order_key: int, learner: int = 0) -> Batch:
        rows = part.rows
        views = {
            name: self.encode(self._to_input(name, part.pixels[number], part.changes.get(name)))
            for number, name in enumerate(part.views)
        }
        self._release(part)
        return Batch(
            index=self._to_device(rows.index),
            label=self._to_device(self.given[rows.index].astype(np.int64)),
            valid=self._to_device(rows.valid),
            views=views,
            rows=rows.held,
            key=(self.seed, order_key, micro.step),
            groups=self._to_device(rows.groups),
            share=micro.share,
            last=micro.last,
            learner=learner,
            total=rows.total,
            all_valid=bool(rows.valid.all()),
        )

    def _to_input(self, name: str, pixels: Tensor, change: Change | None) -> Tensor:
        """(B, S, S, 3) uint8 on the host to (B, 3, S, S) float32 on the device."""
        levels = pixels.to(self.world.device, non_blocking=True).permute(0, 3, 1, 2)
        if isinstance(change, augment.AugMixDraws):  # AugMix takes channels one by one
            mixture, total = augment.augmix(levels.contiguous(), change.to(self._to_device))
            mixture = mixture.contiguous(memory_format=self.memory_format)
            return augment.normalise(mixture, self._strong_mean, self._strong_std, total)
        strong = name.startswith("strong")
        mean, std = (self._strong_mean, self._strong_std) if strong else (self._mean, self._std)
        if change is not None:
            levels = colour_jitter.change_colours(levels, self._to_device(change))
        return augment.normalise(levels.contiguous(memory_format=self.memory_format), mean, std)

    def _to_device(self, value: np.ndarray | Tensor) -> Tensor:
        """To the device, asynchronously by pinned memory."""
        tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        return (tensor.pin_memory() if self._pinned else tensor).to(self.world.device, non_blocking=True)

    # -- undecodable pictures ------------------------------------------------------------------------------

    def _mask_undecodable(self, parts: list[Part]) -> dict[int, str]:
        """Set valid=0 for pictures that did not decode; returns those that would have counted."""
        undecodable: dict[int, str] = {}
        for part in parts:
            index, valid = part.rows.index, part.rows.valid
            self.cut_short.update(int(index[row]) for row in part.cut_short)
            undecodable.update({int(index[row]): why for row, why in part.bad.items() if valid[row]})
            valid[list(part.bad)] = 0
        self.bad.update(undecodable)
        return undecodable

    def _too_many(self, failed: dict[int, str], n: int) -> UserError:
        some = "; ".join(f"sample {index}: {why}" for index, why in list(failed.items())[:3])
        return UserError(
            f"{len(failed)} pictures did not decode on rank {self.world.rank} in an epoch of {n}, more than "
            f"data.max_bad={self.config.max_bad:g} allows ({some}). Check the shards with python -m "
            "shards.verify and build them again, or raise data.max_bad."
        )
