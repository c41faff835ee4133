"""Views of a picture: random crops for training, the centre crop for testing.

A picture is decoded once and all views are crops of that array. The beginning of a view's name says its kind:
`weak*` and `strong*` are random crops (AugMix makes a strong view strong, on the device), `contrast*` are resized crops of
`data.contrast_area` (colours change on the device), `test` is the centre crop.
Pictures are (H, W, 3) uint8 here.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from pipeline.config import DataConfig
from shards.base.errors import UserError

GREY = 128
CONTRAST = "contrast"
TRIES = 10
DRAWS = 3 + 2 * TRIES  # random numbers of one view


def resize(picture: np.ndarray, height: int, width: int, how: str = "bilinear") -> np.ndarray:
    """Bilinear or bicubic with antialiasing.

    Pillow's result within one grey level, in a third of its time; bicubic within two, and more where it overshoots black or white.
    """
    if picture.shape[:2] == (height, width):
        return picture
    # Contiguous first: torch would copy with a thread pool of its own in each of our threads.
    source = torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1)[None]
    scaled = F.interpolate(source, size=(height, width), mode=how, antialias=True, align_corners=False)
    return scaled[0].permute(1, 2, 0).numpy()


def center_crop(picture: np.ndarray, short: int, size: int, how: str = "bilinear") -> np.ndarray:
    """Short side scaled to `short`, then the middle square of `size`."""
    height, width = picture.shape[:2]
    if max(height, width) > 4 * min(height, width):  # very long: resized whole it may fill memory
        h, w = min(height, 4 * width), min(width, 4 * height)
        picture = picture[(height - h) // 2 :, (width - w) // 2 :][:h, :w]
        height, width = h, w
    if height <= width:
        picture = resize(picture, short, int(short * width / height), how)
    else:
        picture = resize(picture, int(short * height / width), short, how)
    top, left = round((picture.shape[0] - size) / 2), round((picture.shape[1] - size) / 2)
    return picture[top : top + size, left : left + size]


class Views:
    """Cuts the views of `config` out of pictures; every choice comes from given random numbers."""

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        self.short = config.resize or config.size
        if self.short < config.size:
            raise UserError(
                f"data.resize={config.resize} is smaller than data.size={config.size}: the centre crop would "
                "not fit. Raise data.resize or set it to 0."
            )

    @property
    def from_square(self) -> bool:
        """Whether all views come from the middle square of `size`, so that nothing else need be kept."""
        return self.config.crop == "pad" and self.short == self.config.size

    @property
    def min_side(self) -> int:
        """Smallest short side to decode a picture to, so that crops stay sharp."""
        if self.config.crop == "pad":
            return self.short
        return max(self.short, 2 * self.config.size)

    def choices(self, uniforms: np.ndarray, contrast: bool = False) -> np.ndarray:
        """(B, DRAWS) uniform numbers to choices for `crop`: all that does not need the picture.

        Columns: flip; the place (2); for resized crops, ten tries of width and height as shares of sqrt(area).
        """
        tries = uniforms[:, 3:].reshape(len(uniforms), 2, TRIES)
        low, high = self.config.contrast_area if contrast else self.config.area
        area = low + (high - low) * tries[:, 0]  # (B, TRIES)
        ratio = np.exp((2 * tries[:, 1] - 1) * math.log(4 / 3))
        return np.concatenate([uniforms[:, :3], np.sqrt(area * ratio), np.sqrt(area / ratio)], 1)

    def crop(self, picture: np.ndarray, choices: np.ndarray | None, out: np.ndarray, contrast: bool = False) -> None:
        """Write a view into out (size, size, 3). choices: a row of `choices`, or None for the test view."""
        config = self.config
        if choices is None:
            out[:] = center_crop(picture, self.short, config.size, config.interpolation)
            return
        if config.crop == "pad" and not contrast:
            view = self._pad_crop(picture, choices)
        else:
            if config.crop == "pad":  # the middle square may be all that is kept of the picture
                picture = center_crop(picture, config.size, config.size, config.interpolation)
            top, left, height, width = random_resized_crop_box(picture.shape[0], picture.shape[1], choices)
            view = resize(
                picture[top : top + height, left : left + width], config.size, config.size, config.interpolation
            )
        out[:] = view[:, ::-1] if config.flip and choices[0] < 0.5 else view

    def _pad_crop(self, picture: np.ndarray, choices: np.ndarray) -> np.ndarray:
        size, padding, how = self.config.size, self.config.padding, self.config.interpolation
        padded = np.zeros((size + 2 * padding, size + 2 * padding, 3), np.uint8)
        padded[padding : padding + size, padding : padding + size] = center_crop(picture, size, size, how)
        top, left = int(choices[1] * (2 * padding + 1)), int(choices[2] * (2 * padding + 1))
        return padded[top : top + size, left : left + size]


def random_resized_crop_box(height: int, width: int, choices: np.ndarray) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a random resized crop, as in torchvision.

    Area uniform, ratio log-uniform. Ten tries, then the largest central crop of an allowed ratio.
    """
    across = math.sqrt(height * width)
    for w, h in zip(choices[3 : 3 + TRIES].tolist(), choices[3 + TRIES :].tolist()):
        w, h = round(across * w), round(across * h)
        if 0 < w <= width and 0 < h <= height:
            return int(choices[1] * (height - h + 1)), int(choices[2] * (width - w + 1)), h, w
    h, w = height, width
    if width / height < 3 / 4:
        h = round(width / (3 / 4))
    elif width / height > 4 / 3:
        w = round(height * (4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w
