"""Training meets damaged, foreign and unwritable checkpoints."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint_trees import SmallDisk, flip
from checkpoint_trees import small_disk as small_disk
from jobs import TINY, differences, let_go, make, settings, train, truth

from pipeline import train as command
from pipeline.checkpoints.checkpointer import SaveError
from pipeline.training.trainer import Trainer
from shards.base.errors import UserError


@pytest.fixture(scope="module")
def halfway(small: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped in its first epoch, with three checkpoints."""
    output = tmp_path_factory.mktemp("halfway")
    train(settings(small, output, "checkpoint.every_steps=1"), stop_at=13)
    assert len(list((output / "checkpoints").glob("step-*"))) == 3
    return output


@pytest.fixture
def run(halfway: Path, tmp_path: Path) -> Path:
    return shutil.copytree(halfway, tmp_path / "run")


def steps(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


def test_a_damaged_newest_one_costs_some_steps_and_nothing_else(
    small: str, run: Path, undisturbed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = steps(run)[-1]
    flip(newest / "tensors.safetensors", -100)
    train(settings(small, run))
    assert f"{newest} is not used: tensors.safetensors has other bytes than were written" in caplog.text
    assert differences(truth(undisturbed), truth(run)) == []


def test_with_none_left_it_refuses_with_2_and_does_not_start_again_from_nothing(
    small: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in steps(run):
        flip(path / "tensors.safetensors", -100)
    assert command.main([*TINY, f"shards.url={small}", f"output={run}"]) == 2
    let_go()
    said = capsys.readouterr().err
    assert all(path.name in said for path in steps(run))
    assert "to start anew" in said


FOREIGN: dict[str, tuple[list[str], str]] = {
    "another method": (["method.name=cross_entropy"], "is one of method.name=prototypical"),
    "another network": (["model.width=8"], "model.width was 4, is 8"),
    "another seed": (["seed=5"], "seed was 0, is 5"),
    "another length": (
        ["train.epochs=9", "data.batch=10"],
        "data.batch was 52, is 10; train.epochs was 2, is 9",
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_checkpoint_of_another_training_is_refused_with_the_differences(small: str, run: Path, what: str) -> None:
    words, sentence = FOREIGN[what]
    base = [word for word in TINY if not (what == "another method" and word.startswith("method."))]
    with pytest.raises(UserError) as refused:
        make(settings(small, run, *words, base=base))
    assert sentence in str(refused.value)
    assert "Give another `output`" in str(refused.value)


def test_a_checkpoint_of_other_shards_is_refused(digits: str, run: Path) -> None:
    with pytest.raises(UserError, match="belongs to other shards"):
        make(settings(digits, run))


def test_a_newer_format_is_refused(small: str, run: Path) -> None:
    manifest = steps(run)[-1] / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 2}))
    with pytest.raises(UserError, match="newer version"):
        make(settings(small, run))


def test_what_does_not_change_the_training_may_change(small: str, run: Path) -> None:
    train(settings(small, run, "data.threads=2", "checkpoint.keep=5", "train.log_every=1", "train.timeout=99"))


def test_checkpoints_that_cannot_be_written_are_refused_before_training(small: str, output: Path) -> None:
    (output.parent / "file").touch()
    with pytest.raises(UserError, match=r"Checkpoints cannot be written.*checkpoint\.url"):
        make(settings(small, output, f"checkpoint.url={output.parent}/file/checkpoints"))


def test_a_disk_that_fills_up_is_told_and_training_goes_on(
    small: str, output: Path, undisturbed: Path, small_disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    place = small_disk.path / "checkpoints"
    config = settings(small, output, f"checkpoint.url={place}", "checkpoint.every_steps=4")
    with contextlib.ExitStack() as trouble:

        def prepare(trainer: Trainer) -> None:
            log = trainer.on_batch

            def fill(at: Any, batch: Any) -> None:
                assert log
                log(at, batch)
                if at.global_step == 6:
                    trainer.checkpoints.close()
                    trouble.enter_context(small_disk.full(str(place)))

            trainer.on_batch = fill

        with pytest.raises(SaveError, match="could not be written"), caplog.at_level(logging.WARNING):
            train(config, prepare=prepare)
        assert "The checkpoint of step 8 could not be written" in caplog.text
        assert "Training goes on." in caplog.text
    assert [path.name for path in place.iterdir()] == ["step-000000004"]
    train(config)
    shutil.copytree(place, output / "checkpoints")
    assert differences(truth(undisturbed), truth(output)) == []
