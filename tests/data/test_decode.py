"""Bytes to pixels: every kind of picture a web collection holds, and the views cut from them."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pipeline.config import DataConfig
from pipeline.data.crops import DRAWS, Views, center_crop, random_resized_crop_box, resize
from pipeline.data.keyed_random import uniform
from shards.base.errors import UserError
from shards.config import BuildConfig
from shards.decode import DecodeError, decode
from shards.picture import Rules, check_and_convert
from shards.sources import Rejected


def photograph(height: int = 40, width: int = 56) -> np.ndarray:
    """Smooth colour, as photographs are: JPEG keeps it to a few levels."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([x * 255 / width, y * 255 / height, (x + y) * 255 / (width + height)], -1).astype(np.uint8)


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def near(a: np.ndarray, b: np.ndarray, levels: float) -> bool:
    return a.shape == b.shape and np.abs(a.astype(int) - b.astype(int)).mean() <= levels


photo = Image.fromarray(photograph())
grey = np.repeat(np.asarray(photo.convert("L"))[..., None], 3, 2)
clear = photo.copy()
clear.putalpha(Image.fromarray(np.full((40, 56), 0, np.uint8)))
turned = Image.Exif()
turned[0x0112] = 6  # the camera was held sideways: show it turned by 90 degrees clockwise
sideways = np.rot90(photograph(), -1)
wide = Image.fromarray(np.asarray(photo.convert("L")).astype(np.uint16) * 257)

KINDS = {
    "png": (encode(photo, "PNG"), photograph(), 0),
    "png grey": (encode(photo.convert("L"), "PNG"), grey, 0),
    "png palette": (encode(photo.quantize(256), "PNG"), photograph(), 8),
    "png two levels": (encode(photo.convert("1"), "PNG"), grey, 128),
    "png 16 bit": (encode(wide, "PNG"), grey, 0.6),
    "png transparent is shown on white": (encode(clear, "PNG"), np.full((40, 56, 3), 255, np.uint8), 0),
    "png turned": (encode(photo, "PNG", exif=turned), sideways, 0),
    "jpeg": (encode(photo, "JPEG", quality=95), photograph(), 2),
    "jpeg progressive": (encode(photo, "JPEG", quality=95, progressive=True), photograph(), 2),
    "jpeg grey": (encode(photo.convert("L"), "JPEG", quality=95), grey, 2),
    "jpeg cmyk": (encode(photo.convert("CMYK"), "JPEG", quality=95), photograph(), 4),
    "jpeg turned": (encode(photo, "JPEG", quality=95, exif=turned), sideways, 2),
    "webp": (encode(photo, "WEBP", lossless=True), photograph(), 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_picture_becomes_eight_bit_colour(kind):
    data, expected, levels = KINDS[kind]
    for buffer in (data, memoryview(data)):
        picture, cut_short = decode(buffer)
        assert picture.dtype == np.uint8
        assert picture.flags.writeable
        assert not cut_short
        assert near(picture, expected, levels)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_picture_cut_short_keeps_what_is_there(kind):
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = encode(Image.fromarray(noise), kind)
    whole, _ = decode(data)
    part, cut_short = decode(data[: len(data) * 2 // 3])
    assert cut_short
    assert part.shape == whole.shape
    assert (part[:16] == whole[:16]).all()
    assert (part[-1] == part[-1, 0]).all(), "what is missing is one flat colour"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a JPEG, PNG or WebP"),
        (b"GIF89a" + bytes(50), "not a JPEG, PNG or WebP"),
        (encode(photo, "GIF"), "not a JPEG, PNG or WebP"),
        (encode(photo, "PNG")[:20], "."),
        (encode(photo, "JPEG")[:60], "."),
        (encode(photo, "WEBP")[:60], "."),
    ],
    ids=["empty", "damaged gif", "gif", "png header", "jpeg header", "webp header"],
)
def test_what_is_no_picture_is_refused_with_a_reason(data, reason):
    with pytest.raises(DecodeError, match=reason):
        decode(data)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([encode(photo, k) for k in ("JPEG", "PNG", "WEBP")]), st.randoms(use_true_random=False))
def test_damaged_bytes_give_a_picture_or_a_decode_error_and_nothing_else(data, random):
    damaged = bytearray(data)
    for _ in range(random.randint(1, 20)):
        damaged[random.randrange(len(damaged))] = random.randrange(256)
    try:
        picture, _ = decode(bytes(damaged[: random.randint(1, len(damaged))]))
    except DecodeError:
        return
    assert picture.ndim == 3
    assert picture.shape[2] == 3


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_decompression_bomb_is_refused_before_it_is_decoded(kind):
    with pytest.raises(DecodeError, match=r"too many pixels \(56 x 40, at most 2,239"):
        decode(encode(photo, kind), max_pixels=40 * 56 - 1)


def test_reading_has_the_pixel_limit_of_a_build():
    data = encode(Image.new("L", (7100, 7100)), "JPEG")
    for read in (decode, lambda data: check_and_convert(data, Rules.of(BuildConfig()))):
        with pytest.raises((DecodeError, Rejected), match=r"too many pixels \(7100 x 7100, at most 50,000,000"):
            read(data)


def test_exif_behind_other_segments_turns_a_jpeg():
    """Editors put colour profiles and notes of many KB before the EXIF segment."""
    plain = encode(photo, "JPEG", quality=95, exif=turned)
    note = b"\xff\xfe" + (4000).to_bytes(2, "big") + bytes(3998)
    assert near(decode(plain[:2] + note + plain[2:])[0], sideways, 2)


def test_a_jpeg_with_a_rare_chroma_sampling_is_decoded():
    """The fast decoder does not know 4:4:1: it raises a KeyError."""
    data = bytearray(encode(Image.new("RGB", (64, 64), (200, 30, 40)), "JPEG", subsampling=0))
    data[data.index(b"\xff\xc0") + 11] = 0x14
    picture, _ = decode(bytes(data))
    assert picture.shape == (64, 64, 3)


def test_a_large_jpeg_may_be_decoded_smaller_but_not_below_the_wanted_side():
    large = encode(Image.fromarray(photograph(400, 600)), "JPEG", quality=95)
    assert decode(large)[0].shape == (400, 600, 3)
    assert decode(large, min_side=100)[0].shape == (100, 150, 3)
    assert decode(large, min_side=101)[0].shape[0] >= 101
    assert decode(large, min_side=201)[0].shape == (400, 600, 3)
    assert near(decode(large, min_side=100)[0], photograph(100, 150), 4)


@pytest.mark.parametrize("how", ["bilinear", "bicubic"])
def test_resizing_agrees_with_pillow_to_one_level_or_two(how):
    # Bicubic overshoots; what is cut off at black and white between the two directions differs by a few levels.
    low, high, levels = (0, 256, 1) if how == "bilinear" else (64, 192, 2)
    noise = np.random.default_rng(0).integers(low, high, (90, 70, 3), dtype=np.uint8)
    for height, width in ((32, 32), (16, 100), (200, 150), (89, 71)):
        expected = np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling[how.upper()])).astype(int)
        assert np.abs(resize(noise, height, width, how) - expected).max() <= levels


@pytest.mark.parametrize("view", ["weak", "test"])
@pytest.mark.parametrize("crop", ["pad", "resized"])
def test_views_are_resized_as_set(view, crop):
    picture = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    options = {"size": 16, "padding": 0, "crop": crop, "area": (1.0, 1.0)}
    cubic, linear = (cut(DataConfig(**options, interpolation=how), view, picture) for how in ("bicubic", "bilinear"))
    assert (cut(DataConfig(**options), view, picture) == linear).all()
    assert cubic.astype(float).std() > linear.astype(float).std() + 1  # bicubic is sharper
    if view == "test":
        assert (cubic == resize(picture, 16, 16, "bicubic")).all()


def cut(config: DataConfig, name: str, picture: np.ndarray, index: int = 0) -> np.ndarray:
    views = Views(config)
    out = np.zeros((config.size, config.size, 3), np.uint8)
    choices = views.choices(uniform((0, 0, 0), np.array([index]), DRAWS))[0]
    views.crop(picture, None if name == "test" else choices, out)
    return out


def test_the_test_view_is_the_middle_of_the_scaled_picture():
    picture = photograph(60, 90)
    out = cut(DataConfig(size=28, resize=32), "test", picture)
    expected = resize(picture, 32, 48)[2:30, 10:38]
    assert (out == expected).all()
    tall = cut(DataConfig(size=32), "test", picture.transpose(1, 0, 2).copy())
    assert (tall == resize(picture.transpose(1, 0, 2).copy(), 48, 32)[8:40]).all()


def test_a_padded_crop_is_the_picture_shifted_with_black_around_it():
    config = DataConfig(size=8, padding=2)
    picture = np.random.default_rng(0).integers(1, 256, (8, 8, 3), dtype=np.uint8)
    padded = np.pad(picture, ((2, 2), (2, 2), (0, 0)))
    shifts = {(y, x): padded[y : y + 8, x : x + 8] for y in range(5) for x in range(5)}
    seen = set()
    for index in range(400):
        out = cut(config, "weak", picture, index)
        matches = [shift for shift, expected in shifts.items() if (out == expected).all()]
        assert len(matches) == 1
        seen.add(matches[0])
    assert seen == set(shifts), "every shift is reached, the largest ones included"


def test_half_of_the_pictures_are_mirrored_and_only_when_asked():
    picture = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    plain = DataConfig(size=8, padding=0)
    assert all((cut(plain, "weak", picture, i) == picture).all() for i in range(50))
    mirrored = [
        (cut(DataConfig(size=8, padding=0, flip=True), "weak", picture, i) != picture).any() for i in range(400)
    ]
    assert 160 < sum(mirrored) < 240


def test_small_pictures_are_enlarged_to_the_size_of_the_network():
    picture = photograph(8, 8)
    assert (cut(DataConfig(size=16, padding=0), "weak", picture) == resize(picture, 16, 16)).all()
    for view in ("weak", "test"):
        assert cut(DataConfig(size=224, resize=256, crop="resized"), view, photograph(5, 9)).shape == (224, 224, 3)


def test_random_resized_crops_follow_torchvisions_law():
    """Area and ratio of many boxes against a plain restatement of the published procedure."""
    height, width, area = 300, 400, (0.4, 1.0)
    views = Views(DataConfig(crop="resized", area=area))
    rows = views.choices(uniform((1, 2, 3), np.arange(20_000), DRAWS))
    boxes = np.array([random_resized_crop_box(height, width, row) for row in rows], float)
    top, left, h, w = boxes.T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + h <= height).all()
    assert (left + w <= width).all()

    rng = np.random.default_rng(0)
    expected = []
    while len(expected) < 20_000:
        for _ in range(10):
            target = height * width * rng.uniform(*area)
            ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
            ew, eh = round(np.sqrt(target * ratio)), round(np.sqrt(target / ratio))
            if ew <= width and eh <= height:
                expected.append((rng.integers(0, height - eh + 1), rng.integers(0, width - ew + 1), eh, ew))
                break
        else:
            expected.append((0, 0, 300, 400))
    reference = np.array(expected, float)
    spread = reference.std(0) / np.sqrt(len(reference)) * np.sqrt(2)
    assert (np.abs(boxes.mean(0) - reference.mean(0)) < 4.5 * spread).all()
    assert np.allclose(boxes.std(0), reference.std(0), rtol=0.03)


def test_a_picture_no_crop_fits_gives_its_central_part():
    views = Views(DataConfig(crop="resized", area=(1.0, 1.0)))
    row = views.choices(uniform((0, 0, 0), np.arange(1), DRAWS))[0]
    assert random_resized_crop_box(100, 1000, row) == (0, 433, 100, 133)
    assert random_resized_crop_box(1000, 90, row) == (440, 0, 120, 90)


def test_a_centre_crop_that_cannot_fit_is_refused():
    with pytest.raises(UserError, match=r"data\.resize=20 is smaller than data\.size=28"):
        Views(DataConfig(size=28, resize=20))


def test_centre_of_an_exact_picture_is_the_picture():
    picture = photograph(16, 16)
    assert (center_crop(picture, 16, 16) == picture).all()


def test_a_ribbon_is_not_scaled_whole():
    """One pixel high and very wide: scaled by its short side it would take gigabytes."""
    ribbon = np.zeros((1, 40_000, 3), np.uint8)
    ribbon[:, 19_000:21_000] = 200
    assert (center_crop(ribbon, 320, 299) == 200).all()
