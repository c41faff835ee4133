"""Colours of contrast views against the operations done one after the other, picture by picture."""

from __future__ import annotations

import colorsys
import io
from typing import Any
from zlib import crc32

import numpy as np
import torch
from PIL import Image

from pipeline.config import DataConfig
from pipeline.data.batch import Pass
from pipeline.data.colour_jitter import DRAWS, GREYED, LUMA, change_colours, draw
from pipeline.data.keyed_random import uniform
from pipeline.data.loader import Loader
from pipeline.distributed.world import World

SOME = np.random.default_rng(0).integers(90, 140, (64, 3, 5, 5), dtype=np.uint8)  # no change reaches 0 or 255


def slowly(picture: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """(3, S, S) levels: hue, saturation or grey, brightness, contrast."""
    changed, brightness, contrast, saturation, hue, grey = draws
    out = picture.astype(float)
    if changed < 0.8:
        angle = 2 * np.pi * 0.1 * (2 * hue - 1)
        axis = np.ones(3) / np.sqrt(3)
        along = axis[:, None, None] * np.tensordot(axis, out, 1)
        across = np.cross(np.broadcast_to(axis[:, None, None], out.shape), out, axis=0)
        out = along + np.cos(angle) * (out - along) + np.sin(angle) * across
    factor = 0.0 if grey < 0.2 else (0.6 + 0.8 * saturation if changed < 0.8 else 1.0)
    luma = np.tensordot(LUMA, out, 1)
    out = luma + factor * (out - luma)
    if changed < 0.8:
        out = out * (0.6 + 0.8 * brightness)
        mean = np.tensordot(LUMA, out, 1).mean()
        out = mean + (0.6 + 0.8 * contrast) * (out - mean)
    return out


def test_one_matrix_does_what_the_operations_do_one_by_one() -> None:
    draws = np.random.default_rng(1).random((64, DRAWS))
    found = change_colours(torch.from_numpy(SOME), draw(draws)).numpy()
    expected = np.stack([slowly(picture, row) for picture, row in zip(SOME, draws)])
    np.testing.assert_allclose(found, expected.clip(0, 255), atol=2e-3)


def test_hues_turn_the_way_of_hsv() -> None:
    """A tenth of a turn moves red towards yellow, as in HSV, by about a tenth of the circle."""
    red = np.zeros((1, 3, 2, 2), np.uint8)
    red[:, 0] = 200
    turned = change_colours(torch.from_numpy(red), draw(np.array([[0.0, 0.5, 0.5, 0.5, 1.0, 1.0]])))[0, :, 0, 0] / 255
    hue = colorsys.rgb_to_hsv(*turned.tolist())[0]
    assert 0.05 < hue < 0.15


def test_grey_pictures_stay_grey_and_some_pictures_turn_grey() -> None:
    draws = np.random.default_rng(2).random((64, DRAWS))
    grey = torch.from_numpy(SOME[:, :1].repeat(3, 1))
    found = change_colours(grey, draw(draws))
    assert float((found - found[:, :1]).abs().max()) < 1e-3
    assert len(found.flatten(1).unique(dim=0)) == 64  # brightness and contrast differ
    coloured = change_colours(torch.from_numpy(SOME), draw(draws))
    is_grey = (coloured - coloured[:, :1]).abs().amax((1, 2, 3)) < 1e-3
    assert torch.equal(is_grey, torch.from_numpy(draws[:, -1] < GREYED))


def test_results_stay_within_the_levels() -> None:
    wild = torch.from_numpy(np.random.default_rng(3).integers(0, 256, (256, 3, 4, 4), dtype=np.uint8))
    found = change_colours(wild, draw(np.random.default_rng(4).random((256, DRAWS))))
    assert float(found.min()) == 0
    assert float(found.max()) == 255


class Stripes:
    """Pictures whose columns say where a crop lies."""

    def __init__(self, samples: int) -> None:
        self.given, self.shard_sizes = np.zeros(samples, np.int32), (samples,)

    def __len__(self) -> int:
        return len(self.given)

    def read(self, index: int) -> bytes:
        out = io.BytesIO()
        row = np.repeat(np.linspace(60, 190, 32)[None].repeat(32, 0)[..., None], 3, 2)
        Image.fromarray(row.astype(np.uint8)).save(out, "PNG")
        return out.getvalue()

    def prefetch(self, shards: Any) -> None: ...


def contrast_views(**data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    config = DataConfig(batch=24, size=16, mean=(0, 0, 0), std=(1, 1, 1), threads=1, **data)
    loader = Loader(Stripes(24), config, 7, World())
    batch = next(iter(loader.batches(Pass(np.arange(24), ("contrast", "contrast2")), 5)))
    return batch.views["contrast"], batch.views["contrast2"]


def test_contrast_views_are_two_crops_of_their_own_area_with_colours_of_their_own() -> None:
    for crop in ("pad", "resized"):
        first, second = contrast_views(crop=crop, contrast_area=(0.2, 0.3))
        same = [torch.equal(a, b) for a, b in zip(first, second)]
        assert sum(same) <= 3  # neither changes colour, and both begin at one column
        again, _ = contrast_views(crop=crop, contrast_area=(0.2, 0.3))
        assert torch.equal(first, again)
        draws = draw(uniform((7, 5, 0, crc32(b"contrast"), crc32(b"colours")), np.arange(24), DRAWS))
        slope = (first[:, 0, 8, 12] - first[:, 0, 8, 3]) * 255 / draws[:, :3].sum(2)[:, 0]  # levels, colours undone
        whole = 9 / 16 * 130  # of nine columns of an uncropped picture
        # A crop of a share a of the area has a slope of about sqrt(a) times that, by its ratio of 3/4 to 4/3.
        assert (slope < whole * (0.3 * 4 / 3) ** 0.5 + 6).all()
        assert (slope > whole * (0.2 * 3 / 4) ** 0.5 - 6).all()
