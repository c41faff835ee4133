"""Encoded pictures: which are accepted, what they may hold, and what is stored of them.

The rules that builds (`check_and_convert`) and readers (`shards.decode`) share are here: file suffixes,
formats, the pixel limit, EXIF orientation and the conversion to RGB.

A build keeps the bytes of ordinary pictures. What readers would get wrong (CMYK, 16 bit, palettes,
transparency, animations, rotation written in EXIF) is decoded once and encoded anew.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from shards.config import BuildConfig
from shards.sources import Rejected

FORMATS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
EXTENSIONS = ("jpg", "png", "webp")
# The one limit, 150 MB as RGB. It is the default of a build because a build decides which samples exist:
# another number would make other shards of the same settings.
MAX_PIXELS: int = BuildConfig.model_fields["max_pixels"].default
# Shards built with a larger max_pixels are read up to here. A manifest is data and cannot raise it.
PIXEL_CAP = max(MAX_PIXELS, 100_000_000)
_ORIENTATION = 0x0112
_TRUNCATED = ("truncated", "not enough data", "unexpected end", "broken data stream")


@dataclass(frozen=True)
class Rules:
    """The part of a build's settings that pictures see."""

    resize: int
    quality: int
    decode_check: bool
    max_pixels: int
    max_bytes: int

    @classmethod
    def of(cls, config: BuildConfig) -> Rules:
        limit = int(config.max_picture_mb * 1e6)
        return cls(config.resize, config.quality, config.decode_check, config.max_pixels, limit)


@dataclass(frozen=True)
class JpegHeader:
    height: int
    width: int
    colorspace: str
    has_exif: bool
    plain: bool  # eight bits a colour, and every segment before the pixels could be read


def pixel_limit(options: dict[str, Any]) -> int:
    """The limit for pictures of shards, from the options in their manifest."""
    limit = options.get("max_pixels")
    return min(limit, PIXEL_CAP) if isinstance(limit, int) else MAX_PIXELS


def check_pixels(width: int, height: int, limit: int) -> None:
    if width * height > limit:
        raise Rejected(f"too many pixels ({width} x {height}, at most {limit:,} are allowed)")


def read_jpeg_header(data: bytes | memoryview, max_pixels: int) -> JpegHeader | None:
    """None for what simplejpeg cannot decode: no JPEG, or an unusual one. Pillow must try it."""
    if data[:3] != b"\xff\xd8\xff":
        return None
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    except Exception:  # ValueError, and KeyError for rare chroma samplings
        return None
    check_pixels(width, height, max_pixels)
    return JpegHeader(height, width, colorspace, *_scan_segments(data))


def _scan_segments(data: bytes | memoryview) -> tuple[bool, bool]:
    """(has_exif, plain) from the segments before the pixels, without searching the bytes inside them."""
    position, has_exif, eight_bit = 2, False, True
    while data[position : position + 1] == b"\xff" and position + 10 <= len(data):
        kind = data[position + 1]
        if kind == 0xFF:  # a fill byte
            position += 1
            continue
        if kind == 0xDA:  # the pixels
            return has_exif, eight_bit
        if kind == 0xE1 and data[position + 4 : position + 10] == b"Exif\0\0":
            has_exif = True
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):  # the frame header
            eight_bit = data[position + 4] == 8
        position += 2 + (data[position + 2] << 8) + data[position + 3]
    return has_exif, False


@contextmanager
def open_picture(data: bytes | memoryview, max_pixels: int) -> Iterator[ImageFile.ImageFile]:
    """The picture opened by Pillow, its size checked before a pixel is decoded. All failures become Rejected."""
    try:
        with Image.open(io.BytesIO(data), formats=tuple(FORMATS)) as image:
            check_pixels(*image.size, max_pixels)
            yield image
    except Rejected:
        raise
    except UnidentifiedImageError:
        raise Rejected("not a JPEG, PNG or WebP picture") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Rejected("too many pixels") from None
    except Exception as error:  # decoders raise OSError, ValueError, SyntaxError, struct.error ... on bad bytes
        truncated = any(word in str(error).lower() for word in _TRUNCATED)
        raise Rejected("truncated" if truncated else f"cannot be decoded ({type(error).__name__})") from None


def is_rotated(image: Image.Image) -> bool:
    """Whether EXIF says that the picture must be rotated or mirrored to stand upright."""
    return image.getexif().get(_ORIENTATION, 1) not in (0, 1)


def upright_rgb(image: Image.Image) -> Image.Image:
    """The picture as a person would see it."""
    return to_rgb(ImageOps.exif_transpose(image) if is_rotated(image) else image)


def check_and_convert(data: bytes, rules: Rules) -> tuple[bytes, str]:
    """(bytes, extension) to store; raises Rejected."""
    if not data:
        raise Rejected("empty file")
    if len(data) > rules.max_bytes:
        raise Rejected(f"larger than {rules.max_bytes / 1e6:g} MB")
    stored = _convert_plain_jpeg(data, rules)
    if stored is not None:
        return stored, "jpg"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # corrupt EXIF and the like is common in pictures of the web
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with open_picture(data, rules.max_pixels) as image:
            return _convert(image, data, rules)


def _convert_plain_jpeg(data: bytes, rules: Rules) -> bytes | None:
    """The fast way for whole, upright, grey or colour JPEGs. None: Pillow must decode the picture."""
    header = read_jpeg_header(data, rules.max_pixels)
    if header is None or not header.plain or header.has_exif or data[-2:] != b"\xff\xd9":
        return None
    if header.colorspace not in ("YCbCr", "Gray"):
        return None
    short_side = min(header.height, header.width)
    shrink = 0 < rules.resize < short_side
    if not (shrink or rules.decode_check):
        return data
    try:
        # A very large picture is decoded at a smaller scale, but never below twice the wanted size.
        least = 2 * rules.resize if shrink and short_side >= 4 * rules.resize else 0
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=least, min_width=least)
    except Exception as error:
        if "premature end" in str(error).lower():  # Pillow would fill the rest with grey
            raise Rejected("truncated") from None
        return None
    if not shrink:
        return data
    return _jpeg(_shrunk(Image.fromarray(pixels), (header.width, header.height), rules.resize), rules.quality)


def _convert(image: Image.Image, data: bytes, rules: Rules) -> tuple[bytes, str]:
    # Many cameras put a second view behind the first (MPO); every JPEG reader takes the first.
    extension = "jpg" if image.format == "MPO" else FORMATS[str(image.format)]
    animated = extension != "jpg" and getattr(image, "n_frames", 1) > 1
    turned = is_rotated(image)
    sixteen_bit = extension == "png" and data[24:25] == b"\x10"
    image.load()
    special = animated or turned or sixteen_bit or "transparency" in image.info
    shrink = 0 < rules.resize < min(image.size)
    if image.mode in ("RGB", "L") and not special and not shrink:
        return data, extension
    upright = upright_rgb(image)
    if shrink:
        return _jpeg(_shrunk(upright, upright.size, rules.resize), rules.quality), "jpg"
    if extension == "jpg":
        return _jpeg(upright, rules.quality), "jpg"
    out = io.BytesIO()
    upright.save(out, "png")  # a lossless format stays lossless
    return out.getvalue(), "png"


def to_rgb(image: Image.Image) -> Image.Image:
    """Eight-bit colour: 16-bit grey is scaled, transparency becomes white, CMYK and palettes are converted."""
    if image.mode.startswith("I"):
        grey = np.clip(np.asarray(image), 0, 65535).astype(
            np.uint32
        )  # integers: floats of a large picture take much memory
        return Image.fromarray(((grey + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        clear = image if image.mode == "RGBA" else image.convert("RGBA")
        white = Image.new("RGB", clear.size, "white")
        white.paste(clear, mask=clear.getchannel("A"))
        return white
    return image.convert("RGB")


def _shrunk(image: Image.Image, size: tuple[int, int], short: int) -> Image.Image:
    """Short side `short`; the shape is that of the full `size`, whatever scale `image` was decoded at."""
    width, height = size
    factor = short / min(width, height)
    return image.resize(
        (max(short, round(width * factor)), max(short, round(height * factor))), Image.Resampling.BICUBIC
    )


def _jpeg(image: Image.Image, quality: int) -> bytes:
    pixels = np.ascontiguousarray(image)
    data: bytes = simplejpeg.encode_jpeg(pixels, quality=quality, colorspace="RGB", colorsubsampling="420")
    return data
