"""One encoded picture in, one usable encoded picture out, or the reason why not.

Ordinary pictures keep their bytes. What readers would get wrong (CMYK, 16 bit, palettes, transparency,
animations, rotation written in EXIF) is decoded here once, properly, and encoded anew.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass

import numpy as np
import simplejpeg
from PIL import Image, ImageOps, UnidentifiedImageError

from shards.config import BuildConfig
from shards.sources import Rejected

FORMATS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
EXTENSIONS = ("jpg", "png", "webp")
_ORIENTATION = 0x0112


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


def check_and_convert(data: bytes, rules: Rules) -> tuple[bytes, str]:
    """(bytes, extension) to store; raises Rejected."""
    if not data:
        raise Rejected("empty file")
    if len(data) > rules.max_bytes:
        raise Rejected(f"larger than {rules.max_bytes / 1e6:g} MB")
    if data[:3] == b"\xff\xd8\xff":
        done = _is_baseline_jpeg(data, rules)
        if done is not None:
            return done, "jpg"
    return _any_picture(data, rules)


def _is_baseline_jpeg(data: bytes, rules: Rules) -> bytes | None:
    """The fast way for whole, upright grey or colour JPEG; None sends the picture the careful way."""
    if data[-2:] != b"\xff\xd9" or not _ordinary(data):
        return None
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
    except Exception:  # rare samplings raise KeyError
        return None
    if space not in ("YCbCr", "Gray") or height * width > rules.max_pixels:
        return None
    shrink = 0 < rules.resize < min(height, width)
    if not (shrink or rules.decode_check):
        return data
    try:
        # A very large picture is decoded at a smaller scale, but never below twice the wanted size.
        least = 2 * rules.resize if shrink and min(height, width) >= 4 * rules.resize else 0
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=least, min_width=least)
    except Exception as error:
        if "premature end" in str(error).lower():  # Pillow would fill the rest with grey
            raise Rejected("truncated") from None
        return None
    if not shrink:
        return data
    return _jpeg(_shrunk(Image.fromarray(pixels), (width, height), rules.resize), rules.quality)


def _ordinary(data: bytes) -> bool:
    """Whether a JPEG has eight bits a colour and no EXIF: a look at the segments before its pixels, not at the bytes in them."""
    place = 2
    while data[place : place + 1] == b"\xff":
        kind = data[place + 1]
        if kind == 0xFF:  # a fill byte
            place += 1
            continue
        if kind == 0xDA:  # the pixels
            return True
        if kind == 0xE1 and data[place + 4 : place + 10] == b"Exif\0\0":
            return False
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC) and data[place + 4] != 8:
            return False
        place += 2 + (data[place + 2] << 8) + data[place + 3]
    return False


def _any_picture(data: bytes, rules: Rules) -> tuple[bytes, str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of corrupt EXIF and the like: in the web's pictures there is no end to it
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=tuple(FORMATS)) as image:
                return _decode_with_limits(image, data, rules)
    except Rejected:
        raise
    except UnidentifiedImageError:
        raise Rejected("not a JPEG, PNG or WebP picture") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Rejected("too many pixels") from None
    except Exception as error:  # decoders raise OSError, ValueError, SyntaxError, struct.error ... on bad bytes
        text = str(error).lower()
        cut = any(word in text for word in ("truncated", "not enough data", "unexpected end", "broken data stream"))
        raise Rejected("truncated" if cut else f"cannot be decoded ({type(error).__name__})") from None


def _decode_with_limits(image: Image.Image, data: bytes, rules: Rules) -> tuple[bytes, str]:
    width, height = image.size
    if width * height > rules.max_pixels:
        raise Rejected(f"too many pixels ({width} x {height})")
    # Many cameras put a second view behind the first (MPO); every JPEG reader takes the first.
    extension = "jpg" if image.format == "MPO" else FORMATS[str(image.format)]
    animated = extension != "jpg" and getattr(image, "n_frames", 1) > 1
    turned = image.getexif().get(_ORIENTATION, 1) not in (0, 1)
    deep = extension == "png" and data[24:25] == b"\x10"
    image.load()
    ordinary = image.mode in ("RGB", "L") and "transparency" not in image.info and not (animated or turned or deep)
    shrink = 0 < rules.resize < min(width, height)
    if ordinary and not shrink:
        return data, extension
    upright = to_rgb(ImageOps.exif_transpose(image) if turned else image)
    if shrink:
        return _jpeg(_shrunk(upright, upright.size, rules.resize), rules.quality), "jpg"
    if extension == "jpg":
        return _jpeg(upright, rules.quality), "jpg"
    out = io.BytesIO()
    upright.save(out, "png")  # what came without loss stays without loss
    return out.getvalue(), "png"


def to_rgb(image: Image.Image) -> Image.Image:
    """Eight-bit colour: 16-bit grey scaled, transparency laid on white, CMYK and palettes converted."""
    if image.mode.startswith("I"):
        grey = np.clip(np.asarray(image), 0, 65535).astype(np.uint32)  # in whole numbers: it may be a large picture
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
    return simplejpeg.encode_jpeg(pixels, quality=quality, colorspace="RGB", colorsubsampling="420")
