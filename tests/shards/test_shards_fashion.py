"""Fashion-MNIST from IDX files: read within bounds, whatever the files say, and never another set of the same names."""

from __future__ import annotations

import gzip
import hashlib
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from shards_help import Build, pixels

from shards.base.errors import UserError
from shards.reader import open_split
from shards.sources import fashion_mnist
from shards.sources.idx import NotIdx, read_idx


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def write(folder: Path, monkeypatch: pytest.MonkeyPatch, packed: bool = False) -> dict[str, np.ndarray]:
    """A small set in the published layout, made known as the real one."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    out = {}
    for split, begin, count in (("train", "train", 40), ("test", "t10k", 20)):
        pictures, labels = rng.integers(0, 256, (count, 28, 28), np.uint8), np.arange(count, dtype=np.uint8) % 10
        for name, array in ((f"{begin}-images-idx3-ubyte", pictures), (f"{begin}-labels-idx1-ubyte", labels)):
            data = idx(array)
            (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(data) if packed else data)
        digest = hashlib.sha256(pictures.tobytes() + labels.tobytes()).hexdigest()
        monkeypatch.setitem(fashion_mnist.SHA256, split, digest)
        out[split] = pictures
    return out


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("below", ["", "FashionMNIST/raw"], ids=["as published", "torchvision's folder"])
def test_pictures_and_labels_are_those_of_the_files(
    tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch, packed: bool, below: str
) -> None:
    kept = write(tmp_path / "in" / below, monkeypatch, packed)
    url = build(source="fashion_mnist", path=str(tmp_path / "in"), rho=1, noise=0)
    for split, pictures in kept.items():
        opened = open_split(url, split)
        assert len(opened) == len(pictures)
        assert opened.classes[9] == "Ankle boot"
        for index, key in enumerate(opened.keys()):
            number = int(key.split("-")[1])
            assert (pixels(opened.read(index)) == pictures[number][:, :, None]).all()
            assert opened.given[index] == number % 10


def test_files_in_an_unnamed_place_are_found(tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder is `tmp_path`."""
    write(tmp_path / "data/raw", monkeypatch)
    assert len(open_split(build(source="fashion_mnist", rho=1, noise=0, largest=0))) == 40


def test_a_bias_a_validation_part_and_published_labels_work_as_for_other_sources(
    tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "in", monkeypatch)
    options = {"source": "fashion_mnist", "path": str(tmp_path / "in")}
    url = build(**options, rho=2, noise=0.5, validation=0.5)
    assert np.bincount(open_split(url, "validation").given).tolist() == [2] * 10
    assert open_split(url).clean_counts.tolist() == [2, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    (tmp_path / "noisy.csv").write_text("given\n" + "Bag\n" * 10 + "".join(f"{n % 10}\n" for n in range(30)))
    noisy = open_split(build("noisy", **options, labels=str(tmp_path / "noisy.csv"), rho=1))
    assert (noisy.given != noisy.true).sum() == 9


def test_a_set_of_the_same_names_is_not_taken_for_it(
    tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "in", monkeypatch)
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"not those of Fashion-MNIST \(sha256 differs\)\. MNIST, for example"):
        build(source="fashion_mnist", path=str(tmp_path / "in"))


def test_a_missing_set_is_answered_with_how_to_get_it(
    tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fashion_mnist, "PLACES", ("data/raw", "/nowhere"))
    with pytest.raises(UserError) as caught:
        build(source="fashion_mnist")
    assert "is not in data/raw or /nowhere" in str(caught.value)
    assert "apt-get install dataset-fashion-mnist" in str(caught.value)
    with pytest.raises(UserError, match=r"FashionMNIST\('/here', download=True\)"):
        build(source="fashion_mnist", path="/here")
    write(tmp_path / "in", monkeypatch)
    (tmp_path / "in/t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(UserError, match=r"has no file t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte\.gz"):
        build(source="fashion_mnist", path=str(tmp_path / "in"))


GOOD = idx(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))


def test_an_idx_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(GOOD)
    assert (read_idx(tmp_path / "a", 3, 24) == np.arange(24).reshape(2, 3, 4)).all()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "does not begin like an IDX file of bytes in 3 dimensions"),
        (GOOD[:9], "does not begin"),
        (b"\x1f\x8b" + GOOD, "does not begin"),
        (bytes([0, 0, 8, 1]) + GOOD[4:], "does not begin"),  # labels in the place of pictures
        (bytes([0, 0, 13, 3]) + GOOD[4:], "does not begin"),  # floats
        (GOOD[:-1], "says it has 2 x 3 x 4 items, but holds 23"),
        (GOOD + b"x", "larger than the 24 items"),
        (GOOD[:4] + bytes([0, 0, 0, 1]) + GOOD[8:], "says it has 1 x 3 x 4 items, but holds 24"),
        (GOOD[:4] + b"\xff" * 12 + GOOD[16:], "larger than the 24 items"),
        (GOOD[:4] + b"\0" * 12 + GOOD[16:], "says it has 0 x 0 x 0 items, but holds 24"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_a_damaged_or_hostile_file_is_refused_with_the_reason(
    tmp_path: Path, data: bytes, reason: str, packed: bool
) -> None:
    file = tmp_path / ("a.gz" if packed else "a")
    file.write_bytes(gzip.compress(data) if packed else data)
    with pytest.raises(NotIdx, match=reason):
        read_idx(file, 3, 24)


@pytest.mark.parametrize("damage", [lambda d: d[:-6], lambda d: d[:40], lambda d: b"xx" + d[2:], lambda d: d[:20] + b"\xff" * 20 + d[40:]])  # fmt: skip
def test_a_damaged_package_is_refused(tmp_path: Path, damage: object) -> None:
    packed = gzip.compress(idx(np.random.default_rng(0).integers(0, 256, (9, 9, 9), np.uint8)))
    (tmp_path / "a.gz").write_bytes(damage(packed))  # type: ignore[operator]
    with pytest.raises(NotIdx, match="cannot be unpacked"):
        read_idx(tmp_path / "a.gz", 3, 10_000)


def test_a_package_that_unpacks_to_much_more_is_not_unpacked(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(GOOD + bytes(200_000_000), 1))
    tracemalloc.start()
    try:
        with pytest.raises(NotIdx, match="larger than the 24 items"):
            read_idx(tmp_path / "a.gz", 3, 24)
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


def test_files_that_do_not_fit_each_other_are_refused(
    tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, monkeypatch)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(39)))
    with pytest.raises(UserError, match="the train files hold 40 x 28 x 28 pictures and 39 labels"):
        build(source="fashion_mnist", path=str(tmp_path))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(b"<html>not found</html>")
    with pytest.raises(
        UserError, match=r"train-labels-idx1-ubyte is not the file it should be: it does not begin like"
    ):
        build(source="fashion_mnist", path=str(tmp_path))


@pytest.mark.slow
def test_the_real_set_where_debian_keeps_it() -> None:
    if not Path(fashion_mnist.PLACES[1]).is_dir():
        pytest.skip("Debian's package dataset-fashion-mnist is not installed")
    loaded = fashion_mnist.load(fashion_mnist.PLACES[1])
    assert {split: np.bincount(labels).tolist() for split, (_, labels) in loaded.items()} == {
        "train": [6000] * 10,
        "test": [1000] * 10,
    }
    assert Image.fromarray(loaded["train"][0][0]).mode == "L"
