"""What happens to a batch of uint8 pictures on the device: normalisation, and AugMix for strong views.

All 13 operations of AugMix (Hendrycks et al., ICLR 2020) are batched over samples and give Pillow's bytes.
The host draws what is done to which sample from keyed random numbers (`draw_augmix`), so there is no host
synchronisation and results do not depend on the number of ranks.

Shapes: B samples, C chains, D = 3 operations at most in a chain, pictures (B, 3, S, S) uint8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

CHAINS = 3
DEPTH = 3
DRAWS = 1 + CHAINS + CHAINS * (1 + 3 * DEPTH)  # blend, Dirichlet, then per chain: length and (operation, level, sign)


# -- the operations: pictures (n, 3, S, S) uint8 and one parameter per picture -------------------------------


def _per_picture(parameter: Tensor) -> Tensor:
    """(n, 1, 1, 1) of (n,), or of the first column of (n, 6)."""
    return parameter.reshape(len(parameter), -1)[:, :1, None, None]


def _histogram(pictures: Tensor) -> Tensor:
    """(n*3, 256) int64 counts of the levels of every channel."""
    flat = pictures.flatten(0, 1).flatten(1).long()  # (n*3, S*S)
    return torch.zeros(len(flat), 256, dtype=torch.long, device=flat.device).scatter_add_(
        1, flat, torch.ones((), dtype=torch.long, device=flat.device).expand_as(flat)
    )


def _apply_lut(pictures: Tensor, table: Tensor) -> Tensor:
    """table (n*3, 256): the new value of every level of every channel."""
    flat = pictures.flatten(0, 1).flatten(1).long()
    return table.clamp(0, 255).to(torch.uint8).gather(1, flat).view_as(pictures)


def autocontrast(pictures: Tensor, _: Tensor) -> Tensor:
    """Stretch each channel so that it reaches from 0 to 255."""
    flat = pictures.flatten(0, 1).flatten(1).double()
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    level = torch.arange(256, dtype=torch.float64, device=pictures.device)
    # Divided tensor by tensor: torch turns number / tensor into a less exact product with the reciprocal.
    scale = torch.full_like(low, 255.0) / (high - low)  # infinite for a flat channel, which keeps its levels below
    table = torch.where(high > low, (level * scale + -low * scale).trunc(), level)
    return _apply_lut(pictures, table)


def equalize(pictures: Tensor, _: Tensor) -> Tensor:
    """Spread each channel so that its levels are about equally frequent."""
    counts = _histogram(pictures)
    last = counts.gather(1, 255 - (counts > 0).flip(1).long().argmax(1, keepdim=True))  # count of the highest level
    step = (counts.sum(1, keepdim=True) - last) // 255
    level = torch.arange(256, device=pictures.device).expand_as(counts)
    spread = (step // 2 + counts.cumsum(1) - counts) // step.clamp_min(1)
    return _apply_lut(pictures, torch.where(step > 0, spread, level))


def posterize(pictures: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest `bits` bits."""
    mask = 256 - 2 ** (8 - _per_picture(bits)).long()
    return pictures & mask.to(torch.uint8)


def solarize(pictures: Tensor, threshold: Tensor) -> Tensor:
    """Invert everything from the threshold up."""
    return torch.where(pictures < _per_picture(threshold), pictures, 255 - pictures)


def affine(pictures: Tensor, matrix: Tensor) -> Tensor:
    """Pillow's bilinear affine transform; matrix (n, 6) maps output to input positions. Outside is black.

    In float64 and in Pillow's order of operations, because results are truncated, not rounded.
    """
    height, width = pictures.shape[2:]
    a, b, c, d, e, f = (part.view(-1, 1, 1) for part in matrix.double().unbind(1))
    y = torch.arange(height, dtype=torch.float64, device=pictures.device).view(1, -1, 1) + 0.5
    x = torch.arange(width, dtype=torch.float64, device=pictures.device).view(1, 1, -1) + 0.5
    at_x, at_y = a * x + b * y + c, d * x + e * y + f  # (n, S, S)
    inside = (at_x >= 0) & (at_x < width) & (at_y >= 0) & (at_y < height)
    at_x, at_y = at_x - 0.5, at_y - 0.5
    left, top = at_x.floor(), at_y.floor()
    across, down = (at_x - left)[:, None], (at_y - top)[:, None]
    left, top = left.long(), top.long()
    columns = left.clamp(0, width - 1), (left + 1).clamp(0, width - 1)
    rows = top.clamp(0, height - 1), (top + 1).clamp(0, height - 1)
    flat = pictures.flatten(2)

    def pick(row: Tensor, column: Tensor) -> Tensor:
        place = (row * width + column).flatten(1)[:, None].expand(-1, 3, -1)
        return flat.gather(2, place).view_as(pictures).double()

    upper = pick(rows[0], columns[0]) * (1.0 - across) + pick(rows[0], columns[1]) * across
    lower = pick(rows[1], columns[0]) * (1.0 - across) + pick(rows[1], columns[1]) * across
    lower = torch.where((top + 1 < height)[:, None], lower, upper)
    value = upper * (1.0 - down) + lower * down
    return torch.where(inside[:, None], value, 0.0).to(torch.uint8)


def _grey(pictures: Tensor) -> Tensor:
    """(n, 1, S, S) int32 luma, in Pillow's fixed-point arithmetic."""
    red, green, blue = pictures.int().unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16)[:, None]


def _blend(plain: Tensor, pictures: Tensor, factor: Tensor) -> Tensor:
    """plain + factor * (picture - plain), cut to whole levels; float32 because Pillow's is."""
    plain = plain.float()
    return (plain + _per_picture(factor).float() * (pictures.float() - plain)).clamp(0, 255).to(torch.uint8)


def colour(pictures: Tensor, factor: Tensor) -> Tensor:
    return _blend(_grey(pictures), pictures, factor)


def contrast(pictures: Tensor, factor: Tensor) -> Tensor:
    mean = _grey(pictures).double().mean((1, 2, 3), keepdim=True)
    return _blend((mean + 0.5).trunc(), pictures, factor)


def brightness(pictures: Tensor, factor: Tensor) -> Tensor:
    return _blend(torch.zeros((), device=pictures.device), pictures, factor)


def sharpness(pictures: Tensor, factor: Tensor) -> Tensor:
    whole = pictures.float()
    plain = whole.clone()  # the border stays as it is
    # Neighbours count 1, the middle 5: whole numbers up to 3315, exact in float32.
    total = F.avg_pool2d(whole, 3, 1, divisor_override=1) + 4 * whole[:, :, 1:-1, 1:-1]
    plain[:, :, 1:-1, 1:-1] = ((2 * total + 13) / 26).floor()  # rounded thirteenth
    return _blend(plain, pictures, factor)


Apply = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Operation:
    apply: Apply
    parameter: Callable[[np.ndarray, np.ndarray, int], np.ndarray]  # (level, sign, size) -> (n,) or (n, 6)


def _truncate(level: np.ndarray, largest: float) -> np.ndarray:
    return np.trunc(level * largest / 10)


def _matrices(n: int, **cells: np.ndarray) -> np.ndarray:
    out = np.tile(np.array([1.0, 0, 0, 0, 1, 0]), (n, 1))
    for name, value in cells.items():
        out[:, "abcdef".index(name)] = value
    return out


@lru_cache
def _rotation(degrees: int, size: int) -> tuple[float, ...]:
    """Rotate about the centre; rounding to 15 decimals is Pillow's and decides pixels at the edge."""
    angle = -math.radians(degrees)
    cos, sin, middle = round(math.cos(angle), 15), round(math.sin(angle), 15), size / 2
    return (
        cos,
        sin,
        cos * -middle + sin * -middle + middle,
        -sin,
        cos,
        -sin * -middle + cos * -middle + middle,
    )


def _rotate(level: np.ndarray, sign: np.ndarray, size: int) -> np.ndarray:
    degrees = _truncate(level, 30) * sign
    return np.array([_rotation(int(d), size) for d in degrees]).reshape(-1, 6)


def _enhance(level: np.ndarray, sign: np.ndarray, size: int) -> np.ndarray:
    return level * 1.8 / 10 + 0.1


# In the order of the released list. Levels come from U(0.1, severity); whole parameters are cut, not rounded.
OPERATIONS: dict[str, Operation] = {
    "autocontrast": Operation(autocontrast, lambda level, sign, size: level),
    "equalize": Operation(equalize, lambda level, sign, size: level),
    "posterize": Operation(posterize, lambda level, sign, size: np.maximum(4 - _truncate(level, 4), 0)),
    "rotate": Operation(affine, _rotate),
    "solarize": Operation(solarize, lambda level, sign, size: 256 - _truncate(level, 256)),
    "shear_x": Operation(affine, lambda level, sign, size: _matrices(len(level), b=sign * level * 0.3 / 10)),
    "shear_y": Operation(affine, lambda level, sign, size: _matrices(len(level), d=sign * level * 0.3 / 10)),
    "translate_x": Operation(
        affine, lambda level, sign, size: _matrices(len(level), c=sign * _truncate(level, size / 3))
    ),
    "translate_y": Operation(
        affine, lambda level, sign, size: _matrices(len(level), f=sign * _truncate(level, size / 3))
    ),
    "colour": Operation(colour, _enhance),
    "contrast": Operation(contrast, _enhance),
    "brightness": Operation(brightness, _enhance),
    "sharpness": Operation(sharpness, _enhance),
}


# -- the draws: made on the host -----------------------------------------------------------------------------


@dataclass
class AugMixDraws:
    """What AugMix does to a batch: output = coefficients[0] * picture + sum_c coefficients[1+c] * chain_c.

    An entry of a chain is one operation on some rows of the batch. All rows and parameters lie in two tensors,
    so that few copies and no host synchronisation are needed.
    """

    coefficients: Tensor  # (B, 1+C) float32
    rows: Tensor  # (R,) int64
    parameters: Tensor  # (R, 6) float64; a single parameter stands in the first column
    chains: list[list[tuple[Apply, slice]]]  # operations, in order: what to do, and its part of rows and parameters

    def to(self, move: Callable[[Tensor], Tensor]) -> AugMixDraws:
        return AugMixDraws(move(self.coefficients), move(self.rows), move(self.parameters), self.chains)


def draw_augmix(uniforms: np.ndarray, size: int, variant: str, severity: float) -> AugMixDraws:
    """uniforms (B, DRAWS) to draws.

    variant=original: three chains, as published. variant=released: the authors' code mixes only the last of
    its three chains, with that chain's own weight, so the coefficients do not sum to one.
    """
    blend = uniforms[:, 0]  # Beta(1, 1)
    share = -np.log1p(-uniforms[:, 1 : 1 + CHAINS])  # Dirichlet(1, 1, 1) from exponentials
    share = share / np.maximum(share.sum(1, keepdims=True), 1e-300)
    table = uniforms[:, 1 + CHAINS :].reshape(-1, CHAINS, 1 + 3 * DEPTH)
    if variant == "released":
        share, table = share[:, -1:], table[:, -1:]
    coefficients = np.concatenate([1 - blend[:, None], blend[:, None] * share], 1)
    chains: list[list[tuple[Apply, slice]]] = []
    rows: list[np.ndarray] = []
    parameters: list[np.ndarray] = []
    done = 0
    for chain in range(table.shape[1]):
        length = 1 + np.floor(table[:, chain, 0] * DEPTH)
        operations = []
        for depth in range(DEPTH):
            kind, level, sign = table[:, chain, 1 + 3 * depth : 4 + 3 * depth].T
            kind = np.where(depth < length, np.floor(kind * len(OPERATIONS)), -1).astype(int)
            level = 0.1 + (severity - 0.1) * level
            for apply, who, how in _by_operation(kind, level, np.where(sign > 0.5, -1.0, 1.0), size):
                operations.append((apply, slice(done, done + len(who))))
                rows.append(who)
                parameters.append(how)
                done += len(who)
        chains.append(operations)
    return AugMixDraws(
        torch.from_numpy(coefficients).float(),
        torch.from_numpy(np.concatenate(rows or [np.zeros(0, np.int64)])),
        torch.from_numpy(np.concatenate(parameters or [np.zeros((0, 6))])),
        chains,
    )


def _by_operation(
    kind: np.ndarray, level: np.ndarray, sign: np.ndarray, size: int
) -> Iterator[tuple[Apply, np.ndarray, np.ndarray]]:
    """(what, rows, parameters (n, 6)): rows with the same work together, all geometric operations as one."""
    work: dict[Apply, list[tuple[np.ndarray, np.ndarray]]] = {}
    for number, operation in enumerate(OPERATIONS.values()):
        rows = np.flatnonzero(kind == number)
        if len(rows):
            parameter = operation.parameter(level[rows], sign[rows], size).reshape(len(rows), -1)
            wide = np.pad(parameter, ((0, 0), (0, 6 - parameter.shape[1])))
            work.setdefault(operation.apply, []).append((rows, wide))
    for apply, parts in work.items():
        yield apply, np.concatenate([rows for rows, _ in parts]), np.concatenate([wide for _, wide in parts])


# -- on the device -------------------------------------------------------------------------------------------


def augmix(pictures: Tensor, draws: AugMixDraws) -> tuple[Tensor, Tensor]:
    """((B, 3, S, S) float32 mixture in levels of 0..255, (B,) float32 sum of its coefficients)."""
    weights = draws.coefficients.t()[:, :, None, None, None]  # (1+C, B, 1, 1, 1)
    mixture = weights[0] * pictures
    for weight, operations in zip(weights[1:], draws.chains):
        chain = pictures.clone()
        for apply, part in operations:
            rows = draws.rows[part]
            chain.index_copy_(0, rows, apply(chain.index_select(0, rows), draws.parameters[part]))
        mixture += weight * chain
    return mixture, draws.coefficients.sum(1)


PerChannel = Tensor | Sequence[float]  # one number for each channel; best a tensor that is on the device already


def normalise(levels: Tensor, mean: PerChannel, std: PerChannel, total: Tensor | None = None) -> Tensor:
    """(levels / 255 - mean) / std by channel.

    `total`: the sum of coefficients of a mixture; the result is then the mixture of the normalised pictures.
    """
    centre, scale = (torch.as_tensor(v, device=levels.device).view(3, 1, 1) for v in (mean, std))
    shift = centre / scale
    if total is not None:
        shift = shift * _per_picture(total)
    return (levels * (1 / (255 * scale))).sub_(shift)  # two passes over memory, from bytes to float32
