"""The audit of pictures: columns, issues and what is dropped."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from pipeline.reports.audit.pictures import audit_pictures, columns, drop_duplicates, drop_leaks, faulty, picture_issues
from shards.build import ensure
from shards.config import BuildConfig
from shards.faults import FAULTS
from shards.findings import PictureFindings
from shards.reader import Split, open_split


def jpeg(image: Image.Image, quality: int = 92) -> bytes:
    out = io.BytesIO()
    image.save(out, "jpeg", quality=quality)
    return out.getvalue()


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> tuple[PictureFindings, dict[str, Split], int]:
    """50 test pictures, 40 of which are in train, half of them recompressed; in train a pair and a pair with two labels."""
    folder: Path = tmp_path_factory.mktemp("pictures")
    whole = [Image.fromarray(image) for image in load_sample_images().images]
    cut = [p.crop((x, y, x + 96, y + 96)) for p in whole for y in range(0, 331, 66) for x in range(0, 540, 60)]
    tiles = [tile for tile in cut if np.asarray(tile.convert("L")).std() > 25]
    files = {f"test/{'ab'[k % 2]}/{k:02d}.jpg": jpeg(tiles[k]) for k in range(50)}
    files |= {f"in/{'ab'[k % 2]}/{k:02d}.jpg": jpeg(tiles[k], 92 if k % 2 else 60) for k in range(40)}
    files |= {"in/a/pair1.jpg": jpeg(tiles[50].resize((72, 72))), "in/a/pair2.jpg": jpeg(tiles[50])}
    files |= {"in/a/two.jpg": jpeg(tiles[52]), "in/b/two.jpg": jpeg(tiles[52])}
    files["in/b/blank.jpg"] = jpeg(Image.new("RGB", (96, 96), "white"))
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    config = BuildConfig.model_validate(
        {
            "source": "folder",
            "path": str(folder / "in"),
            "validation_path": str(folder / "test"),
            "output": str(folder / "out"),
        }
    )
    url = ensure(config, lambda text: None)
    splits = {name: open_split(url, name) for name in ("train", "test")}
    steps: list[int] = []
    return audit_pictures(splits, steps.append), splits, sum(steps)


Audited = tuple[PictureFindings, dict[str, Split], int]


def test_all_forty_leaks_are_found_and_dropped(audited: Audited) -> None:
    findings, splits, seen = audited
    assert seen == len(splits["train"]) + len(splits["test"])
    leaked = {key for key, keep in zip(splits["train"].keys(), drop_leaks(findings)) if not keep}
    assert leaked == {f"{'ab'[k % 2]}/{k:02d}.jpg" for k in range(40)}
    test = {issue.id: issue for issue in picture_issues(findings, splits, "test")}
    assert {splits["test"].keys([int(k)])[0] for k in test["leaks"].samples} == leaked


def test_a_row_for_every_sample_in_every_column(audited: Audited) -> None:
    findings, splits, _ = audited
    for name, split in splits.items():
        table = columns(findings, name)
        assert {len(values) for values in table.values()} == {len(split)}
        assert set(FAULTS) <= set(table)
        assert table["bytes"].tolist() == [len(split.read(k)) for k in range(len(split))]


def test_one_of_a_pair_is_kept_and_of_two_labels_the_one_that_is_surely_right(audited: Audited) -> None:
    findings, splits, _ = audited
    keys = splits["train"].keys()
    right = np.full(len(keys), 0.6)

    def dropped() -> set[str]:
        return {key for key, keep in zip(keys, drop_duplicates(findings, right, 0.9)) if not keep}

    assert dropped() == {"a/pair1.jpg", "a/two.jpg", "b/two.jpg"}
    right[keys.index("b/two.jpg")] = 0.95  # the label that is surely right
    assert dropped() == {"a/pair1.jpg", "a/two.jpg"}


def test_issues_name_their_samples_and_groups(audited: Audited) -> None:
    findings, splits, _ = audited
    found = {issue.id: issue for issue in picture_issues(findings, splits)}
    assert list(found) == ["conflicts", "duplicates", "leaks", "blank"]
    names = [splits["train"].keys(group) for group in found["duplicates"].groups]
    assert sorted(names) in ([["a/pair2.jpg", "a/pair1.jpg"], [x, y]] for x, y in (("a/two.jpg", "b/two.jpg"), ("b/two.jpg", "a/two.jpg")))  # fmt: skip
    assert [len(group) for group in found["conflicts"].groups] == [2]
    assert "Also in test: a/00.jpg." in found["leaks"].notes
    for issue in found.values():
        assert len(issue.notes) == len(issue.samples) == len(issue.scores)
    assert splits["train"].keys(found["blank"].samples) == ["b/blank.jpg"]
    assert np.flatnonzero(faulty(findings)).tolist() == found["blank"].samples.tolist()
    assert not faulty(findings, faults=("grey", "dark")).any()
