"""The same batches from stored features: which samples and which views are decided as for pictures.

Of every training sample a few weak and strong views are stored. Where the picture loader draws a crop, this one draws one of
them, by the same kind of keyed random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from pipeline.config import DataConfig
from pipeline.data.keyed_random import uniform
from pipeline.data.loader import Change, Loader, Part
from pipeline.data.partition import RankBatch
from pipeline.distributed.world import World
from shards.features import TEST, FeatureSplit

KINDS = ("weak", "strong")


class FeatureLoader(Loader):
    """A Loader whose views are (B, D) features."""

    def __init__(
        self,
        given: np.ndarray,
        features: FeatureSplit,
        config: DataConfig,
        seed: int,
        world: World,
        accumulate: int = 1,
    ) -> None:
        super().__init__(_Samples(given, features), config, seed, world, accumulate)
        self.features = features
        self._is_bad = np.zeros(len(given), bool)
        self._is_bad[list(features.bad)] = True

    def _draw_random(self, rows: RankBatch, views: tuple[str, ...], order_key: int) -> Part:
        """`choices` are numbers of stored views. Views of one kind differ as long as there are enough of them."""
        ident = rows.index + len(self.given) * rows.seen
        choices: dict[str, np.ndarray] = {}
        for kind in KINDS:
            count = self.features.count(kind)
            if not count:  # the test view stands for it
                continue
            key = (self.seed, order_key, rows.stream, crc32(kind.encode()))
            for offset, name in enumerate(name for name in views if name.startswith(kind)):
                chosen = ((uniform(key, ident, 1)[:, 0] * count).astype(np.int64) + offset) % count
                choices[name] = chosen + self.features.views[f"{kind}0"]
        shape = (len(views), len(rows.index), self.features.width)
        buffer = self._buffer(2 * int(np.prod(shape)))
        numbers = buffer[: 2 * int(np.prod(shape))].view(torch.float16).view(shape)
        return Part(rows, views, choices, {}, buffer, numbers)

    def _decode(self, part: Part, rows: range) -> None:
        index = part.rows.index[rows.start : rows.stop]
        for number, name in enumerate(part.views):
            if name in part.choices:
                view = part.choices[name][rows.start : rows.stop]
            else:
                view = np.full(len(index), self.features.views[TEST])
            self.features.read(view, index, part.pixels[number].numpy()[rows.start : rows.stop])
        for row in np.flatnonzero(self._is_bad[index]).tolist():
            part.bad[rows.start + row] = self.features.bad[int(index[row])]

    def _to_input(self, name: str, pixels: Tensor, change: Change | None) -> Tensor:
        """(B, D) float16 on the host to float32 on the device."""
        return pixels.to(self.world.device, non_blocking=True).float()


class _Samples:
    """The blocks of stored features as a loader sees shards."""

    def __init__(self, given: np.ndarray, features: FeatureSplit) -> None:
        self.given, self.features, self.shard_sizes = given, features, features.shard_sizes

    def __len__(self) -> int:
        return len(self.given)

    def read(self, index: int) -> bytes:
        raise TypeError("stored features have no pictures")

    def prefetch(self, shards: Iterable[int]) -> None:
        self.features.prefetch(shards)
