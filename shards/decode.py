"""Encoded pictures to uint8 RGB arrays (H, W, 3). What is accepted is decided in `shards.picture`, as for builds."""

from __future__ import annotations

from typing import Any

import numpy as np
import simplejpeg

from shards.picture import MAX_PIXELS, is_rotated, open_picture, read_jpeg_header, upright_rgb
from shards.sources import Rejected


class DecodeError(Exception):
    """The picture cannot be decoded; the message says why."""


def decode(data: Any, min_side: int = 0, max_pixels: int = MAX_PIXELS) -> tuple[np.ndarray, bool]:
    """The picture upright, and whether its file was cut short (the missing part is grey or black).

    `min_side`: a large JPEG may be decoded smaller, with at least this short side; 0 = never.
    """
    data = memoryview(data)
    try:
        decoded = _decode_jpeg(data, min_side, max_pixels)
        return _decode_with_pillow(data, max_pixels) if decoded is None else decoded
    except Rejected as error:
        raise DecodeError(str(error)) from None


def _decode_jpeg(data: memoryview, min_side: int, max_pixels: int) -> tuple[np.ndarray, bool] | None:
    """By simplejpeg; None for JPEGs that need Pillow."""
    header = read_jpeg_header(data, max_pixels)
    if header is None or header.colorspace not in ("YCbCr", "Gray", "RGB"):
        return None
    if header.has_exif and _is_rotated(data, max_pixels):
        return None
    # Factors between 1 and 2 cost more than they save.
    scaled = {"min_height": min_side, "min_width": min_side, "min_factor": 2}
    try:
        return simplejpeg.decode_jpeg(data, "RGB", **scaled), False
    except ValueError as error:
        reason = str(error)
    if "premature end" not in reason.lower():  # of the file, or of its data before the end marker
        return None
    try:
        return simplejpeg.decode_jpeg(data, "RGB", strict=False, **scaled), True
    except ValueError as error:
        raise DecodeError(str(error)) from None


def _is_rotated(data: memoryview, max_pixels: int) -> bool:
    try:
        with open_picture(data, max_pixels) as image:
            return is_rotated(image)
    except Rejected:  # the header is damaged, but the picture itself may be fine
        return False


def _decode_with_pillow(data: memoryview, max_pixels: int) -> tuple[np.ndarray, bool]:
    cut_short = False
    with open_picture(data, max_pixels) as image:
        try:
            image.load()
        except OSError as error:
            if "truncated" not in str(error) or not image.tile:
                raise
            image.tile = []  # decode no further: keep what is there
            cut_short = True
        return np.array(upright_rgb(image)), cut_short
