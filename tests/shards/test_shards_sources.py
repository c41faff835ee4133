"""Every source gives the pictures and labels it is known to have."""

from __future__ import annotations

import csv
import json
import os
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from shards_help import Build, fill, picture

from pipeline.predict import find_pictures
from shards.base.errors import UserError
from shards.build import ensure
from shards.config import BuildConfig, CacheConfig
from shards.reader import open_split
from shards.sources.labels import read_table


def by_key(url: str, split: str = "train") -> dict[str, int]:
    opened = open_split(url, split)
    return dict(zip(opened.keys(), opened.given.tolist()))


class TestFolder:
    def test_classes_are_folders_and_bytes_stay_untouched(self, tmp_path: Path, build: Build) -> None:
        root = fill(tmp_path / "in", {"ant": 20, "bee": 10})
        (root / "bee" / "deep" / "er").mkdir(parents=True)
        (root / "bee" / "deep" / "er" / "UPPER.PNG").write_bytes(picture(99, kind="png"))
        (root / "bee" / "w.webp").write_bytes(picture(98, kind="webp"))
        url = build(source="folder", path=str(root), validation_fraction=0.2)
        train, test = open_split(url), open_split(url, "test")
        assert train.classes == ["ant", "bee"]
        assert test.info.given_counts == [4, 2]
        assert train.info.given_counts == [16, 10]
        for split in (train, test):
            for index, key in enumerate(split.keys()):
                assert bytes(split.read(index)) == (root / key).read_bytes()
                assert split.classes[split.given[index]] == key.split("/")[0]
        assert {*train.keys(), *test.keys()} >= {"bee/deep/er/UPPER.PNG", "bee/w.webp"}
        assert (train.true == -1).all()
        assert train.clean_counts.tolist() == train.info.given_counts

    def test_build_and_predict_take_the_same_files_for_pictures(self, tmp_path: Path, build: Build) -> None:
        root = fill(tmp_path / "in", {"ant": 5, "bee": 5})
        for number, suffix in enumerate((".jfif", ".jpe", ".JPEG", ".webp", ".txt", ".gif")):
            (root / "bee" / f"x{suffix}").write_bytes(picture(50 + number))
        url = build(source="folder", path=str(root))
        built = {*open_split(url).keys(), *open_split(url, "test").keys()}
        predicted = {path.relative_to(root).as_posix() for path in find_pictures([str(root)], sys.stdin)}
        assert built == predicted
        assert "bee/x.jfif" in predicted
        assert "bee/x.gif" not in predicted

    def test_a_second_folder_is_the_test_split(self, tmp_path: Path, build: Build) -> None:
        train = fill(tmp_path / "train", {"ant": 4, "bee": 3})
        test = fill(tmp_path / "val", {"bee": 2})
        url = build(source="folder", path=str(train), validation_path=str(test))
        assert open_split(url).info.given_counts == [4, 3]
        assert open_split(url, "test").info.given_counts == [0, 2]

    def test_the_held_out_part_has_its_own_seed(self, tmp_path: Path, build: Build) -> None:
        root = str(fill(tmp_path / "in", {"ant": 20, "bee": 10}))
        common = {"source": "folder", "path": root}
        first = by_key(build("a", **common), "test")
        assert by_key(build("b", **common, noise=0.3, bias_seed=5), "test") == first
        assert by_key(build("c", **common, validation_seed=1), "test") != first

    def test_noise_and_tail_can_be_put_on_own_data(self, tmp_path: Path, build: Build) -> None:
        root = str(fill(tmp_path / "in", {"ant": 20, "bee": 30, "cat": 40}))
        url = build(source="folder", path=root, rho=4, tail="sorted", noise=0.25)
        train = open_split(url)
        assert train.clean_counts.tolist() == [9, 18, 36]
        assert train.manifest.bias.flipped == 15
        assert train.flipped.sum() == 15
        assert np.array_equal(train.flipped, train.given != train.true)  # what was there before counts as true

    def test_splits_are_not_mistaken_for_classes(self, tmp_path: Path, build: Build) -> None:
        fill(tmp_path / "in", {"train": 2, "val": 2})
        with pytest.raises(UserError, match=r"look like splits, not classes. Set path=.*train validation_path=.*val"):
            build(source="folder", path=str(tmp_path / "in"))

    def test_other_files_are_left_out_and_counted(self, tmp_path: Path, build: Build) -> None:
        root = fill(tmp_path / "in", {"ant": 4, "bee": 4})
        (root / "ant" / "notes.txt").write_text("x")
        (root / "ant" / ".hidden.jpg").write_text("x")
        build(source="folder", path=str(root))
        assert any("1 files are not JPEG, PNG or WebP" in line for line in build.said)

    def test_a_class_folder_with_odd_bytes_is_told_and_a_link_to_itself_is_no_class(
        self, tmp_path: Path, build: Build
    ) -> None:
        root = fill(tmp_path / "in", {"ant": 4, "bee": 4})
        (root / "round").symlink_to(root / "round")
        assert open_split(build(source="folder", path=str(root))).classes == ["ant", "bee"]
        os.mkdir(os.fsencode(root) + b"/\xff")
        with pytest.raises(UserError, match=r"class folder '\\xff' in .* has a name that is not UTF-8\. Rename it"):
            build("odd", source="folder", path=str(root))

    def test_odd_but_legal_names_survive(self, tmp_path: Path, build: Build) -> None:
        root = fill(tmp_path / "in", {"ant": 4, 'b "ee"\n': 4})
        odd = 'ü "quoted"\nnew\tline {%s} \\ .jpg'
        (root / "ant" / odd).write_bytes(picture(77))
        url = build(source="folder", path=str(root))
        keys = by_key(url) | by_key(url, "test")
        assert keys[f"ant/{odd}"] == 0
        abouts = []
        for name in ("train", "test"):
            with tarfile.open(Path(url) / f"{name}-000000.tar") as tar:
                abouts += [json.load(tar.extractfile(m)) for m in tar if m.name.endswith(".json")]
        assert {about["key"] for about in abouts} == set(keys)


class TestList:
    def write(self, path: Path, rows: list[dict[str, object]]) -> str:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        return str(path)

    @pytest.fixture
    def rows(self, tmp_path: Path) -> list[dict[str, object]]:
        fill(tmp_path, {"x": 12})
        names = ["ant", "bee", "cat"]
        return [
            {
                "path": f"x/{n:03d}.jpg",
                "given": names[n % 3],
                "true": names[(n // 2) % 3],
                "split": "train" if n < 9 else "test",
            }
            for n in range(12)
        ]

    @pytest.mark.parametrize("kind", ["csv", "parquet"])
    def test_path_label_truth_and_split(self, kind: str, rows, tmp_path: Path, build: Build) -> None:
        file = tmp_path / f"list.{kind}"
        if kind == "csv":
            self.write(file, rows)
        else:
            pa.parquet.write_table(pa.Table.from_pylist(rows), file)
        url = build(source="list", path=str(file))
        train, test = open_split(url), open_split(url, "test")
        assert (len(train), len(test)) == (9, 3)
        for split in (train, test):
            for index, key in enumerate(split.keys()):
                row = rows[int(key[2:5])]
                assert split.classes[split.true[index]] == row["true"]
                seen = row["given"] if split is train else row["true"]  # a test is judged by the truth
                assert split.classes[split.given[index]] == seen
        assert train.clean_counts.tolist() == np.bincount(train.true, minlength=3).tolist()
        assert not train.flipped.any()

    @pytest.mark.parametrize("spelling", [("label", "true_label"), ("given", "true_label"), ("label", "true")])
    def test_lists_of_version_0_1_call_their_columns_label_and_true_label(
        self, spelling: tuple[str, str], rows, tmp_path: Path, build: Build
    ) -> None:
        new, old = tmp_path / "new.csv", tmp_path / "old.csv"
        names = dict(zip(("given", "true"), spelling))
        self.write(new, rows)
        self.write(old, [{names.get(key, key): value for key, value in row.items()} for row in rows])
        expected, found = (open_split(build(file.stem, source="list", path=str(file))) for file in (new, old))
        assert np.array_equal(found.given, expected.given)
        assert np.array_equal(found.true, expected.true)
        assert len(set(found.true) - {-1}) == 3

    def test_given_and_true_win_over_the_old_names(self, rows, tmp_path: Path, build: Build) -> None:
        both = [row | {"label": "dog", "true_label": "eel"} for row in rows]
        assert open_split(build(source="list", path=self.write(tmp_path / "l.csv", both))).classes == [
            "ant",
            "bee",
            "cat",
        ]
        neither = self.write(tmp_path / "n.csv", [{"path": row["path"], "class": row["given"]} for row in rows])
        with pytest.raises(UserError, match="has no column 'given'"):
            build("none", source="list", path=neither)

    def test_other_columns_are_not_read(self, rows, tmp_path: Path) -> None:
        """Published lists may carry the very pictures in a column."""
        heavy = [row | {"picture": "x" * 1_000_000} for row in rows]
        pa.parquet.write_table(pa.Table.from_pylist(heavy), tmp_path / "l.parquet", compression=None)
        self.write(tmp_path / "l.csv", heavy)
        for name in ("l.parquet", "l.csv"):
            table = read_table(str(tmp_path / name), ["path", "given"], ("split",))
            assert table.column_names == ["path", "given", "split"]
            assert table.nbytes < 10_000

    def test_columns_by_other_names(self, rows, tmp_path: Path, build: Build) -> None:
        renamed = [{"file": r["path"], "noisy_50": r["given"], "is_valid": r["split"] == "test"} for r in rows]
        url = build(
            source="list",
            path=self.write(tmp_path / "l.csv", renamed),
            path_column="file",
            label_column="noisy_50",
            split_column="is_valid",
        )
        assert (len(open_split(url)), len(open_split(url, "test"))) == (9, 3)
        assert (open_split(url).true == -1).all()

    def test_numbers_as_labels_are_ordered_as_numbers(self, rows, tmp_path: Path, build: Build) -> None:
        numbered = [{"path": r["path"], "given": n % 3 + 9} for n, r in enumerate(rows)]
        url = build(source="list", path=self.write(tmp_path / "l.csv", numbered))
        assert open_split(url).classes == ["9", "10", "11"]

    def test_absolute_paths_below_the_root(self, rows, tmp_path: Path, build: Build) -> None:
        whole = [row | {"path": str(tmp_path / row["path"])} for row in rows]
        url = build(source="list", path=self.write(tmp_path / "l.csv", whole))
        assert set(open_split(url).keys()) <= {row["path"] for row in rows}

    def test_a_wrong_root_is_told_with_the_right_one(self, rows, tmp_path: Path, build: Build) -> None:
        (tmp_path / "lists").mkdir()
        file = self.write(tmp_path / "lists" / "l.csv", rows)
        with pytest.raises(UserError, match=f"the root is probably wrong.*lists/.*Set root={tmp_path}\\."):
            build(source="list", path=file)

    def test_a_root_apart_from_the_list_and_a_second_list(self, rows, tmp_path: Path, build: Build) -> None:
        (tmp_path / "lists").mkdir()
        plain = [{"path": r["path"], "given": r["given"]} for r in rows]
        first = self.write(tmp_path / "lists" / "a.csv", plain[:8])
        second = self.write(tmp_path / "lists" / "b.csv", plain[8:])
        url = build(source="list", path=first, validation_path=second, root=str(tmp_path))
        assert set(by_key(url, "test")) == {r["path"] for r in rows[8:]}

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"path": "../secret.jpg"}, r"row 3: the path '\.\./secret\.jpg' is not below the root"),
            ({"path": "x/../../secret.jpg"}, "row 3: .* is not below the root"),
            ({"path": "/etc/passwd"}, "row 3: the path '/etc/passwd' is not below the root"),
            ({"path": ""}, "row 3: the path '' is not below the root"),
            ({"path": "x/./000.jpg"}, r"rows 1 and 3 both name 'x/000\.jpg'"),
            ({"given": ""}, "row 3: the label is empty"),
            ({"split": "maybe"}, "row 3: 'maybe' in column 'split' is no split"),
        ],
    )
    def test_a_wrong_row_is_named(self, change, sentence: str, rows, tmp_path: Path, build: Build) -> None:
        rows[2] |= change
        with pytest.raises(UserError, match=sentence):
            build(source="list", path=self.write(tmp_path / "l.csv", rows))
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("content", "sentence"),
        [
            (b"", "cannot be read as CSV"),
            (b"path,label\n", "is empty"),
            (b"path,label\na,b,c,d\n", "cannot be read as CSV"),
            (b"path,label\n\xff\xfe,x\n", "cannot be read as CSV"),
            (b"file,label\na,b\n", "has no column 'path'; its first line has 'file', 'label'"),
            (b"path;label\na;b\n", "first line has 'path;label'. It must name the columns, with commas between them"),
        ],
    )
    def test_an_unreadable_list(self, content: bytes, sentence: str, tmp_path: Path, build: Build) -> None:
        (tmp_path / "l.csv").write_bytes(content)
        with pytest.raises(UserError, match=sentence):
            build(source="list", path=str(tmp_path / "l.csv"))

    def test_a_list_that_is_not_parquet_or_not_there(self, tmp_path: Path, build: Build) -> None:
        (tmp_path / "l.parquet").write_bytes(b"nonsense")
        with pytest.raises(UserError, match="cannot be read as Parquet"):
            build(source="list", path=str(tmp_path / "l.parquet"))
        with pytest.raises(UserError, match="There is no label list"):
            build(source="list", path=str(tmp_path / "none.csv"))

    def test_missing_files_are_rejected_and_counted(self, rows, tmp_path: Path, build: Build) -> None:
        os.unlink(tmp_path / "x/004.jpg")
        file = self.write(tmp_path / "l.csv", rows)
        url = build(source="list", path=file, max_rejected=0.1)
        about = open_split(url).manifest
        assert about.rejected.reasons == {"missing file": 1}
        assert len(open_split(url)) == 8
        with pytest.raises(UserError, match=r"1 of 12 pictures cannot be used.*\n  train: x/004\.jpg: missing file"):
            build("strict", source="list", path=file)


class TestWebVision:
    """On a generated tree of the published layout."""

    @pytest.fixture
    def tree(self, tmp_path: Path) -> Path:
        root = tmp_path / "webvision"
        (root / "info").mkdir(parents=True)
        ids = ["n01440764", *(f"n{1440765 + n:08d}" for n in range(59))]
        (root / "info/synsets.txt").write_text("".join(f"{i} name {n}, other\n" for n, i in enumerate(ids)))
        data = picture(1)
        for part, per_class in (("google", 6), ("flickr", 3)):
            lines = []
            for k in range(60):
                (root / part / f"q{k:04d}").mkdir(parents=True)
                for n in range(per_class + (k < 5) * 10):
                    name = f"{part}/q{k:04d}/{n}.jpg"
                    (root / name).write_bytes(data)
                    lines.append(f"{name} {k}\n")
            (root / f"info/train_filelist_{part}.txt").write_text("".join(lines))
        (root / "val_images_256").mkdir()
        lines = []
        for n in range(60 * 50):
            name = f"val{n:06d}.jpg"
            lines.append(f"{name} {n % 60}\n")
            if n % 60 < 50:
                os.link(root / "google/q0000/0.jpg", root / "val_images_256" / name)
        (root / "info/val_filelist.txt").write_text("".join(lines))
        for k in range(50):
            (tmp_path / "ilsvrc" / ids[k]).mkdir(parents=True)
            for n in range(50):
                os.link(root / "google/q0000/0.jpg", tmp_path / "ilsvrc" / ids[k] / f"{n}.JPEG")
        return root

    def test_mini_webvision(self, tree: Path, build: Build) -> None:
        (tree / "google/q0007/3.jpg").unlink()
        (tree / "google/q0008/3.jpg").write_bytes(picture(1)[:200])
        url = build(source="webvision", path=str(tree), classes=50, imagenet=str(tree.parent / "ilsvrc"))
        train = open_split(url)
        assert train.classes[:2] == ["n01440764 name 0", "n01440765 name 1"]
        assert len(train.classes) == 50
        assert train.info.given_counts == [16] * 5 + [6, 6, 5, 5] + [6] * 41
        assert len(open_split(url, "test")) == 2500
        assert open_split(url, "imagenet").info.given_counts == [50] * 50
        assert train.manifest.rejected.reasons == {"missing file": 1, "truncated": 1}
        assert train.manifest.bias.noise_kind == "none"
        said = " ".join(build.said)
        assert "WebVision validation: 2500 pictures." in said
        assert "ILSVRC-2012 validation: 2500 pictures." in said
        assert "1 listed files are missing, the first: google/q0007/3.jpg" in said

    def test_what_is_odd_among_the_ilsvrc_pictures_is_told(self, tree: Path, build: Build) -> None:
        ilsvrc = tree.parent / "ilsvrc"
        (ilsvrc / "n01440764" / "away").symlink_to(tree)
        url = build(source="webvision", path=str(tree), classes=2, imagenet=str(ilsvrc))
        table = pa.parquet.read_table(Path(url) / "rejected.parquet").to_pylist()
        assert table == [{"split": "imagenet", "key": "n01440764/away", "reason": "link leaves the folder"}]

    def test_both_parts_and_the_controlled_imbalance(self, tree: Path, build: Build) -> None:
        url = build(source="webvision", path=str(tree), parts="both", classes=10, rho=10)
        train = open_split(url)
        # sizes 29 x5 and 9 x5; targets 29 * 10^(-r/9), never more than there is
        assert train.info.given_counts == [29, 22, 17, 13, 10, 8, 6, 4, 3, 2]
        assert train.manifest.bias.available_counts == [29] * 5 + [9] * 5
        assert train.manifest.bias.flipped == 0

    def test_the_wrong_class_list_is_noticed(self, tree: Path, build: Build) -> None:
        file = tree / "info/synsets.txt"
        file.write_text("".join(sorted(file.read_text().splitlines(True), reverse=True)))
        with pytest.raises(UserError, match=r"class 0 must be n01440764 \(tench\), but it is n01440823"):
            build(source="webvision", path=str(tree))

    def test_a_class_without_a_name_is_noticed(self, tree: Path, build: Build) -> None:
        file = tree / "info/synsets.txt"
        file.write_text("".join(file.read_text().splitlines(True)[:-1]))
        with pytest.raises(UserError, match=r"class 59 is not in synsets\.txt, which has 59"):
            build(source="webvision", path=str(tree))

    def test_a_short_validation_set_is_said(self, tree: Path, build: Build) -> None:
        file = tree / "info/val_filelist.txt"
        file.write_text("".join(file.read_text().splitlines(True)[:-60]))
        build(source="webvision", path=str(tree), classes=50)
        assert any("2450 pictures; 2500 were published, figures will not be comparable" in s for s in build.said)

    def test_what_is_missing_is_named(self, tree: Path, build: Build) -> None:
        with pytest.raises(UserError, match=r"has no folder n01440764.*one folder for each WordNet id"):
            build(source="webvision", path=str(tree), classes=50, imagenet=str(tree))
        with pytest.raises(UserError, match=r"classes=99, but .* lists 60"):
            build(source="webvision", path=str(tree), classes=99)
        (tree / "info/train_filelist_google.txt").write_text("../../etc/passwd 0\n")
        with pytest.raises(UserError, match="is not below the folder"):
            build(source="webvision", path=str(tree))
        (tree / "info/train_filelist_google.txt").write_text("google/q0000/0.jpg zero\n")
        with pytest.raises(UserError, match="lines must be 'path class-number'"):
            build(source="webvision", path=str(tree))
        (tree / "info/train_filelist_google.txt").unlink()
        with pytest.raises(UserError, match=r"There is no .*train_filelist_google.txt. path must hold info/"):
            build(source="webvision", path=str(tree))


def test_published_noisy_labels_replace_the_given_ones(tmp_path: Path, build: Build) -> None:
    clean = open_split(build("clean", rho=1, noise=0))
    rng = np.random.default_rng(0)
    human = rng.integers(0, 10, len(clean))
    (tmp_path / "human.csv").write_text("worse\n" + "".join(f"{k}\n" for k in human))
    train = open_split(build("human", rho=1, labels=str(tmp_path / "human.csv"), label_column="worse"))
    assert np.array_equal(np.sort(train.given), np.sort(human))
    truth = dict(zip(clean.keys(), clean.true))
    assert [truth[key] for key in train.keys()] == train.true.tolist()  # noqa: SIM118
    assert train.manifest.bias.flipped == 0
    (tmp_path / "human.csv").write_text("worse\n1\n")
    with pytest.raises(UserError, match="has 1 labels, digits has 1438 training pictures"):
        build("short", rho=1, labels=str(tmp_path / "human.csv"), label_column="worse")


class TestTrainingAndValidationStayApart:
    def test_a_split_column_and_a_second_list(self, tmp_path: Path, build: Build) -> None:
        fill(tmp_path, {"x": 8})
        rows = "".join(f"x/{n:03d}.jpg,{'ab'[n % 2]},{'test' if n > 5 else 'train'}\n" for n in range(8))
        (tmp_path / "split.csv").write_text("path,label,split\n" + rows)
        (tmp_path / "val.csv").write_text("path,label\nx/000.jpg,a\nx/001.jpg,b\n")
        (tmp_path / "train.csv").write_text(
            "path,label\n" + "".join(f"x/{n:03d}.jpg,{'ab'[n % 2]}\n" for n in range(8))
        )
        with pytest.raises(UserError, match="has the column 'split', and validation_path names a second list"):
            build(source="list", path=str(tmp_path / "split.csv"), validation_path=str(tmp_path / "val.csv"))
        with pytest.raises(UserError, match=r"2 pictures are for training and for validation, the first: x/000\.jpg"):
            build(source="list", path=str(tmp_path / "train.csv"), validation_path=str(tmp_path / "val.csv"))

    def test_the_same_folder_twice(self, tmp_path: Path, build: Build) -> None:
        root = str(fill(tmp_path / "in", {"a": 4, "b": 4}))
        with pytest.raises(UserError, match="8 pictures are for training and for validation"):
            build(source="folder", path=root, validation_path=root + "/")


def test_shards_among_the_pictures_are_no_class(tmp_path: Path) -> None:
    root = fill(tmp_path / "in", {"a": 10, "b": 10})
    (root / "shards").mkdir()
    config = BuildConfig(source="folder", path=str(root), output=str(root / "shards"))
    assert open_split(ensure(config, lambda text: None)).classes == ["a", "b"]


def test_home_and_a_slash_at_the_end_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every shell expands ~ behind path=; some add the slash."""
    monkeypatch.setenv("HOME", str(tmp_path))
    fill(tmp_path / "in", {"a": 10, "b": 10})
    for path in ("~/in", "~/in/", str(tmp_path / "in")):  # the second and third find the shards of the first
        config = BuildConfig(source="folder", path=path, output="~/out")
        assert open_split(ensure(config, lambda text: None)).classes == ["a", "b"]
    assert CacheConfig(folder="~/cache").folder == str(tmp_path / "cache")


def test_a_sorted_tail_leaves_no_class_empty(tmp_path: Path, build: Build) -> None:
    root = fill(tmp_path / "in", {"a": 40, "b": 6})
    train = open_split(build(source="folder", path=str(root), rho=100, tail="sorted"))
    assert min(train.info.given_counts) == 1


def test_brackets_in_class_names(tmp_path: Path, build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    from shards.inspect import main as inspect
    from shards.verify import main as verify

    names = ["cat [ x ]", "crane [bird]", "n [b]"]
    url = build(source="folder", path=str(fill(tmp_path / "in", dict.fromkeys(names, 6))))
    assert open_split(url).classes == names
    assert verify([url]) == 0
    assert inspect([url]) == 0
    assert "crane [bird]" in capsys.readouterr().out


def test_a_column_that_stands_twice(tmp_path: Path, build: Build) -> None:
    fill(tmp_path, {"x": 2})
    (tmp_path / "list.csv").write_text("path,label,label\nx/000.jpg,a,b\n")
    with pytest.raises(UserError, match="has two columns 'label'"):
        build(source="list", path=str(tmp_path / "list.csv"))
