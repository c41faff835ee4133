"""Shards of version 0.1, whose JSON and FFCV files call the labels `label` and `true_label`, stay usable."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from shards_help import Build, fill

from shards import build as building
from shards import builder, inspect, verify
from shards import write as writing
from shards.reader import open_split, read_manifest

GOLDEN = Path(__file__).parents[1] / "golden" / "shards_0.1"
OPTIONS = ["source=list", "path=list.csv", "output=shards"]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "shards"))


def problems_of(shards: Path) -> list[str]:
    problems: list[str] = []
    verify.verify(verify.VerifyConfig(url=str(shards), decode=True), problems.append)
    return problems


def test_they_are_in_the_old_spelling() -> None:
    with tarfile.open(GOLDEN / "train-000000.tar") as tar:
        about = json.load(tar.extractfile("00000000.json"))
    assert {"label", "true_label"} <= set(about)
    assert not {"given", "true"} & set(about)


def test_they_are_read_shown_and_verified(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    split = open_split(str(old))
    labels = dict(zip(split.keys(), zip(split.given.tolist(), split.true.tolist())))
    assert labels == {f"pictures/{n}.png": pair for n, pair in enumerate([(0, 0), (1, 0), (0, -1), (1, 1)])}
    assert split.read(0)[:4] == b"\x89PNG"
    inspect.show(str(old), split, Console())
    assert "4 train, 2 test samples" in capsys.readouterr().out
    assert problems_of(old) == []


def test_a_changed_label_in_the_old_spelling_is_found(old: Path) -> None:
    tar = old / "train-000000.tar"
    tar.write_bytes(tar.read_bytes().replace(b'"label": 1', b'"label": 0', 1))
    assert any("its JSON does not say what the table says" in problem for problem in problems_of(old))


@pytest.mark.parametrize("record", [True, False], ids=["where they were built", "a copy of the shards alone"])
def test_the_command_that_built_them_finds_them_finished(old: Path, record: bool) -> None:
    before = read_manifest(str(old)).hash
    if not record:
        (old / "build.json").unlink()
    assert building.main(OPTIONS) == 0
    assert read_manifest(str(old)).hash == before


def test_shards_that_an_unfinished_build_wrote_in_the_old_spelling_are_written_again(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"source": "folder", "path": str(fill(tmp_path / "in", {"ant": 5, "bee": 4}))}

    def old_json(*arguments: Any) -> bytes:
        return new_json(*arguments).replace(b'"given"', b'"label"').replace(b'"true"', b'"true_label"')

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    new_json = writing._sample_json
    with monkeypatch.context() as patch:
        patch.setattr(writing, "_sample_json", old_json)
        patch.setattr(builder, "JSON_FIELDS", ("index", "label", "class", "true_label", "flipped", "key"))
        patch.setattr(builder.Build, "_finish", stop)
        with pytest.raises(KeyboardInterrupt):
            build(**options)
    assert b'"label"' in (tmp_path / "out" / "train-000000.tar").read_bytes()
    assert list((tmp_path / "out" / ".build").glob("*.part"))
    url = Path(build(**options))
    for file in url.glob("*.tar"):
        with tarfile.open(file) as tar:
            for member in tar.getmembers():
                if member.name.endswith(".json"):
                    assert tuple(json.load(tar.extractfile(member))) == writing.JSON_FIELDS
    assert problems_of(url) == []
