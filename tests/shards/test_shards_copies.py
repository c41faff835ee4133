"""Copies, leaks and faults of pictures, with real photographs."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter
from shards_help import Build, contents
from sklearn.datasets import load_sample_images

from shards import duplicates, inspect
from shards.duplicates import equal_to, groups_of, hashes, near_pairs
from shards.findings import PictureFindings, find_in_pictures
from shards.reader import open_split

Photo = Image.Image


def jpeg(image: Photo, quality: int = 92) -> bytes:
    out = io.BytesIO()
    image.save(out, "jpeg", quality=quality)
    return out.getvalue()


@pytest.fixture(scope="module")
def tiles() -> list[Photo]:
    """Sixty different parts of two photographs, 96 x 96."""
    whole = [Image.fromarray(image) for image in load_sample_images().images]
    corners = [(x, y) for y in range(0, 331, 66) for x in range(0, 540, 60)]
    cut = [photo.crop((x, y, x + 96, y + 96)) for photo in whole for x, y in corners]
    return [tile for tile in cut if np.asarray(tile.convert("L")).std() > 25][:60]


@pytest.fixture(scope="module")
def photos() -> list[Photo]:
    return [Image.fromarray(image) for image in load_sample_images().images]


def store(folder: Path, pictures: dict[str, bytes]) -> None:
    for name, data in pictures.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def found(url: str) -> tuple[PictureFindings, dict[str, dict[str, int]]]:
    """Findings, and the index of every picture by its name."""
    splits = {name: open_split(url, name) for name in ("train", "test")}
    where = {name: {key: index for index, key in enumerate(split.keys())} for name, split in splits.items()}
    return find_in_pictures(splits), where


CHANGES = {
    "recompressed": lambda image: Image.open(io.BytesIO(jpeg(image, 45))),
    "smaller": lambda image: image.resize((image.width * 6 // 10, image.height * 6 // 10), Image.Resampling.BICUBIC),
    "cropped": lambda image: image.crop((image.width // 30, 0, image.width, image.height - image.height // 25)),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.15),
    "darker": lambda image: ImageEnhance.Brightness(image).enhance(0.85),
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
}


def test_changed_copies_are_found_and_nothing_else(build: Build, tmp_path: Path, photos: list[Photo]) -> None:
    pictures = {}
    for label, photo in zip(("china", "flower"), photos):
        pictures[f"in/{label}/original.jpg"] = jpeg(photo)
        for name, change in CHANGES.items():
            pictures[f"in/{label}/{name}.jpg"] = jpeg(change(photo))
        pictures[f"test/{label}/other.jpg"] = jpeg(photo.crop((320, 200, 640, 427)))  # a part is not a copy
    store(tmp_path, pictures)
    findings, where = found(build(source="folder", path=str(tmp_path / "in"), validation_path=str(tmp_path / "test")))
    train = findings.splits["train"]
    for label in ("china", "flower"):
        group = {train.group[where["train"][f"{label}/{name}.jpg"]] for name in ("original", *CHANGES)}
        assert len(group) == 1
        assert min(group) >= 0
    assert findings.groups() == 2
    assert (findings.splits["test"].group == -1).all()
    kept = {name for name, index in where["train"].items() if train.keeper[index]}
    assert len(kept) == 2
    assert not kept & {f"{label}/{name}.jpg" for label in ("china", "flower") for name in ("smaller", "cropped")}
    assert not train.conflict.any()


def test_same_picture_under_two_labels(build: Build, tmp_path: Path, tiles: list[Photo]) -> None:
    pictures = {f"in/{'ab'[k % 2]}/{k:02d}.png": jpeg(tile) for k, tile in enumerate(tiles[:20])}
    plain = io.BytesIO()
    Image.open(io.BytesIO(jpeg(tiles[0]))).save(plain, "png")  # same pixels, other bytes
    store(tmp_path, pictures | {"in/b/copy.png": plain.getvalue()})
    findings, where = found(build(source="folder", path=str(tmp_path / "in")))
    names = {(s, name): (findings.splits[s], index) for s in where for name, index in where[s].items()}
    marked = {name for (_, name), (part, index) in names.items() if part.conflict[index]}
    assert marked == {"a/00.png", "b/copy.png"}
    assert all(part.equal[index] == (name in marked) for (_, name), (part, index) in names.items())


def test_forty_test_pictures_in_train_are_noticed(
    build: Build, tmp_path: Path, tiles: list[Photo], capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = {f"test/{'ab'[k % 2]}/{k:02d}.jpg": jpeg(tile) for k, tile in enumerate(tiles[:50])}
    pictures |= {f"in/{'ab'[k % 2]}/own{k:02d}.jpg": jpeg(tile) for k, tile in enumerate(tiles[50:])}
    clean = tmp_path / "clean"
    store(clean, pictures)
    build(source="folder", path=str(clean / "in"), validation_path=str(clean / "test"), output="clean_out")
    assert not [line for line in build.said if "Warning" in line]  # type: ignore[attr-defined]
    copies = {f"in/{'ab'[k % 2]}/x{k:02d}.jpg": jpeg(tiles[k]) for k in range(40)}
    store(tmp_path, pictures | copies)
    url = build(source="folder", path=str(tmp_path / "in"), validation_path=str(tmp_path / "test"))
    said = [line for line in build.said if "Warning" in line]  # type: ignore[attr-defined]
    assert len(said) == 1
    assert "40 of 50 pictures of 'test' are in train too" in said[0]
    findings, where = found(url)
    for name, index in where["test"].items():
        copy = name.replace("/", "/x")
        assert findings.splits["test"].leak[index] == where["train"].get(copy, -1)
    assert len(findings.leaks["test"]) == 40
    capsys.readouterr()
    inspect.main([url, "sheet="])
    assert "40 pictures of 'test' are in train too" in capsys.readouterr().out
    inspect.main([url, "sheet=", "pictures=false"])
    assert "in train too" not in capsys.readouterr().out


def test_copies_in_train_are_said_by_the_build_and_change_no_byte(
    build: Build, tmp_path: Path, tiles: list[Photo]
) -> None:
    store(tmp_path, {f"in/{'ab'[k % 2]}/{k:02d}.jpg": jpeg(tiles[k // 3]) for k in range(24)})
    store(tmp_path, {f"test/{'ab'[k % 2]}/{k:02d}.jpg": jpeg(tiles[30 + k]) for k in range(4)})
    options = {
        "source": "folder",
        "path": str(tmp_path / "in"),
        "validation_path": str(tmp_path / "test"),
        "shard_samples": 5,
    }
    one = build(output="one", writers=1, **options)
    said = [line for line in build.said if "Warning" in line]  # type: ignore[attr-defined]
    assert len(said) == 1
    assert "16 of 24 training pictures are copies" in said[0]
    assert "have another label" in said[0]
    two = build(output="two", writers=2, **options)
    assert [line for line in build.said if "Warning" in line] == said  # type: ignore[attr-defined]
    assert contents(one) == contents(two)


def test_faults_are_found_and_good_photographs_have_none(build: Build, tmp_path: Path, tiles: list[Photo]) -> None:
    big = [tile.resize((288, 288), Image.Resampling.LANCZOS).filter(ImageFilter.UnsharpMask(3, 200)) for tile in tiles]
    pictures = {f"in/{'ab'[k % 2]}/{k:02d}.jpg": jpeg(tile) for k, tile in enumerate(big[:30])}
    pictures |= {f"test/{'ab'[k % 2]}/t{k}.jpg": jpeg(big[30 + k]) for k in range(4)}
    wide = Image.new("RGB", (4 * 288, 288))
    for k in range(4):
        wide.paste(big[36 + k], (288 * k, 0))
    bad = {
        "tiny": big[40].resize((30, 30)),
        "odd_aspect": wide,
        "blank": Image.new("RGB", (288, 288), (90, 120, 200)),
        "blurred": big[42].filter(ImageFilter.GaussianBlur(8)),
        "grey": big[43].convert("L"),
        "dark": ImageEnhance.Brightness(big[44]).enhance(0.1),
        "bright": Image.eval(big[45], lambda level: 215 + level * 40 // 255),
    }
    pictures |= {f"in/a/{name}.jpg": jpeg(image) for name, image in bad.items()}
    pictures["in/a/broken.jpg"] = jpeg(big[46])[:3000] + b"\xff\xd9"  # whole to the eye of a build
    store(tmp_path, pictures)
    findings, where = found(build(source="folder", path=str(tmp_path / "in"), validation_path=str(tmp_path / "test")))
    train = findings.splits["train"]
    for name in [*bad, "broken"]:
        flagged = {key for key, index in where["train"].items() if train.faults[name][index]}
        assert flagged == {f"a/{name}.jpg"}, name


def test_digits_have_no_faults_for_being_what_they_are(digits: str) -> None:
    findings = find_in_pictures({name: open_split(digits, name) for name in ("train", "test")})
    for part in findings.splits.values():
        assert {name: int(flags.sum()) for name, flags in part.faults.items() if flags.any()} == {}
        assert (part.group == -1).all()


def thumbnails(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rough = rng.integers(0, 256, (count, 8, 8), np.uint8)
    grey = [np.asarray(Image.fromarray(one).resize((32, 32), Image.Resampling.BICUBIC)).ravel() for one in rough]
    return np.concatenate([np.stack(grey), np.full((count, duplicates.THUMBNAIL - 1024), 128, np.uint8)], 1)


def test_search_finds_every_planted_copy_among_many_and_no_other() -> None:
    pictures = thumbnails(3000)
    pictures[2900:] = pictures[:100]
    usable = np.ones(3000, bool)
    usable[2999] = False
    pairs = near_pairs(pictures, usable)
    assert (pairs.first, pairs.second - 2900) == (pytest.approx(np.arange(99)), pytest.approx(np.arange(99)))
    assert pairs.distance.max() < 0.01
    assert not pairs.mirrored.any()


def test_a_mirror_image_has_the_mirrored_hash() -> None:
    pictures = thumbnails(50)
    turned = pictures.copy()
    turned[:, :1024] = pictures[:, :1024].reshape(-1, 32, 32)[:, :, ::-1].reshape(-1, 1024)
    np.testing.assert_array_equal(hashes(turned)[0], hashes(pictures)[0] ^ duplicates._MIRROR)


def test_a_bucket_of_like_hashes_is_searched_in_bounded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pictures share every piece: without a limit there would be N x N comparisons."""
    compared = []
    measure = duplicates.distances
    monkeypatch.setattr(duplicates, "distances", lambda a, b, turned: compared.append(len(a)) or measure(a, b, turned))
    monkeypatch.setattr(duplicates, "MAX_BUCKET", 4)
    near_pairs(np.repeat(thumbnails(1), 400, 0), np.ones(400, bool))
    assert 0 < sum(compared) <= 400 * 4 * 3


def test_equal_and_groups() -> None:
    digest = np.array([7, 5, 7, 5, 9, 7], np.uint64)
    known = np.array([True, True, True, True, True, False])
    assert equal_to(digest, known).tolist() == [0, 1, 0, 1, 4, 5]
    assert groups_of(6, np.array([1, 5]), np.array([3, 0])).tolist() == [0, 1, -1, 1, -1, 0]
