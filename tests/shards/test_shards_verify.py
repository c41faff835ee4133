"""`shards.verify` finds every kind of damage and names it; `shards.inspect` shows what is there."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from shards_help import fill, picture

from shards import inspect, verify
from shards.base.errors import UserError
from shards.build import ensure
from shards.config import BuildConfig, CacheConfig
from shards.reader import open_split


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    root = fill(folder / "in", {"ant": 20, "bee": 20})
    (root / "bee" / "bad.jpg").write_bytes(b"bad")
    tree = {"source": "folder", "path": str(root), "output": str(folder / "out"), "noise": 0.25}
    ensure(BuildConfig.model_validate(tree | {"shard_samples": 10, "max_rejected": 0.1}), lambda _: None)
    return folder / "out"


@pytest.fixture
def shards(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "shards"))


def problems(shards: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    code = verify.main([str(shards), *options])
    lines = capsys.readouterr().out.splitlines()
    assert code == (1 if len(lines) > 1 else 0)
    return lines[:-1]


def change(file: Path, place: int, value: bytes) -> None:
    data = bytearray(file.read_bytes())
    data[place : place + len(value)] = value
    file.write_bytes(data)


def trust(shards: Path, name: str) -> None:
    """Make the manifest agree with a changed file, as a clever forger would."""
    tree = json.loads((shards / "manifest.json").read_text())
    data = (shards / name).read_bytes()
    for info in tree["splits"].values():
        for file in [info["table"], *info["shards"]]:
            if file["name"] == name:
                file.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    (shards / "manifest.json").write_text(json.dumps(tree))


def test_whole_shards_are_well(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert problems(shards, capsys) == []
    assert problems(shards, capsys, "decode=true") == []


@pytest.mark.parametrize("name", ["train-000001.tar", "train.parquet", "rejected.parquet"])
def test_a_missing_file(shards: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (shards / name).unlink()
    assert f"{name}: is missing" in problems(shards, capsys)


def test_a_file_nobody_listed(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shards / "extra.tar").write_bytes(b"")
    assert problems(shards, capsys) == ["extra.tar: is not listed in the manifest"]


@pytest.mark.parametrize("where", ["at a member", "in a header", "in the data"])
def test_a_cut_tar(shards: Path, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    offset = int(open_split(str(shards))._offset[3])
    length = {"at a member": offset - 512, "in a header": offset - 100, "in the data": offset + 7}[where]
    file = shards / "train-000000.tar"
    file.write_bytes(file.read_bytes()[:length])
    found = problems(shards, capsys)
    assert any(line.startswith(f"train-000000.tar: has {length} bytes instead of") for line in found)
    assert any(line.startswith("train-000000.tar: sample 3 ") for line in found)


def test_a_broken_header_checksum_and_a_changed_json_are_named(shards: Path, capsys) -> None:
    split = open_split(str(shards))
    change(shards / "train-000000.tar", int(split._offset[4]) - 512 + 148, b"7")
    body = (shards / "train-000001.tar").read_bytes().index(b'"given": ')
    change(shards / "train-000001.tar", body + 9, b"7")
    found = problems(shards, capsys)
    key = split.keys([4])[0]
    assert f"train-000000.tar: sample 4 ({key!r}): the tar header of the picture is wrong" in found
    assert any("sample 10 " in line and "its JSON does not say what the table says" in line for line in found)


def test_a_spoiled_picture_is_named_although_the_manifest_was_forged(shards: Path, capsys) -> None:
    split = open_split(str(shards))
    change(shards / "train-000000.tar", int(split._offset[5]), b"no picture at all")
    found = problems(shards, capsys)
    assert found[0] == "train-000000.tar: sha256 is not that of the manifest"
    assert any(line.startswith("train-000000.tar: sample 5 ") and "not a JPEG" in line for line in found)
    trust(shards, "train-000000.tar")
    assert problems(shards, capsys) == []
    found = problems(shards, capsys, "decode=true")
    assert len(found) == 1
    assert "sample 5 " in found[0]


def test_a_table_that_contradicts_the_manifest(shards: Path, capsys) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.parquet.read_table(shards / "train.parquet")
    given = table["given"].to_numpy().copy()
    given[0] = 1 - given[0]
    pa.parquet.write_table(table.set_column(5, "given", pa.array(given)), shards / "train.parquet")
    trust(shards, "train.parquet")
    found = problems(shards, capsys)
    assert "train.parquet: class counts are not those of the manifest" in found
    assert any("sample 0 " in line and "its JSON does not say" in line for line in found)


def test_no_shards_no_url(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no finished shards at .* \(no manifest.json\)"):
        verify.main([str(tmp_path)])
    with pytest.raises(UserError, match="URL is missing"):
        verify.main([])
    with pytest.raises(UserError, match="no setting 'decod'"):
        verify.main([str(tmp_path), "decod=true"])


def test_the_card_tells_classes_counts_noise_and_sizes(shards: Path, tmp_path: Path, capsys) -> None:
    sheet = tmp_path / "sheet.png"
    assert inspect.main([str(shards), f"sheet={sheet}"]) == 0
    text = capsys.readouterr().out
    for word in ("36 train, 4 test", "2 classes", "prior noise 0.25: 9 labels changed (25.0%)", "ant", "bee"):
        assert word in text
    assert "rejected: 1 (1 not a JPEG, PNG or WebP picture)" in text


def test_long_names_give_way_to_numbers_on_a_narrow_terminal(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    root = fill(
        tmp_path / "in", {f"{n} a class with a very long name of many words that go on and on": 9 for n in "ab"}
    )
    url = ensure(BuildConfig(source="folder", path=str(root), output=str(tmp_path / "out")), lambda _: None)
    assert inspect.main([url, "sheet="]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if " a class" in line]
    assert [row[0] for row in rows] == ["a", "b"]
    assert all(row[-6:-2] == ["8", "8", "8", "?"] and row[-1] == "1" for row in rows), rows


def test_the_contact_sheet_is_in_the_current_folder_and_said_to_be(shards: Path, tmp_path: Path, capsys) -> None:
    assert inspect.main([str(shards)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"Contact sheet: {tmp_path / 'contact_sheet.png'}"
    assert Image.open(tmp_path / "contact_sheet.png").size[0] > 1000


def test_the_contact_sheet_shows_pictures_with_right_and_wrong_frames(shards: Path) -> None:
    split = open_split(str(shards))
    sheet = np.asarray(inspect.contact_sheet(split, rows=2, columns=5, seed=0))
    assert sheet.shape[1] == inspect.LEFT + 5 * (inspect.TILE + inspect.GAP) + inspect.GAP
    for colour in (inspect.RIGHT, inspect.WRONG):
        assert (sheet == colour).all(-1).sum() > 4 * inspect.TILE
    assert len(np.unique(sheet.reshape(-1, 3), axis=0)) > 500  # pictures, not an empty form


def test_the_sheet_of_many_classes_goes_from_large_to_small() -> None:
    counts = np.arange(100, 0, -1)
    assert inspect._spread(counts, 200) == list(range(100))
    assert inspect._spread(counts, 3) == [0, 50, 99]


def test_tiles_are_square_and_keep_small_pixels(tmp_path: Path) -> None:
    assert inspect._tile(picture(1, (400, 100))).size == (inspect.TILE, inspect.TILE)
    assert Image.MAX_IMAGE_PIXELS  # the guard of Pillow is on


def test_every_damaged_sample_is_named(whole: Path, tmp_path: Path) -> None:
    """After a wrong header the next sample is where the table says."""
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    split = open_split(str(copy), verify=False)
    tar = copy / split.info.shards[0].name
    data = bytearray(tar.read_bytes())
    offsets = split._load_table()["offset"]
    for row in (1, 3):
        data[int(offsets[row]) - 512] ^= 1
    tar.write_bytes(data)
    said: list[str] = []
    verify.verify(verify.VerifyConfig(url=str(copy)), said.append)
    assert [text.split()[2] for text in said if "tar header" in text] == ["1", "3"]


def test_an_emptied_tar_is_told(whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    name = open_split(str(copy)).info.shards[0].name
    (copy / name).write_bytes(b"")
    said: list[str] = []
    verify.verify(verify.VerifyConfig(url=str(copy)), said.append)
    assert any(text.startswith(f"{name}: has 0 bytes") for text in said)


def test_the_store_is_judged_and_not_an_earlier_copy(whole: Path, tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(whole), "/judged", recursive=True)
    cache = CacheConfig(folder=str(tmp_path / "cache"))
    split = open_split("memory://judged", "train", cache)
    split.read(0)
    name = f"/judged/{split.info.shards[0].name}"
    data = bytearray(memory.cat_file(name))
    data[2000] ^= 1
    memory.pipe_file(name, bytes(data))
    said: list[str] = []
    assert verify.verify(verify.VerifyConfig(url="memory://judged", cache=cache), said.append) > 0


def test_a_folder_may_be_called_like_a_number(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(whole, tmp_path / "20240501")
    monkeypatch.chdir(tmp_path)
    assert verify.main(["20240501"]) == 0
