"""FFCV files carry the same samples as the tars, and the real package reads them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from shards_help import Build, fill, picture, pixels

from shards import beton
from shards.base.errors import UserError
from shards.reader import open_split

needs_ffcv = pytest.mark.skipif(importlib.util.find_spec("ffcv") is None, reason="ffcv is not installed")


@needs_ffcv
@pytest.mark.timeout(240)
def test_the_real_ffcv_reads_the_same_labels_and_pixels(tmp_path: Path, build: Build) -> None:
    import simplejpeg
    from ffcv.fields import JSONField
    from ffcv.loader import Loader, OrderOption

    root = fill(tmp_path / "in", {"ant": 20, "bee": 14})
    for number in range(6):
        (root / "bee" / f"p{number}.png").write_bytes(picture(500 + number, kind="png"))
    url = build(source="folder", path=str(root), noise=0.3, format="both", shard_samples=9)
    train = open_split(url)
    assert train.info.beton is not None
    loader = Loader(train.beton, batch_size=8, num_workers=1, order=OrderOption.SEQUENTIAL, drop_last=False)
    assert tuple(loader.reader.field_names) == beton.FIELDS
    stored, where = Path(train.beton).read_bytes(), loader.reader.metadata["f0"]["data_ptr"]
    index = 0
    for image, label, true, place, flipped, key in loader:
        for row in range(len(label)):
            assert int(place[row]) == index
            assert int(label[row]) == train.given[index]
            assert int(true[row]) == train.true[index]
            assert bool(flipped[row]) == bool(train.flipped[index])
            assert JSONField.unpack(key[row]) == train.keys([index])[0]
            data = bytes(train.read(index))
            if data[:2] == b"\xff\xd8":
                start = int(where[index])
                assert stored[start : start + len(data)] == data
                # FFCV asks its decoder for speed, which moves a value by a few.
                assert np.abs(np.asarray(image[row]).astype(int) - simplejpeg.decode_jpeg(data)).max() <= 8
            else:
                assert np.array_equal(np.asarray(image[row]), pixels(data))
            index += 1
    assert index == len(train)


@needs_ffcv
@pytest.mark.slow
def test_same_options_same_bytes_and_only_ffcv_files_if_so_asked(tmp_path: Path, build: Build) -> None:
    options = {"source": "folder", "path": str(fill(tmp_path / "in", {"ant": 6, "bee": 5}))}
    both, only = Path(build("both", **options, format="both")), Path(build("only", **options, format="beton"))
    for name in ("train.beton", "test.beton"):
        assert (both / name).read_bytes() == (only / name).read_bytes()
    assert not list(only.glob("*.tar"))
    split = open_split(str(only))
    assert len(split) == 9
    with pytest.raises(UserError, match="FFCV files only; build with format=tar"):
        split.read(0)


def test_without_the_package_it_says_what_to_install(
    tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beton.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"libopencv-dev libturbojpeg0-dev pkg-config.*evenhand\[ffcv\]"):
        build(format="beton")
    assert not (tmp_path / "out").exists()


@needs_ffcv
def test_a_writer_that_dies_ends_the_build(tmp_path: Path, build: Build) -> None:
    from shards.base import storage
    from shards.reader import read_manifest

    url = build(source="folder", path=str(fill(tmp_path / "in", {"ant": 6, "bee": 5})))
    about = read_manifest(url)
    info = about.splits["test"]
    wrong = about.model_copy(update={"splits": {"test": info.model_copy(update={"samples": info.samples + 1})}})
    with pytest.raises(UserError, match="Writing FFCV files failed"):
        beton.add_betons(storage.store_at(url), wrong, False, lambda _: None)
    assert not list(Path(url).rglob("*.tmp"))
