"""Copies of a picture: equal ones by digest, nearly equal ones by a perceptual hash and a finer comparison.

Hash: the signs of 63 low frequencies (DCT) of the grey 32 x 32 thumbnail. Brightness and contrast do not change signs, a mirror
image flips the signs of odd horizontal frequencies. Two pictures are compared if one of three pieces of 21 bits is equal,
where a picture also looks up the keys in which its weakest bits are flipped. So work grows with the number of pictures, not its square.

Comparison: one thumbnail is moved and stretched a little and made brighter until it fits the other best; what is left of
the difference, relative to contrast, is the distance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SIDE, CHROMA = 32, 8  # of the thumbnail in grey, and of its two colour channels
THUMBNAIL = SIDE * SIDE + 2 * CHROMA * CHROMA  # bytes
# Chosen on half of the photographs of benchmarks/duplicates.py; its results are those of the other half.
MAX_BITS = 20  # of 63 that may differ
MIN_LIKE = 0.75  # correlation of the low frequencies; below it thumbnails are not compared
WEAK_BITS = 7  # of a piece, tried both ways
MAX_DISTANCE = 0.16  # of nearly equal pictures: what is left of the difference, over contrast
MAX_COLOUR = 10.0  # mean difference of the colour channels, of 255
MAX_MOVE = 0.12  # by which a copy may be moved or stretched, in widths
# A thumbnail with less contrast (standard deviation, of 255) has no hash to speak of: it has equal copies only.
MIN_CONTRAST = 6.0
# Smaller pictures have equal copies only: drawings of 8 x 8 pixels by different hands can look like copies.
MIN_SIDE = 32
# In a larger bucket a picture is compared with so many of the most similar hashes, so that odd sets take no N x N steps.
MAX_BUCKET = 256
PIECES, PIECE_BITS = 3, 21
_QUERIES, _PAIRS = 512, 1024  # at a time

_FREQUENCIES = sorted(((v, u) for v in range(8) for u in range(8) if v or u), key=lambda f: (f[0] + f[1], f))
_ROWS, _COLUMNS = (np.array(part) for part in zip(*_FREQUENCIES))
_DCT = np.cos(np.pi / SIDE * (np.arange(SIDE) + 0.5) * np.arange(8)[:, None]).astype(np.float32)
# Bit b belongs to piece b % 3, so that every piece has low and high frequencies.
_PLACE = (np.arange(63) % PIECES) * PIECE_BITS + np.arange(63) // PIECES
_VALUES = np.left_shift(np.uint64(1), _PLACE.astype(np.uint64))
_TURNED = np.where(_COLUMNS % 2 == 1, -1, 1).astype(np.float32)
_MIRROR = np.bitwise_or.reduce(_VALUES[_COLUMNS % 2 == 1])


@dataclass(frozen=True)
class Pairs:
    """Nearly equal pictures: first < second."""

    first: NDArray[np.int64]
    second: NDArray[np.int64]
    distance: NDArray[np.float32]
    mirrored: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.first)


def equal_to(digest: NDArray[np.uint64], known: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For every picture the first one with the same digest; itself where the digest is not known."""
    out = np.arange(len(digest))
    rows = np.flatnonzero(known)
    _, first, which = np.unique(digest[rows], return_index=True, return_inverse=True)
    out[rows] = rows[first[which]]
    return out


def groups_of(count: int, first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    """The group of every picture, -1 if it is alone; groups are numbered by their first picture."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = coo_array((np.ones(len(first), np.int8), (first, second)), shape=(count, count))
    _, part = connected_components(edges, directed=False)
    _, start, part, sizes = np.unique(part, return_index=True, return_inverse=True, return_counts=True)
    number = np.full(len(start), -1, np.int64)
    several = np.flatnonzero(sizes > 1)
    number[several[np.argsort(start[several])]] = np.arange(len(several))
    return number[part]


def thumbnails_grey(thumbnails: NDArray[np.uint8]) -> NDArray[np.float32]:
    return thumbnails[:, : SIDE * SIDE].reshape(-1, SIDE, SIDE).astype(np.float32)


def hashes(thumbnails: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    """(N,) hash of 63 bits and (N, 63) the waves it is made of, of unit length."""
    waves = (_DCT @ thumbnails_grey(thumbnails) @ _DCT.T)[:, _ROWS, _COLUMNS]
    bits = np.where(waves > 0, _VALUES, np.uint64(0))
    length = np.linalg.norm(waves, axis=1, keepdims=True)
    return np.bitwise_or.reduce(bits, axis=1), waves / np.maximum(length, 1e-9)


def near_pairs(
    thumbnails: NDArray[np.uint8], usable: NDArray[np.bool_], step: Callable[[int], None] = lambda count: None
) -> Pairs:
    """All pairs of nearly equal pictures among the usable ones. `thumbnails` (N, THUMBNAIL) may be a memory map."""
    rows = np.flatnonzero(usable)
    hashed = np.empty(len(rows), np.uint64)
    waves = np.empty((len(rows), 63), np.float16)
    contrast = np.empty(len(rows), np.float32)
    for start in range(0, len(rows), 4096):
        block = thumbnails[rows[start : start + 4096]]
        hashed[start : start + 4096], waves[start : start + 4096] = hashes(block)
        contrast[start : start + 4096] = thumbnails_grey(block).std((1, 2))
    clear = contrast >= MIN_CONTRAST
    rows, hashed, waves = rows[clear], hashed[clear], waves[clear]
    parts = []
    for first, second, mirrored in _candidates(hashed, waves, step):
        for start in range(0, len(first), _PAIRS):
            some = slice(start, start + _PAIRS)
            a, b, turned = rows[first[some]], rows[second[some]], mirrored[some]
            distance = distances(thumbnails[a], thumbnails[b], turned)
            near = distance <= MAX_DISTANCE
            parts.append((a[near], b[near], distance[near], turned[near]))
    if not parts:
        none = np.zeros(0, np.int64)
        return Pairs(none, none, none.astype(np.float32), none.astype(np.bool_))
    first, second, distance, mirrored = (np.concatenate(column) for column in zip(*parts))
    order = np.lexsort((mirrored, distance, second, first))
    _, best = np.unique(np.stack([first, second], 1)[order], axis=0, return_index=True)
    chosen = order[best]  # found from both sides, or upright and mirrored: once
    return Pairs(first[chosen], second[chosen], distance[chosen], mirrored[chosen])


def _candidates(
    hashed: NDArray[np.uint64], waves: NDArray[np.float16], step: Callable[[int], None]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]]:
    """Pairs with like hashes by place, first < second, and whether one is mirrored; a pair may come twice."""
    tables = []
    for piece in range(PIECES):
        keys = _piece(hashed, piece)
        order = np.lexsort((hashed, keys))
        starts = np.searchsorted(keys[order], np.arange((1 << PIECE_BITS) + 1))
        tables.append((starts, order))
    for start in range(0, len(hashed), _QUERIES):
        stop = min(start + _QUERIES, len(hashed))
        own = np.arange(start, stop)
        sure = np.abs(waves[start:stop])
        found = []
        for mirrored in (False, True):
            wanted = hashed[start:stop] ^ _MIRROR if mirrored else hashed[start:stop]
            for piece, (starts, order) in enumerate(tables):
                query, other = _lookup(wanted, sure, piece, starts, order)
                like = np.bitwise_count(wanted[query] ^ hashed[other]) <= MAX_BITS
                query, other = own[query[like]], other[like]
                apart = query != other
                low, high = np.minimum(query, other)[apart], np.maximum(query, other)[apart]
                found.append((low * len(hashed) + high) * 2 + mirrored)
        pairs = np.unique(np.concatenate(found))
        first, second, turned = pairs // 2 // len(hashed), pairs // 2 % len(hashed), pairs % 2 == 1
        sign = np.where(turned[:, None], _TURNED, np.float32(1))
        like = (waves[first].astype(np.float32) * waves[second] * sign).sum(1) >= MIN_LIKE
        yield first[like], second[like], turned[like]
        step(stop - start)


def _piece(hashed: NDArray[np.uint64], piece: int) -> NDArray[np.int64]:
    shifted = np.right_shift(hashed, np.uint64(piece * PIECE_BITS))
    return (shifted & np.uint64((1 << PIECE_BITS) - 1)).astype(np.int64)


def _lookup(
    wanted: NDArray[np.uint64],
    sure: NDArray[np.float16],
    piece: int,
    starts: NDArray[np.int64],
    order: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(query, other) of all that share a piece with a query, or would if its weakest bits were other ones."""
    weakest = np.argpartition(sure[:, piece::PIECES], WEAK_BITS, axis=1)[:, :WEAK_BITS]
    subsets = (np.arange(1 << WEAK_BITS)[:, None] >> np.arange(WEAK_BITS)) & 1
    flips = np.left_shift(1, weakest) @ subsets.T  # (queries, probes)
    probes = (_piece(wanted, piece)[:, None] ^ flips).ravel()
    low, high = starts[probes], starts[probes + 1]
    # A bucket is in the order of hashes: in a large one begin near the place the query would have.
    share = np.repeat(wanted.astype(np.float64) / 2.0**63, flips.shape[1])
    spare = np.maximum(high - low - MAX_BUCKET, 0)
    low = low + (share * spare).astype(np.int64)
    count = np.minimum(high - low, MAX_BUCKET)
    probe = np.repeat(np.arange(len(probes)), count)
    inside = np.arange(len(probe)) - np.repeat(np.cumsum(count) - count, count)
    return probe // flips.shape[1], order[low[probe] + inside]


# -- the finer comparison ------------------------------------------------------------------------------------------


def distances(
    a: NDArray[np.uint8], b: NDArray[np.uint8], mirrored: NDArray[np.bool_] | None = None
) -> NDArray[np.float32]:
    """(N,) what is left of the difference between thumbnails after fitting, over contrast; inf: other colours, or moved too far."""
    grey, other = thumbnails_grey(a), thumbnails_grey(b)
    colour, other_colour = (x[:, SIDE * SIDE :].reshape(-1, 2, CHROMA, CHROMA).astype(np.float32) for x in (a, b))
    if mirrored is not None:
        grey = np.where(mirrored[:, None, None], grey[:, :, ::-1], grey)
        colour = np.where(mirrored[:, None, None, None], colour[..., ::-1], colour)
    move = np.zeros((len(a), 4))
    grey, other = _smooth(grey), _smooth(other)
    move, _ = _fit(_halved(grey), _halved(other), move)
    for _ in range(2):
        move, left = _fit(grey, other, move)
    left[np.abs(move).max(1, initial=0) > MAX_MOVE] = np.inf
    left[np.abs(colour - other_colour).mean((1, 2, 3)) > MAX_COLOUR] = np.inf
    return left.astype(np.float32)


def _smooth(grey: NDArray[np.float32]) -> NDArray[np.float32]:
    """By 1 2 1 both ways: what a copy loses when it is moved by a part of a pixel is not there to begin with."""
    for axis in (1, 2):
        near = np.concatenate([grey.take([0], axis), grey, grey.take([-1], axis)], axis)
        before, after = (near.take(np.arange(SIDE) + k, axis) for k in (0, 2))
        grey = (before + 2 * grey + after) / 4
    return grey


def _halved(grey: NDArray[np.float32]) -> NDArray[np.float32]:
    half: NDArray[np.float32] = grey.reshape(len(grey), SIDE // 2, 2, SIDE // 2, 2).mean((2, 4), dtype=np.float32)
    return half


def _fit(
    grey: NDArray[np.float32], other: NDArray[np.float32], move: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A better move of `grey` onto `other` (one Gauss-Newton step) and what is left of the difference.

    A move is (x, y, stretch of x, stretch of y) in widths; the picture reaches from -0.5 to 0.5.
    """
    side = grey.shape[1]
    at = (np.arange(side) + 0.5) / side - 0.5
    x, y = (at + move[:, k, None] + move[:, k + 2, None] * at for k in (0, 1))
    across, down = (np.maximum(0, 1 - np.abs((p[:, :, None] - at) * side)) for p in (x, y))
    moved = down @ grey @ across.transpose(0, 2, 1)
    slope_y, slope_x = np.gradient(moved, 1 / side, axis=(1, 2))
    edge = max(1, side // 10)  # what lies outside of a cropped picture is not known
    inner = (slice(None), slice(edge, -edge), slice(edge, -edge))
    width = side - 2 * edge
    centre = np.broadcast_to(at[edge:-edge], (width, width))
    shapes = [np.ones_like(moved[inner]), moved[inner], slope_x[inner], slope_y[inner]]
    shapes += [slope_x[inner] * centre, slope_y[inner] * centre.T]
    basis = np.stack([shape.reshape(len(grey), -1) for shape in shapes], 1)
    target = other[inner].reshape(len(grey), -1).astype(np.float64)
    gram = basis @ basis.transpose(0, 2, 1)
    scale = np.sqrt(gram[:, range(6), range(6)]) + 1e-9
    gram = gram / scale[:, :, None] / scale[:, None, :] + 1e-6 * np.eye(6)
    weight = np.linalg.solve(gram, (basis @ target[:, :, None])[:, :, 0, None] / scale[:, :, None])[:, :, 0] / scale
    rest = target - (weight[:, None, :] @ basis)[:, 0]
    left = rest.std(1) / np.maximum(target.std(1), 1e-9)
    gain = weight[:, 1]
    left[gain < 0.3] = np.inf  # a negative, or something else altogether
    change = weight[:, 2:] / np.where(gain < 0.3, np.inf, gain)[:, None]
    return np.clip(move + change, -0.25, 0.25), left
