"""Encoded pictures to uint8 RGB arrays, and views cut from them.

A picture is decoded once and every view is cut from the same array. Views have a name; its beginning says
the kind: `weak*` and `strong*` are random crops (what makes a strong view strong happens on the device),
`test` is the centre crop. Pictures are (H, W, 3) uint8 here.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image, ImageOps

from shards.picture import FORMATS, to_rgb

MAX_PIXELS = 100_000_000  # 300 MB as RGB; anything larger in a training set is an accident or an attack


class DecodeError(Exception):
    """The bytes are no picture we can use; the message says why."""


def decode(data: Any, least: int = 0) -> tuple[np.ndarray, bool]:
    """The picture upright, and whether its file was cut short (the missing part is grey or black).

    `least`: a large JPEG may come back smaller as long as its short side keeps this many pixels; 0 = never.
    """
    data = memoryview(data)
    if data[:3] == b"\xff\xd8\xff":
        picture = _jpeg(data, least)
        if picture is not None:
            return picture
    return _pillow(data)


def _jpeg(data: memoryview, least: int) -> tuple[np.ndarray, bool] | None:
    """The fast way; None for the few JPEGs that need Pillow."""
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None  # unusual subsampling, or hardly a header: Pillow knows more, or says what is wrong
    _refuse_bomb(width, height)
    if colorspace not in ("YCbCr", "Gray", "RGB"):
        return None
    if b"Exif\0\0" in bytes(data[:1024]) and _orientation(data) != 1:
        return None
    # Factors between 1 and 2 cost more than they save.
    scaled = {"min_height": least, "min_width": least, "min_factor": 2}
    try:
        return simplejpeg.decode_jpeg(data, "RGB", **scaled), False
    except ValueError as error:
        reason = str(error)
    if "Premature end" not in reason:
        return None
    try:
        return simplejpeg.decode_jpeg(data, "RGB", strict=False, **scaled), True
    except ValueError as error:
        raise DecodeError(str(error)) from None


def _orientation(data: memoryview) -> int:
    try:
        with Image.open(io.BytesIO(data), formats=tuple(FORMATS)) as image:
            return int(image.getexif().get(0x0112, 1))
    except Exception:  # whatever is wrong with the header, the picture itself may still be fine
        return 1


def _pillow(data: memoryview) -> tuple[np.ndarray, bool]:
    cut_short = False
    try:
        with Image.open(io.BytesIO(data), formats=tuple(FORMATS)) as image:
            _refuse_bomb(*image.size)
            try:
                image.load()
            except OSError as error:
                if "truncated" not in str(error) or not image.tile:
                    raise
                image.tile = []  # nothing further to decode: what has been decoded so far is the picture
                cut_short = True
            return np.array(to_rgb(ImageOps.exif_transpose(image))), cut_short
    except DecodeError:
        raise
    except Image.UnidentifiedImageError:
        raise DecodeError("not a JPEG, PNG or WebP picture") from None
    except Exception as error:  # Pillow's plugins raise nearly anything on hostile bytes
        raise DecodeError(f"{type(error).__name__}: {error}") from None


def _refuse_bomb(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise DecodeError(f"{width}x{height} pixels is more than the {MAX_PIXELS // 1_000_000} million allowed")
