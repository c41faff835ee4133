"""From the embedded default to finished shards and back."""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from shards_help import fill

from shards import build as building
from shards import mapped
from shards.base.errors import UserError
from shards.build import ensure
from shards.config import BuildConfig
from shards.reader import open_split


def quiet(text: str) -> None:
    pass


def make(output: Path | str, **options: object) -> str:
    return ensure(BuildConfig.model_validate({"output": str(output), **options}), quiet)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.name != "build.json"}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "shards"
    make(folder, shard_samples=100)
    return folder


def test_the_embedded_default(digits: Path) -> None:
    train, test = open_split(str(digits)), open_split(str(digits), "test")
    assert train.clean_counts.tolist() == [139, 107, 83, 64, 49, 38, 29, 23, 17, 13]
    assert len(train) == 562
    assert (train.given != train.true).sum() == 281
    assert np.array_equal(train.given != train.true, train.flipped)
    assert len(test) == 359
    assert np.array_equal(test.given, test.true)
    assert train.shard_sizes == [100, 100, 100, 100, 100, 62]
    assert train.classes == [str(k) for k in range(10)]
    assert train.manifest.hash == hashlib.sha256((digits / "manifest.json").read_bytes()).hexdigest()


def test_pictures_are_the_digits_without_loss(digits: Path) -> None:
    from sklearn.datasets import load_digits

    data = load_digits()
    for name in ("train", "test"):
        split = open_split(str(digits), name)
        for index, key in enumerate(split.keys()):
            stored = np.asarray(Image.open(io.BytesIO(split.read(index))))
            assert np.array_equal(stored, np.rint(data.images[int(key)] * 255 / 16))
            assert split.true[index] == data.target[int(key)]
    both = open_split(str(digits)).keys() + open_split(str(digits), "test").keys()
    assert len(set(both)) == len(both)


def test_classes_are_mixed_in_every_shard(digits: Path) -> None:
    train = open_split(str(digits))
    for start in range(0, len(train), 100):
        assert len(set(train.true[start : start + 100])) >= 8


def test_the_manifest_tells_what_was_injected(digits: Path) -> None:
    train = open_split(str(digits))
    about = train.manifest.bias
    assert (about.rho, about.noise, about.noise_kind, about.seed) == (10, 0.5, "prior", 0)
    assert about.realised_noise == 0.5
    assert about.realised_rho == pytest.approx(139 / 13, abs=1e-6)
    matrix = np.array(about.transition)
    assert np.array_equal(matrix.sum(1), train.clean_counts)
    assert np.array_equal(matrix.sum(0), np.bincount(train.given, minlength=10))
    assert train.manifest.groups == {"many": [0, 1], "medium": [2, 3, 4, 5, 6, 7], "few": [8, 9]}


def test_tars_are_read_by_the_real_webdataset(digits: Path) -> None:
    import webdataset

    train = open_split(str(digits))
    names = [str(digits / shard.name) for shard in train.info.shards]
    seen = 0
    for sample in webdataset.WebDataset(names, shardshuffle=False):
        about = json.loads(sample["json"])
        index = about["index"]
        assert index == seen == int(sample["__key__"])
        assert sample["png"] == bytes(train.read(index))
        assert about["given"] == train.given[index]
        assert about["true"] == train.true[index]
        assert about["flipped"] == bool(train.given[index] != train.true[index])
        assert about["class"] == train.classes[train.given[index]]
        assert [about["key"]] == train.keys([index])
        seen += 1
    assert seen == len(train)


def test_tars_are_plain_and_in_order(digits: Path) -> None:
    with tarfile.open(digits / "train-000001.tar", "r:") as tar:
        names = tar.getnames()
    assert names[:3] == ["00000100.png", "00000100.json", "00000101.png"]
    assert len(names) == 200


def test_same_options_same_bytes(digits: Path, tmp_path: Path) -> None:
    make(tmp_path / "again", shard_samples=100)
    assert contents(tmp_path / "again") == contents(digits)


def test_another_bias_seed_draws_another_bias_and_leaves_the_test_split(digits: Path, tmp_path: Path) -> None:
    make(tmp_path / "other", shard_samples=100, bias_seed=1)
    old, new = open_split(str(digits)), open_split(str(tmp_path / "other"))
    assert np.array_equal(old.clean_counts, new.clean_counts)
    assert set(old.keys()) != set(new.keys())
    old, new = open_split(str(digits), "test"), open_split(str(tmp_path / "other"), "test")
    assert set(old.keys()) == set(new.keys())


def test_nothing_is_built_twice(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "collect", lambda *_: pytest.fail("looked at the source again"))
    before = (digits / "manifest.json").stat().st_mtime_ns
    assert make(digits, shard_samples=100) == str(digits)
    assert (digits / "manifest.json").stat().st_mtime_ns == before


def test_other_options_do_not_overwrite_finished_shards(digits: Path) -> None:
    with pytest.raises(UserError, match=r"built with other options: rho=10\.0 \(now 20\.0\).*another output"):
        make(digits, shard_samples=100, rho=20)


def test_a_copy_without_the_record_of_the_build_is_known_by_its_manifest(tmp_path: Path) -> None:
    root = fill(tmp_path / "in", {"ant": 10, "bee": 10})
    options = {"source": "folder", "path": str(root)}
    make(tmp_path / "out", **options)
    (tmp_path / "out" / "build.json").unlink()
    assert make(tmp_path / "out", **options) == str(tmp_path / "out")
    with pytest.raises(UserError, match=r"built with other options: resize=0 \(now 8\)"):
        make(tmp_path / "out", **options, resize=8)


def test_existing_shards_are_read_by_url_whatever_the_other_options(digits: Path, tmp_path: Path) -> None:
    assert ensure(BuildConfig(url=str(digits)), quiet) == str(digits)
    with pytest.raises(UserError, match=r"no finished shards at .*shards\.build"):
        ensure(BuildConfig(url=str(tmp_path / "nowhere")), quiet)


def test_the_name_of_the_output_follows_the_options() -> None:
    assert BuildConfig().place().startswith("data/digits-rho10-noise0.5-seed0-")
    assert BuildConfig().place() != BuildConfig(quality=80).place()
    assert BuildConfig().place() == BuildConfig(writers=7).place()
    # As in version 0.1: shards built then are found, not built again.
    assert BuildConfig().place() == "data/digits-rho10-noise0.5-seed0-d54bce37"
    assert BuildConfig(label_column="label", true_column="true_label").place() == BuildConfig().place()


def _race(output: str, numbers: multiprocessing.Queue) -> None:
    numbers.put(ensure(BuildConfig(output=output, shard_samples=50), quiet))


def test_two_builders_at_once_leave_one_whole_result(tmp_path: Path) -> None:
    output = str(tmp_path / "raced")
    context = multiprocessing.get_context("spawn")
    numbers = context.Queue()
    both = [context.Process(target=_race, args=(output, numbers)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [numbers.get(timeout=5) for _ in both] == [output, output]
    assert len(open_split(output)) == 562
    assert sorted(os.listdir(tmp_path)) == ["raced"]


def test_biased_collections_are_left_as_they_are_unless_asked() -> None:
    assert BuildConfig(source="folder", path="x").noise == 0
    assert BuildConfig(source="webvision", path="x").rho == 1
    assert BuildConfig(source="folder", path="x", noise=0.2).noise == 0.2
    assert BuildConfig(noise_kind="none").noise == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["rhoo=3"], "There is no setting 'rhoo'. Did you mean 'rho'?"),
        (["rho=0.5"], "rho: input should be greater than or equal to 1"),
        (["noise=1"], "noise: input should be less than 1"),
        (["source=digit"], "source: 'digit' is not one of digits, "),
        (["noise_kind=none", "noise=0.3"], "contradict each other"),
        (["noise_kind=asymmetric"], "needs noise_map"),
        (["source=folder"], "needs path=..."),
        (
            ["source=folder", "path=x", "labels=y.csv"],
            "labels is for source=digits or cifar10 or cifar100 or fashion_mnist; with",
        ),
        (["validation_path=x"], "validation_path is for source=folder or list; with source=digits leave it out."),
        (["imagenet=x"], "imagenet is for source=webvision; with source=digits leave it out."),
        (["rho=1000"], "would be left without a picture"),
        (["largest=500"], "Class '0' has 142 pictures, the long tail asks for 500. Lower `largest`"),
        (["output=pipe:cat"], "neither a folder nor a URL"),
        (["output=ftp://x/y"], "not read from ftp:// URLs"),
        (["output=s3://me:secret@bucket/x"], "s3://***@bucket/x carries a password"),
    ],
)
def test_wrong_options_end_with_a_sentence_and_nothing_written(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        building.main(arguments)
    assert sentence in str(caught.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_command_ends_with_code_2_one_sentence_and_without_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "shards.build", "rhoo=3"]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "error: There is no setting 'rhoo'. Did you mean 'rho'?" in done.stderr
    assert "Traceback" not in done.stderr
    assert "| torch" not in done.stderr


class TestDamage:
    @pytest.fixture
    def copy(self, tmp_path: Path) -> Path:
        make(tmp_path / "copy", shard_samples=300)
        return tmp_path / "copy"

    def test_a_missing_shard(self, copy: Path) -> None:
        (copy / "train-000001.tar").unlink()
        with pytest.raises(UserError, match=r"train-000001\.tar is missing"):
            open_split(str(copy))

    def test_a_cut_shard(self, copy: Path) -> None:
        os.truncate(copy / "train-000001.tar", 4096)
        with pytest.raises(UserError, match=r"train-000001\.tar has 4096 bytes instead of \d+"):
            open_split(str(copy))

    @pytest.mark.parametrize("name", ["train-000000.tar", "train.parquet"])
    def test_a_flipped_byte(self, copy: Path, name: str) -> None:
        data = bytearray((copy / name).read_bytes())
        data[len(data) // 2] ^= 1
        (copy / name).write_bytes(data)
        with pytest.raises(UserError, match=f"{name} was altered.*sha256"):
            open_split(str(copy))

    def test_a_flipped_byte_in_a_large_set_is_found_in_the_background(
        self, copy: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(mapped, "EAGER_BYTES", 0)
        data = bytearray((copy / "train-000001.tar").read_bytes())
        data[-2000] ^= 1
        (copy / "train-000001.tar").write_bytes(data)
        split = open_split(str(copy))
        split.read(0)
        split.read(300)  # training goes on while the hash is taken
        end = time.monotonic() + 20
        while split.files.failure is None and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(UserError, match=r"train-000001\.tar was altered"):
            split.read(0)
        assert len(open_split(str(copy), verify=False).read(300)) > 0

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            (lambda tree: tree.update(version=2), "format version 2"),
            (lambda tree: tree.pop("classes"), "damaged at 'classes'"),
            (
                lambda tree: tree["splits"]["train"]["shards"][0].update(name="../x.tar"),
                "not a plain file name",
            ),
            (lambda tree: tree["splits"]["train"]["shards"].pop(), "do not add up"),
            (lambda tree: tree.update(format="other"), "does not describe shards"),
        ],
    )
    def test_a_manifest_that_was_tampered_with(self, copy: Path, change, sentence: str) -> None:
        tree = json.loads((copy / "manifest.json").read_text())
        change(tree)
        (copy / "manifest.json").write_text(json.dumps(tree))
        with pytest.raises(UserError, match=sentence):
            open_split(str(copy))

    def test_a_split_that_is_not_there(self, copy: Path) -> None:
        with pytest.raises(UserError, match="no split 'imagenet'; it has train, test"):
            open_split(str(copy), "imagenet")
