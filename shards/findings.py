"""What can be said about the pictures of a collection without a model: copies, leaks between splits, faults."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shards.duplicates import MIN_SIDE, THUMBNAIL, equal_to, groups_of, near_pairs
from shards.faults import FAULTS, find_faults
from shards.measure import Measured, measure
from shards.reader import Split


@dataclass
class SplitFindings:
    """Of one split, by sample index."""

    given: NDArray[np.int32]
    width: NDArray[np.int32]  # 0: the picture does not decode
    height: NDArray[np.int32]
    bytes: NDArray[np.int32]
    scores: dict[str, NDArray[np.float32]]  # by fault, see shards.faults.FAULTS
    faults: dict[str, NDArray[np.bool_]]
    group: NDArray[np.int64]  # of equal and nearly equal pictures of all splits; -1: the picture is alone
    equal: NDArray[np.bool_]  # another picture of the group has the same bytes or the same pixels
    distance: NDArray[np.float32]  # to the most similar picture: 0 if equal, nan if alone
    keeper: NDArray[np.bool_]  # the one of its group to keep in this split: the largest, then the first
    conflict: NDArray[np.bool_]  # its group has two given labels
    leak: NDArray[np.int64]  # in other splits than train: the first training sample that is the same; -1: none

    def __len__(self) -> int:
        return len(self.group)

    @property
    def extra(self) -> NDArray[np.bool_]:
        """Copies that are not the keeper."""
        return (self.group >= 0) & ~self.keeper


@dataclass
class PictureFindings:
    splits: dict[str, SplitFindings]
    leaks: dict[
        str, NDArray[np.int64]
    ]  # by split but train: (n, 2) its sample, training sample: same or nearly the same

    def groups(self) -> int:
        return 1 + max((int(part.group.max(initial=-1)) for part in self.splits.values()), default=-1)


def find_in_pictures(
    splits: dict[str, Split], step: Callable[[int], None] = lambda count: None, threads: int = 0
) -> PictureFindings:
    """Read every picture once. `step` gets the number of pictures done. Thumbnails (1.2 kB each) are in a temporary file."""
    names = sorted(splits, key=lambda name: name != "train")
    ends = np.cumsum([0, *(len(splits[name]) for name in names)])
    with tempfile.TemporaryDirectory(prefix="evenhand-") as folder:
        shape = (max(1, int(ends[-1])), THUMBNAIL)
        thumbnails = np.memmap(Path(folder) / "thumbnails", np.uint8, "w+", shape=shape)
        parts = [
            measure(splits[name], thumbnails[start:stop], step, threads)
            for name, start, stop in zip(names, ends, ends[1:])
        ]
        given = np.concatenate([splits[name].given for name in names])
        findings = combine(names, parts, given, thumbnails)
        del thumbnails
    return findings


def combine(
    names: list[str], parts: list[Measured], given: NDArray[np.int32], thumbnails: NDArray[np.uint8]
) -> PictureFindings:
    """Findings from measurements of all splits, in the order of `names`, train first if there is one."""
    sizes = [len(part.bytes) for part in parts]
    total = sum(sizes)
    content, pixels, broken, width, height = (
        np.concatenate([getattr(part, field) for part in parts])
        for field in ("content", "pixels", "broken", "width", "height")
    )
    same = equal_to(pixels, ~broken)  # equal bytes have equal pixels
    same = np.where(broken, equal_to(content, broken), same)
    everyone = np.arange(total)
    large = np.minimum(width, height) >= MIN_SIDE
    pairs = near_pairs(thumbnails[:total], large & ~broken & (same == everyone))
    first, second = np.concatenate([everyone, pairs.first]), np.concatenate([same, pairs.second])
    group = groups_of(total, first, second)
    equal = np.bincount(same, minlength=total)[same] > 1
    distance = np.full(total, np.nan, np.float32)
    for own in (pairs.first, pairs.second):
        np.fmin.at(distance, own, pairs.distance)
    distance = np.where(equal, np.float32(0), distance[same])
    conflict = _conflicts(group, given)
    leak, leaks = _leaks(names, sizes, same, pairs.first, pairs.second)
    out = {}
    start = 0
    for name, size, part in zip(names, sizes, parts):
        mine = slice(start, start + size)
        scores, faults = find_faults(part)
        area = width[mine].astype(np.int64) * height[mine]
        out[name] = SplitFindings(
            given=given[mine], width=part.width, height=part.height, bytes=part.bytes, scores=scores, faults=faults,
            group=group[mine], equal=equal[mine], distance=distance[mine], keeper=_keepers(group[mine], area),
            conflict=conflict[mine], leak=leak[mine],
        )  # fmt: skip
        start += size
    return PictureFindings(out, leaks)


def count_findings(findings: PictureFindings) -> dict[str, dict[str, int]]:
    """How many samples of each split: copies, conflicts, leaks, and every fault that occurs."""
    rows = {
        "copies (equal or nearly equal to another)": {k: int((v.group >= 0).sum()) for k, v in findings.splits.items()},
        "of these, to remove": {k: int(v.extra.sum()) for k, v in findings.splits.items()},
        "copies under two labels": {k: int(v.conflict.sum()) for k, v in findings.splits.items()},
        "also in train": {k: int((v.leak >= 0).sum()) for k, v in findings.splits.items()},
    }
    for fault in FAULTS:
        counts = {name: int(part.faults[fault].sum()) for name, part in findings.splits.items()}
        if any(counts.values()):
            rows[fault.replace("_", " ")] = counts
    return rows


def _keepers(group: NDArray[np.int64], area: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Of each group the largest picture, then the first. A picture that is alone is kept."""
    keeper = group < 0
    rows = np.flatnonzero(group >= 0)
    order = rows[np.lexsort((rows, -area[rows], group[rows]))]
    _, best = np.unique(group[order], return_index=True)
    keeper[order[best]] = True
    return keeper


def _conflicts(group: NDArray[np.int64], given: NDArray[np.int32]) -> NDArray[np.bool_]:
    rows = np.flatnonzero(group >= 0)
    count = int(group.max(initial=-1)) + 1
    low, high = np.full(count, np.iinfo(np.int32).max, np.int32), np.full(count, -1, np.int32)
    np.minimum.at(low, group[rows], given[rows])
    np.maximum.at(high, group[rows], given[rows])
    out = np.zeros(len(group), np.bool_)
    out[rows] = (low < high)[group[rows]]
    return out


def _leaks(
    names: list[str],
    sizes: list[int],
    same: NDArray[np.int64],
    first: NDArray[np.int64],
    second: NDArray[np.int64],
) -> tuple[NDArray[np.int64], dict[str, NDArray[np.int64]]]:
    """Training samples equal to, or directly paired with, each sample of another split: not those at the far end of a chain."""
    total = sum(sizes)
    leak = np.full(total, -1, np.int64)
    train = sizes[0] if names and names[0] == "train" else 0
    others = [name for name in names if name != "train"]
    order = np.argsort(same[:train], kind="stable")  # training samples by the picture they are equal to
    starts = np.searchsorted(same[:train][order], np.arange(total + 1))
    near: dict[int, list[int]] = {}
    for a, b in zip(first.tolist(), second.tolist()):
        near.setdefault(a, []).append(b)
        near.setdefault(b, []).append(a)
    leaks: dict[str, NDArray[np.int64]] = {}
    start = train
    for name, size in zip(others, sizes[len(names) - len(others) :]):
        found = [
            (index - start, int(match))
            for index in range(start, start + size)
            for picture in (int(same[index]), *near.get(int(same[index]), []))
            for match in order[starts[picture] : starts[picture + 1]]
        ]
        table = np.array(sorted(set(found)), np.int64).reshape(-1, 2)
        samples, where = np.unique(table[:, 0], return_index=True)
        leak[start + samples] = table[where, 1]
        leaks[name] = table
        start += size
    return leak, leaks
