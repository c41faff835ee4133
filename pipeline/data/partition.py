"""Which samples of a pass a rank holds, micro-batch by micro-batch. Pure functions, no pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeline.data import sampling
from pipeline.data.batch import Pass
from shards.base.errors import UserError

MIN_ROWS = 2  # of a rank, padding included: batch norm with statistics of its own needs two
MIN_GROUPS = 8  # of a micro-batch, as long as a group has two rows: as many ranks can share it
MAIN, SECOND = 0, 1  # streams of a pass


@dataclass(frozen=True)
class RankBatch:
    """This rank's rows of one stream in one micro-batch."""

    stream: int
    index: np.ndarray  # (B,) int64 samples
    seen: np.ndarray  # (B,) int64 how often the sample came earlier in this stream
    valid: np.ndarray  # (B,) float32, 0 for padding
    groups: np.ndarray  # (B,) int64 mixing groups, numbered through the global batch
    held: tuple[int, ...]  # rows of each rank, padding included
    total: int  # rows of all ranks, without padding


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch: rows of the main stream, then those of the second stream if there is one."""

    step: int
    share: float  # of the global batch, by rows over all ranks
    last: bool
    parts: tuple[RankBatch, ...]


def group_size(rows: int, mix_group: int) -> int:
    """Rows of a mixing group in micro-batches of `rows` rows. It does not depend on the number of ranks."""
    return max(1, min(mix_group, max(2, rows // MIN_GROUPS), rows))


def check_ranks(batch: int, accumulate: int, mix_group: int, world: int) -> None:
    """Refuse a batch that leaves ranks without pictures in every step."""
    group = group_size(batch // accumulate, mix_group)
    fewest = -(-batch // group) // accumulate  # groups of the smallest micro-batch
    if fewest < world:
        raise UserError(
            f"A batch of {batch} pictures in {accumulate} micro-batch{'es' * (accumulate > 1)} gives {fewest} groups of {group}, "
            f"too few for {world} ranks: a mixing group stays on one rank. Raise data.batch, lower optim.accumulate "
            f"or data.mix_group, or use at most {max(1, fewest)} ranks."
        )


class SampleStream:
    """An order of samples and how it is cut into batches. The second stream repeats as often as needed."""

    def __init__(self, number: int, order: np.ndarray, batch: int, accumulate: int, mix_group: int) -> None:
        self.number, self.order, self.batch = number, np.asarray(order, np.int64), batch
        self.group = group_size(batch // accumulate, mix_group)
        self.seen = sampling.occurrence(self.order)
        self.turn = int(self.seen.max(initial=0)) + 1  # `seen` grows by this when the order repeats

    def positions(self, step: int) -> np.ndarray:
        """Positions in the order of this step's global batch; positions beyond the end mean the next repetition."""
        if self.number == MAIN:
            cut = sampling.batch_rows(len(self.order), self.batch, step)
            return np.arange(cut.start, cut.stop)
        return np.arange(step * self.batch, (step + 1) * self.batch)

    def groups(self, n: int) -> int:
        return -(-n // self.group)

    def rows(self, positions: np.ndarray, micro: slice, rank: int, world: int) -> RankBatch:
        """What `rank` holds of the rows `micro` of a global batch."""
        n = micro.stop - micro.start
        slices = [sampling.rank_rows(n, r, world, self.group) for r in range(world)]
        mine = slices[rank]
        place = np.arange(micro.start + mine.start, micro.start + mine.stop)  # rows of the global batch
        real = len(place)
        if real < MIN_ROWS:  # padding that does not count
            place = np.concatenate([place, np.full(MIN_ROWS - real, place[0] if real else micro.start)])
        groups = place // self.group
        groups[real:] = self.groups(len(positions))  # a group of their own: no real row mixes with them
        turns, at = np.divmod(positions[place], len(self.order))
        return RankBatch(
            self.number,
            index=self.order[at],
            seen=self.seen[at] + turns * self.turn,
            valid=(np.arange(len(place)) < real).astype(np.float32),
            groups=groups,
            held=tuple(max(MIN_ROWS, s.stop - s.start) for s in slices),
            total=n,
        )


def micro_batches(
    pass_: Pass, batch: int, accumulate: int, mix_group: int, rank: int, world: int, first_step: int = 0
) -> Iterator[MicroBatch]:
    """The micro-batches of `rank` from `first_step` on. Every rank gets equally many."""
    batch = pass_.batch or batch
    streams = [SampleStream(MAIN, pass_.order, batch, accumulate, mix_group)]
    if pass_.second is not None and len(pass_.second):
        streams.append(SampleStream(SECOND, pass_.second, pass_.second_batch or batch, accumulate, mix_group))
    for stream in streams:
        check_ranks(stream.batch, accumulate, mix_group, world)
    for step in range(first_step, sampling.steps(len(pass_.order), batch)):
        whole = [stream.positions(step) for stream in streams]
        # All streams are cut into the same number of micro-batches, none of them empty.
        parts = min(accumulate, *(stream.groups(len(p)) for stream, p in zip(streams, whole)))
        cuts = [sampling.micro_slices(len(p), parts, stream.group) for stream, p in zip(streams, whole)]
        for number in range(parts):
            held = tuple(s.rows(p, cut[number], rank, world) for s, p, cut in zip(streams, whole, cuts))
            main = cuts[0][number]
            yield MicroBatch(step, (main.stop - main.start) / len(whole[0]), number == parts - 1, held)


def survey_batches(rows: slice, batch: int) -> Iterator[MicroBatch]:
    """Consecutive samples in index order, without padding."""
    for start in range(rows.start, rows.stop, batch):
        index = np.arange(start, min(start + batch, rows.stop))
        blank = np.zeros(len(index), np.int64)
        yield MicroBatch(
            0, 1.0, True, (RankBatch(MAIN, index, blank, np.ones(len(index), np.float32), blank, (), len(index)),)
        )
