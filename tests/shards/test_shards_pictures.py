"""Bad pictures are converted properly or rejected with a reason, never silently and never fatally."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import simplejpeg
from PIL import Image
from shards_help import Build, fill, picture, pixels

from shards.base.errors import UserError
from shards.config import BuildConfig
from shards.picture import Rules, check_and_convert
from shards.reader import open_split
from shards.sources import Rejected

UNTOUCHED = Rules.of(BuildConfig())
SMALL = Rules.of(BuildConfig(resize=16))


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb(width: int, height: int) -> bytes:
    """A small PNG file of a huge white picture."""
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress((b"\0" + b"\xff" * ((width + 7) // 8)) * height, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "data",
    [
        picture(1),
        picture(1, progressive=True),
        picture(1, mode="L"),
        picture(1, kind="png"),
        picture(1, kind="png", mode="L"),
        picture(1, kind="webp"),
        picture(1) + b"trailing",
        picture(1, kind="mpo", save_all=True, append_images=[Image.new("RGB", (24, 16))]),
    ],
    ids=["jpeg", "progressive", "grey jpeg", "png", "grey png", "webp", "bytes after the end", "two views"],
)
def test_ordinary_pictures_keep_their_bytes(data: bytes) -> None:
    assert check_and_convert(data, UNTOUCHED)[0] == data
    assert check_and_convert(data, Rules.of(BuildConfig(decode_check=True)))[0] == data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (picture(1)[:-30], "truncated"),
        (picture(1)[:40], "truncated|cannot be decoded"),
        (picture(1, kind="png")[:-40], "truncated"),
        (picture(1, kind="webp")[:-40], "truncated|cannot be decoded"),
        (b"<html>not found</html>", "not a JPEG, PNG or WebP picture"),
        (b"\xff\xd8\xff" + b"rubbish" * 9, "not a JPEG|cannot be decoded"),
        (encode(Image.new("RGB", (4, 4)), "gif"), "not a JPEG, PNG or WebP picture"),
        (bomb(20000, 20000), "too many pixels"),
        (bomb(9000, 9000), r"too many pixels \(9000 x 9000, at most 50,000,000"),
        (encode(Image.new("L", (8000, 8000)), "jpeg"), r"too many pixels \(8000 x 8000, at most 50,000,000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("rules", [UNTOUCHED, SMALL], ids=["untouched", "resized"])
def test_unusable_pictures_are_rejected_with_the_reason(data: bytes, reason: str, rules: Rules) -> None:
    with pytest.raises(Rejected, match=f"^({reason})"):
        check_and_convert(data, rules)


def test_a_file_beyond_the_limit_is_rejected() -> None:
    with pytest.raises(Rejected, match=r"larger than 0\.0001 MB"):
        check_and_convert(picture(1), Rules.of(BuildConfig(max_picture_mb=0.0001)))


class TestConversion:
    """The stored picture shows what a person would see in the original."""

    @pytest.fixture
    def colours(self) -> Image.Image:
        return Image.open(io.BytesIO(picture(3, (40, 20), "png")))

    def near(self, data: bytes, image: Image.Image, tolerance: float = 6.0) -> None:
        stored = pixels(check_and_convert(data, UNTOUCHED)[0]).astype(float)
        wanted = np.asarray(image.convert("RGB")).astype(float)
        assert stored.shape == wanted.shape
        assert np.abs(stored - wanted).mean() < tolerance

    def test_cmyk(self, colours: Image.Image) -> None:
        data = encode(colours.convert("CMYK"), "jpeg", quality=95)
        self.near(data, colours)
        assert check_and_convert(data, UNTOUCHED)[1] == "jpg"

    def test_palette_with_transparency_goes_on_white(self, colours: Image.Image) -> None:
        self.near(encode(colours.quantize(32), "png"), colours.quantize(32), 0.01)
        clear = Image.new("RGBA", (40, 20), (255, 0, 0, 0))
        clear.paste((0, 0, 255, 255), (0, 0, 20, 20))
        wanted = Image.new("RGB", (40, 20), "white")
        wanted.paste("blue", (0, 0, 20, 20))
        self.near(encode(clear, "png"), wanted, 0.01)
        self.near(encode(clear, "webp", lossless=True), wanted, 0.01)
        half = Image.new("RGBA", (40, 20), (255, 0, 0, 128))
        self.near(encode(half, "png"), Image.new("RGB", (40, 20), (255, 127, 127)), 0.01)

    def test_sixteen_bit_grey(self) -> None:
        ramp = np.linspace(0, 65535, 40 * 20).reshape(20, 40)
        data = encode(Image.fromarray(ramp.astype(np.uint16)), "png")
        self.near(data, Image.fromarray((ramp / 257).astype(np.uint8)), 1.0)

    def test_one_bit_and_grey_with_alpha(self, colours: Image.Image) -> None:
        self.near(encode(colours.convert("1"), "png"), colours.convert("1"), 0.01)
        self.near(encode(colours.convert("LA"), "png"), colours.convert("L"), 0.01)

    @pytest.mark.parametrize("kind", ["webp", "png"])
    def test_the_first_frame_of_an_animation(self, kind: str, colours: Image.Image) -> None:
        frames = [Image.new("RGB", (40, 20), "green")] * 2
        options = {"lossless": True} if kind == "webp" else {}
        data = encode(colours, kind, save_all=True, append_images=[*frames, colours], duration=50, **options)
        self.near(data, colours, 0.01)
        assert getattr(Image.open(io.BytesIO(check_and_convert(data, UNTOUCHED)[0])), "n_frames", 1) == 1

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_exif_rotation_is_applied(self, orientation: int, colours: Image.Image) -> None:
        turns = {
            2: Image.Transpose.FLIP_LEFT_RIGHT,
            3: Image.Transpose.ROTATE_180,
            4: Image.Transpose.FLIP_TOP_BOTTOM,
            5: Image.Transpose.TRANSPOSE,
            6: Image.Transpose.ROTATE_270,
            7: Image.Transpose.TRANSVERSE,
            8: Image.Transpose.ROTATE_90,
        }
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encode(colours, "jpeg", quality=95, exif=exif)
        wanted = colours.transpose(turns[orientation]) if orientation > 1 else colours
        self.near(data, wanted)
        assert (check_and_convert(data, UNTOUCHED)[0] == data) == (orientation == 1)
        shrunk = Image.open(io.BytesIO(check_and_convert(data, SMALL)[0]))
        assert shrunk.size == ((32, 16) if orientation <= 4 else (16, 32))
        assert shrunk.getexif().get(0x0112, 1) == 1

    def test_exif_is_found_behind_a_large_colour_profile(self, colours: Image.Image) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6
        data = encode(colours, "jpeg", quality=95, exif=exif)
        profile = b"\xff\xe2" + (9000).to_bytes(2, "big") + b"ICC_PROFILE\0\1\1" + b"p" * (9000 - 2 - 14)
        self.near(data[:2] + profile + data[2:], colours.transpose(Image.Transpose.ROTATE_270))

    def test_the_word_exif_inside_a_comment_is_no_exif(self, colours: Image.Image) -> None:
        data = encode(colours, "jpeg", quality=95, comment=b"not really Exif\0\0")
        assert check_and_convert(data, UNTOUCHED)[0] == data


def test_the_largest_pictures_need_less_than_a_gibibyte() -> None:
    """As large as max_pixels lets pass, with transparency: several copies of it would be too many."""
    program = (
        "import io, sys; sys.path.insert(0, sys.argv[1])\n"
        "from PIL import Image\n"
        "from shards_million import peak_mib\n"
        "from shards.config import BuildConfig\n"
        "from shards.picture import Rules, check_and_convert\n"
        "out = io.BytesIO()\n"
        "Image.new('RGBA', (7000, 7000), (1, 2, 3, 100)).save(out, 'png', compress_level=1)\n"
        "check_and_convert(out.getvalue(), Rules.of(BuildConfig(resize=256)))\n"
        "print(peak_mib())"
    )
    done = subprocess.run([sys.executable, "-c", program, str(Path(__file__).parent)], capture_output=True, text=True)
    assert float(done.stdout) < 1024, done.stderr


class TestResize:
    @pytest.mark.parametrize(("kind", "mode"), [("jpeg", "RGB"), ("png", "RGB"), ("webp", "RGB"), ("jpeg", "L")])
    @pytest.mark.parametrize("size", [(200, 100), (33, 500), (64, 64)])
    def test_the_short_side_is_what_was_asked(self, kind: str, mode: str, size: tuple[int, int]) -> None:
        data, extension = check_and_convert(picture(5, size, kind, mode), SMALL)
        assert extension == "jpg"
        width, height = Image.open(io.BytesIO(data)).size
        assert min(width, height) == 16
        assert width / height == pytest.approx(size[0] / size[1], rel=0.04)

    def test_small_pictures_are_not_blown_up(self) -> None:
        data = picture(5, (30, 16))
        assert check_and_convert(data, SMALL) == (data, "jpg")

    def test_it_shows_the_same_picture(self) -> None:
        data = picture(6, (640, 480))
        wanted = Image.open(io.BytesIO(data)).resize((85, 64), Image.Resampling.LANCZOS)
        stored = check_and_convert(data, Rules.of(BuildConfig(resize=64, quality=95)))[0]
        assert np.abs(pixels(stored).astype(float) - np.asarray(wanted)).mean() < 3

    def test_quality_is_obeyed(self) -> None:
        data = picture(7, (640, 480))
        low, high = (len(check_and_convert(data, Rules.of(BuildConfig(resize=64, quality=q)))[0]) for q in (30, 95))
        assert low < high


class TestBuildWithBadPictures:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return fill(tmp_path / "in", {"ant": 40, "bee": 30})

    def spoil(self, root: Path) -> dict[str, str]:
        """Bad files among the good; what each must be called."""
        outside = root.parent / "outside"
        outside.mkdir()
        (outside / "secret.jpg").write_bytes(picture(1))
        (root / "ant" / "000.jpg").write_bytes(b"")
        (root / "ant" / "001.jpg").write_bytes(picture(1)[:-20])
        (root / "bee" / "002.jpg").write_bytes(b"no picture")
        (root / "bee" / "link.jpg").symlink_to(outside / "secret.jpg")
        (root / "bee" / "away").symlink_to(outside)
        (root / "bee" / "round").symlink_to(root / "bee")
        (root / "bee" / "inside.jpg").symlink_to(root / "bee" / "003.jpg")
        (root / "bee" / "dangling.jpg").symlink_to(root / "bee" / "nowhere.jpg")
        (root / "bee" / "itself.jpg").symlink_to(root / "bee" / "itself.jpg")
        os.mkfifo(root / "bee" / "pipe.jpg")
        Path(os.fsdecode(os.fsencode(root / "ant") + b"/\xff\xfe.jpg")).write_bytes(picture(1))
        return {
            "ant/000.jpg": "empty file",
            "ant/001.jpg": "truncated",
            "bee/002.jpg": "not a JPEG, PNG or WebP picture",
            "bee/link.jpg": "link leaves the folder",
            "bee/away": "link leaves the folder",
            "bee/dangling.jpg": "missing file",
            "bee/itself.jpg": "cannot be read (Too many levels of symbolic links)",
            "bee/pipe.jpg": "not a regular file",
            "ant/\\xff\\xfe.jpg": "name is not UTF-8",
        }

    def test_they_end_in_the_rejected_table(self, root: Path, build: Build) -> None:
        expected = self.spoil(root)
        url = build(source="folder", path=str(root), max_rejected=0.2, shard_samples=10)
        table = pyarrow.parquet.read_table(Path(url) / "rejected.parquet")
        assert dict(zip(table["key"].to_pylist(), table["reason"].to_pylist())) == expected
        train, test = open_split(url), open_split(url, "test")
        assert train.manifest.rejected.count == len(expected)
        assert "9 rejected" in build.said[-1]
        keys = [*train.keys(), *test.keys()]
        assert len(keys) == 68 == len(set(keys))
        assert "bee/inside.jpg" in keys
        for split in (train, test):
            for index, key in enumerate(split.keys()):
                assert bytes(split.read(index)) == (root / key).read_bytes()

    def test_indices_stay_dense_bias_exact_and_bytes_equal_for_any_number_of_writers(
        self, root: Path, build: Build
    ) -> None:
        self.spoil(root)
        options = {"rho": 2, "noise": 0.3, "max_rejected": 0.2, "shard_samples": 7}
        url = build(source="folder", path=str(root), **options)
        train = open_split(url)
        assert train.flipped.sum() == int(0.3 * len(train))
        assert train.clean_counts.tolist() == [30, 15]
        table = pyarrow.parquet.read_table(Path(url) / "train.parquet")
        assert table["index"].to_pylist() == list(range(len(train)))
        again = build("again", source="folder", path=str(root), writers=2, **options)
        for file in Path(url).iterdir():
            if file.name != "build.json":
                assert file.read_bytes() == (Path(again) / file.name).read_bytes(), file.name

    def test_one_bad_picture_leaves_most_shards_as_they_were(self, root: Path, build: Build) -> None:
        options = {"source": "folder", "path": str(root), "max_rejected": 0.2, "shard_samples": 7}
        good = Path(build("good", **options))
        (root / "bee" / "002.jpg").write_bytes(b"no picture")
        bad = Path(build("bad", **options))
        same = [f.name for f in good.glob("train-*") if f.read_bytes() == (bad / f.name).read_bytes()]
        assert len(same) >= len(list(good.glob("train-*"))) - 2

    def test_too_many_end_the_build_with_examples(self, root: Path, build: Build) -> None:
        self.spoil(root)
        with pytest.raises(UserError, match=r"9 of \d+ pictures cannot be used, more than max_rejected=0.05") as caught:
            build(source="folder", path=str(root), max_rejected=0.05)
        assert "empty file" in str(caught.value)
        assert "raise max_rejected" in str(caught.value)
        build(source="folder", path=str(root), max_rejected=0.5)  # the same output goes on

    @pytest.mark.parametrize(
        ("counts", "options", "sentence"),
        [
            ({"ant": 5}, {}, "holds 1 class; a classifier needs at least two"),
            ({}, {}, "holds 0 classes"),
            ({"ant": 5, "bee": 0}, {}, "1 of 2 classes have no training picture: 'bee'"),
            ({"ant": 1, "bee": 1}, {}, "No picture of .* is for the split 'test'.*a class with two pictures is needed"),
            (
                {"ant": 9, "bee": 4},
                {"rho": 2, "largest": 8},
                "Class 'bee' has 3 pictures, the long tail asks for 4",
            ),
            ({"ant": 9, "bee": 4}, {"rho": 9}, "class 'bee' would be left without a picture"),
            (
                {"ant": 9, "bee": 4},
                {"noise": 0.5, "noise_kind": "asymmetric", "noise_map": {"ant": "cow"}},
                "no class 'cow'",
            ),
            (
                {"ant": 9, "bee": 4},
                {"noise": 0.5, "noise_kind": "asymmetric", "noise_map": {"ant": 0}},
                "mapped to itself",
            ),
        ],
    )
    def test_collections_that_cannot_work(self, counts, options, sentence: str, tmp_path: Path, build: Build) -> None:
        root = fill(tmp_path / "few", counts)
        root.mkdir(exist_ok=True)
        with pytest.raises(UserError, match=sentence):
            build(source="folder", path=str(root), **options)
        assert not list((tmp_path / "out").glob("*.tar"))

    def test_a_class_of_which_nothing_is_usable(self, tmp_path: Path, build: Build) -> None:
        root = fill(tmp_path / "few", {"ant": 9, "bee": 2})
        for file in (root / "bee").iterdir():
            file.write_bytes(b"no picture")
        with pytest.raises(UserError, match="Class 'bee' has no usable training picture left"):
            build(source="folder", path=str(root), max_rejected=0.5)

    def test_a_folder_that_is_not_there(self, tmp_path: Path, build: Build) -> None:
        with pytest.raises(UserError, match=r"There is no folder .*nowhere"):
            build(source="folder", path=str(tmp_path / "nowhere"))

    def test_a_test_class_that_training_lacks(self, root: Path, tmp_path: Path, build: Build) -> None:
        other = fill(tmp_path / "val", {"cow": 2})
        with pytest.raises(UserError, match=r"holds the class 'cow', which .* does not have"):
            build(source="folder", path=str(root), validation_path=str(other))

    def test_a_validation_folder_without_classes(self, root: Path, tmp_path: Path, build: Build) -> None:
        fill(tmp_path / "val", {"ant": 0})
        for place in (tmp_path / "val", root / "ant"):
            with pytest.raises(UserError, match=rf"{place} holds no picture of a class.*one folder for each"):
                build(source="folder", path=str(root), validation_path=str(place))

    def test_resized_shards(self, root: Path, build: Build) -> None:
        train = open_split(build(source="folder", path=str(root), resize=8))
        for index in range(len(train)):
            assert Image.open(io.BytesIO(train.read(index))).size == (12, 8)


def jpeg(size: tuple[int, int] = (64, 48)) -> bytes:
    y, x = np.mgrid[0 : size[1], 0 : size[0]]
    return encode(Image.fromarray(np.stack([x * 3, y * 4, x + y], -1).astype(np.uint8)), "jpeg")


def segment(data: bytes, kind: int) -> int:
    """Where a segment of this kind begins."""
    place = 2
    while data[place + 1] != kind:
        place += 2 + (data[place + 2] << 8) + data[place + 3]
    return place


def test_half_a_jpeg_with_an_end_is_still_half() -> None:
    data = jpeg()
    cut = data[: segment(data, 0xDA) + (len(data) - segment(data, 0xDA)) // 2] + b"\xff\xd9"
    for rules in ({"decode_check": True}, {"resize": 16}):
        with pytest.raises(Rejected, match="truncated"):
            check_and_convert(cut, Rules.of(BuildConfig(**rules)))


@pytest.mark.parametrize("place", [0, 4, 10])  # the byte order, where the entries are, the kind of the first
def test_a_corrupt_exif_is_no_exif(place: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = bytearray(encode(Image.open(io.BytesIO(jpeg())), "jpeg", exif=exif))
    start = bytes(data).index(b"Exif\0\0") + 6 + place
    data[start : start + 4] = b"\xff\xff\xff\xff"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning for each of them would bury the progress bar
        assert check_and_convert(bytes(data), UNTOUCHED) == (bytes(data), "jpg")


def test_twelve_bits_and_hidden_exif_go_the_careful_way() -> None:
    """Both look like plain JPEG to a hasty reader."""
    data = bytearray(jpeg())
    data[segment(bytes(data), 0xC0) + 4] = 12
    with pytest.raises(Rejected, match="not a JPEG"):
        check_and_convert(bytes(data), Rules.of(BuildConfig()))
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(io.BytesIO(jpeg())).save(turned, "jpeg", exif=exif)
    whole = turned.getvalue()
    place = segment(whole, 0xE1)
    end = place + 2 + (whole[place + 2] << 8) + whole[place + 3]
    app, rest = whole[place:end], whole[:place] + whole[end:]
    tables = segment(rest, 0xDB)
    after = tables + 2 + (rest[tables + 2] << 8) + rest[tables + 3]
    for hidden in (rest[:after] + app + rest[after:], whole[:place] + b"\xff" + whole[place:]):
        stored, _ = check_and_convert(hidden, Rules.of(BuildConfig()))
        assert Image.open(io.BytesIO(stored)).size == (48, 64)


def test_a_sampling_the_fast_decoder_does_not_know() -> None:
    """4:4:1 comes from turning 4:1:1 pictures; it must not end the build."""
    data = bytearray(jpeg())
    frame = segment(bytes(data), 0xC0)
    data[frame + 11] = 0x14  # the first component's sampling
    with pytest.raises(KeyError):
        simplejpeg.decode_jpeg_header(bytes(data))
    assert check_and_convert(bytes(data), Rules.of(BuildConfig())) == (bytes(data), "jpg")


@pytest.mark.parametrize(("built_with", "limit"), [(100, 100), (80_000_000, 80_000_000), (10**15, 100_000_000)])
def test_shards_are_read_up_to_the_limit_they_were_built_with_but_never_without_one(
    built_with: int, limit: int, build: Build
) -> None:
    assert open_split(build(max_pixels=built_with)).max_pixels == limit
