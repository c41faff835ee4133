"""The same batches from an FFCV file: FFCV reads and decodes in our order, views are cropped as from the tars.

FFCV's own crops use unseeded random numbers and decode once per view. Here FFCV only decodes, once; the loader's keyed
random numbers do the rest. Only this module and `shards/beton.py` import `ffcv`.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import cache
from queue import Empty
from typing import Any

import numpy as np
import torch

from pipeline.config import DataConfig
from pipeline.data.loader import Filled, Loader, Part, Samples
from pipeline.data.partition import MicroBatch
from pipeline.distributed.device import use_device
from pipeline.distributed.world import World
from shards.base.errors import UserError

SLOTS = 4  # FFCV allocates its batches ahead plus two
MEMORY = 1 << 30  # bytes of decoded pictures to be cropped


class BetonLoader(Loader):
    """A Loader whose pictures come from the FFCV file of the split."""

    def __init__(
        self,
        split: Samples,
        config: DataConfig,
        seed: int,
        world: World,
        accumulate: int = 1,
        channels_last: bool = False,
    ) -> None:
        super().__init__(split, config, seed, world, accumulate, channels_last)
        path = getattr(split, "beton", None)
        if not path:
            raise UserError(
                "data.loader=ffcv, but these shards have no FFCV file. Build them with shards.format=both, "
                "or set data.loader=tar."
            )
        threads = torch.get_num_threads()
        try:
            self._source = _open(path, len(self.given), config.batch, config.threads)
        finally:
            torch.set_num_threads(threads)  # FFCV changes it for the whole process

    def _fill(
        self,
        todo: Iterator[MicroBatch],
        views: tuple[tuple[str, ...], ...],
        order_key: int,
        prefetch: Callable[[np.ndarray], None],
    ) -> Generator[Filled]:
        cropped = self._cropped(list(todo), views, order_key)
        coordinator = self._threads(1)
        pending: deque[Future[Filled | None]] = deque()
        try:
            while True:
                while len(pending) <= self.config.prefetch:
                    pending.append(coordinator.submit(next, cropped, None))
                start = time.perf_counter()
                filled = pending.popleft().result()
                self.wait_seconds += time.perf_counter() - start
                if filled is None:
                    return
                yield filled
        finally:
            coordinator.shutdown(wait=True, cancel_futures=True)
            cropped.close()

    def _cropped(
        self, micros: list[MicroBatch], views: tuple[tuple[str, ...], ...], order_key: int
    ) -> Generator[Filled]:
        """Pictures arrive in the order of all rows of all micro-batches, in runs of FFCV's own length."""
        samples = np.concatenate([rows.index for micro in micros for rows in micro.parts] or [np.zeros(0)])
        arrivals = self._source.decoded(samples, self.world.device)
        pool = self._threads(self.config.threads)
        work: list[Future[None]] = []
        run, used = np.zeros((0, 0), np.uint8), 0
        try:
            for micro in micros:
                parts = [self._draw_random(rows, views[rows.stream], order_key) for rows in micro.parts]
                for part, row in [(p, row) for p in parts for row in range(len(p.rows.index))]:
                    if used == len(run):
                        _finish(work)  # FFCV reuses the memory of a run for the next one
                        run, used = next(arrivals), 0
                    work.append(pool.submit(self._crop_row, part, row, run[used]))
                    used += 1
                _finish(work)
                yield micro, parts
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            arrivals.close()

    def _crop_row(self, part: Part, row: int, flat: np.ndarray) -> None:
        height, width = self._source.shape(int(part.rows.index[row]))
        if flat[-1]:  # FFCV failed: use the decoder of the tar loader
            self._decode_row(part, row, self._source.encoded(int(part.rows.index[row])))
        else:
            self._crop_views(part, row, flat[: height * width * 3].reshape(height, width, 3))


def _finish(work: list[Future[None]]) -> None:
    wait(work)
    for future in work:
        future.result()
    work.clear()


@cache  # FFCV compiles for seconds; and Python 3.11 may crash when Numba's code is collected
def _open(path: str, samples: int, batch: int, threads: int) -> _Beton:
    return _Beton(path, samples, batch, threads)


class _Beton:
    """Decoded pictures of an FFCV file, in any order."""

    def __init__(self, path: str, samples: int, batch: int, threads: int) -> None:
        try:
            from ffcv.fields import RGBImageField
            from ffcv.loader import Loader as FFCV
            from ffcv.loader import OrderOption
            from ffcv.reader import Reader
        except ImportError as error:
            raise UserError(
                f"data.loader=ffcv needs the ffcv package ({error}). Install it with pip install "
                "'evenhand[ffcv]' (it needs libopencv-dev and libturbojpeg0-dev), or set data.loader=tar."
            ) from None
        held = self._hold(path)
        reader = Reader(held)
        if reader.num_samples != samples:
            raise UserError(
                f"{path} holds {reader.num_samples} pictures, the manifest {samples}. Build the shards anew."
            )
        names = list(reader.handlers)
        images = [n for n, handler in reader.handlers.items() if isinstance(handler, RGBImageField)]
        if len(images) != 1:
            raise UserError(f"{path} must have one picture per sample, not {len(images)}. Build the shards anew.")
        fields = reader.metadata[f"f{names.index(images[0])}"]
        self._shapes = np.stack([fields["height"], fields["width"]], 1).astype(np.int64)  # (N, 2)
        longest = int(self._shapes.prod(1).max(initial=1)) * 3 + 1
        self._bytes = np.memmap(held, np.uint8, "r")
        self._pointers = fields["data_ptr"].astype(np.int64)
        self._sizes = _sizes(path, reader, fields)
        run = max(1, min(batch, MEMORY // (SLOTS * longest)))
        pipelines = {name: None for name in names} | {images[0]: [_whole_pictures(longest)]}
        self._loader: Any = FFCV(
            held,
            batch_size=run,
            num_workers=threads,
            os_cache=True,
            order=OrderOption.SEQUENTIAL,
            pipelines=pipelines,
            drop_last=False,
            batches_ahead=SLOTS - 2,
        )

    def _hold(self, path: str) -> str:
        """A path that is valid while this object lives: FFCV opens the file anew for every pass, and a shared cache may
        have dropped its copy by then."""
        self._file = open(path, "rb")  # noqa: SIM115 - as long as this object
        held = f"/proc/self/fd/{self._file.fileno()}"
        return held if os.path.exists(held) else path

    def shape(self, index: int) -> tuple[int, int]:
        height, width = self._shapes[index]
        return int(height), int(width)

    def encoded(self, index: int) -> bytes:
        start = self._pointers[index]
        return self._bytes[start : start + self._sizes[index]].tobytes()

    def decoded(self, samples: np.ndarray, device: torch.device) -> Generator[np.ndarray]:
        """(n, longest) uint8 runs of flat pictures, each valid until the next is asked for.

        With CUDA, FFCV makes streams in the calling thread and events in one of its own: both must be on the device.
        """
        from ffcv.loader.epoch_iterator import EpochIterator

        class Epoch(EpochIterator):  # type: ignore[misc]
            def run(self) -> None:
                use_device(device)
                super().run()

        if not len(samples):
            return
        epoch = Epoch(self._loader, samples.astype(np.uint64))
        try:
            while True:
                try:
                    result = epoch.output_queue.get(timeout=0.5)
                except Empty:
                    if epoch.is_alive():
                        continue
                    raise RuntimeError("FFCV's thread died; its error is above.") from None
                if result is None:
                    return
                yield result[1][0]
        finally:
            epoch.close()
            while epoch.is_alive():  # it may block on a full queue
                with suppress(Empty):
                    epoch.output_queue.get(timeout=0.05)


def _sizes(path: str, reader: Any, fields: np.ndarray) -> np.ndarray:
    """(N,) bytes of each stored picture.

    FFCV copies an uncompressed picture by the length the file claims: it must be that of height and width.
    """
    from ffcv.fields.rgb_image import IMAGE_MODES

    table = np.sort(reader.alloc_table, order="ptr")
    place = np.searchsorted(table["ptr"], fields["data_ptr"]).clip(0, max(0, len(table) - 1))
    sizes: np.ndarray = table["size"][place].astype(np.int64)
    pixels = fields["height"].astype(np.int64) * fields["width"] * 3
    raw = fields["mode"] == IMAGE_MODES["raw"]
    if (table["ptr"][place] != fields["data_ptr"]).any() or (sizes[raw] != pixels[raw]).any():
        raise UserError(f"{path} is damaged: a picture's length does not fit its size. Build the shards anew.")
    return sizes


def _whole_pictures(longest: int) -> Any:
    """An FFCV decoder: pictures of any size as flat rows of one length; the last byte says if it failed."""
    from ffcv.fields.rgb_image import IMAGE_MODES, SimpleRGBImageDecoder
    from ffcv.libffcv import imdecode, memcpy
    from ffcv.pipeline.allocation_query import AllocationQuery
    from ffcv.pipeline.compiler import Compiler

    class WholePictures(SimpleRGBImageDecoder):  # type: ignore[misc]
        def declare_state_and_memory(self, previous_state: Any) -> Any:
            kind = np.dtype("<u1")
            state = replace(previous_state, jit_mode=True, shape=(longest,), dtype=kind)
            return state, AllocationQuery((longest,), kind)

        def generate_code(self) -> Callable[..., Any]:
            jpg, read = IMAGE_MODES["jpg"], self.memory_read
            to_pixels, copy, rows = (
                Compiler.compile(imdecode),
                Compiler.compile(memcpy),
                Compiler.get_iterator(),
            )

            def decode(batch_indices, destination, metadata, storage_state):  # type: ignore[no-untyped-def]
                for row in rows(len(batch_indices)):
                    field = metadata[batch_indices[row]]
                    data = read(field["data_ptr"], storage_state)
                    height, width = np.uint32(field["height"]), np.uint32(field["width"])
                    out = destination[row]
                    out[-1] = 0
                    if field["mode"] == jpg:
                        failed = to_pixels(data, out, height, width, height, width, 0, 0, 1, 1, False, False)
                        out[-1] = np.uint8(failed != 0)
                    else:
                        copy(data, out)
                return destination[: len(batch_indices)]

            decode.is_parallel = True  # type: ignore[attr-defined]
            return decode

    return WholePictures()
