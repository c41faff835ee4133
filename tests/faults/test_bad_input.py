"""Training meets bad shards, pictures, numbers and company: a sentence and the right exit code."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_trees import SmallDisk
from checkpoint_trees import small_disk as small_disk
from jobs import PLAIN, TINY, differences, let_go, lost_or_repeated, make, samples, settings, train, truth
from PIL import Image
from ranks import on_ranks
from test_stop_anywhere import leg

from pipeline import train as command
from pipeline.distributed.world import World
from pipeline.process.diagnose import explain_failure
from pipeline.training.trainer import Trainer
from shards.base import storage
from shards.base.errors import UserError
from shards.build import ensure
from shards.config import BuildConfig


def ends_with(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = command.main(words)
    let_go()
    return code, capsys.readouterr().err


# -- shards ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["cut", "flipped", "missing"])
def test_damaged_shards_are_refused_by_name_before_training(
    small: str, tmp_path: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = shutil.copytree(small, tmp_path / "shards")
    tar = sorted(shards.glob("train-*.tar"))[1]
    data = bytearray(tar.read_bytes())
    data[len(data) // 2] ^= 1
    if harm == "missing":
        tar.unlink()
    else:
        tar.write_bytes(data if harm == "flipped" else data[:-512])
    code, said = ends_with([*TINY, f"shards.url={shards}", f"output={tmp_path / 'run'}"], capsys)
    assert code == 2
    assert tar.name in said


def test_shards_replaced_during_training_change_nothing_now_and_are_refused_later(
    small: str, tmp_path: Path, undisturbed: Path
) -> None:
    shards = shutil.copytree(small, tmp_path / "shards")

    def prepare(trainer: Trainer) -> None:
        for tar in shards.glob("train-*.tar"):
            (shards / "new").write_bytes(bytes(tar.stat().st_size))
            (shards / "new").replace(tar)

    train(settings(str(shards), tmp_path / "run"), prepare=prepare)
    assert differences(truth(undisturbed), truth(tmp_path / "run")) == []
    with pytest.raises(UserError, match="was altered"):
        make(settings(str(shards), tmp_path / "run"))


@pytest.mark.parametrize("url", ["pipe:touch /tmp/ran", "ftp://x/y", "s3://key:secret@bucket/x"])
def test_addresses_that_could_run_something_or_carry_secrets_are_refused(
    url: str, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = ends_with([*TINY, f"shards.url={url}", f"output={output}"], capsys)
    assert code == 2
    assert "secret" not in said


def test_a_cache_without_room_is_told_once_and_pictures_are_streamed(
    small: str, output: Path, undisturbed: Path, small_disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"memory://{output.parent.name}"
    store: Any = storage.store_at(url)
    store.fs.put(small, url, recursive=True)
    cache = small_disk.path / "cache"
    with contextlib.ExitStack() as trouble:
        full = small_disk.full(str(cache))
        train(settings(url, output, f"data.cache.folder={cache}"), prepare=lambda _: trouble.enter_context(full))
    assert caplog.text.count("read one by one from the store") == 2  # once for each split
    assert differences(truth(undisturbed), truth(output)) == []
    store.fs.rm(url, recursive=True)


def test_a_store_that_does_not_answer_is_worth_another_try(
    output: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(storage.with_retries, "__defaults__", (0.5,))
    storage._filesystem.cache_clear()
    code, said = ends_with([*TINY, "shards.url=s3://bucket/x", f"output={output}"], capsys)
    storage._filesystem.cache_clear()
    assert code == 1
    assert "Try again later" in said


# -- pictures --------------------------------------------------------------------------------------


def folder_of_pictures(place: Path, classes: list[str], each: int) -> Path:
    draw = np.random.default_rng(0)
    for name in classes:
        (place / name).mkdir(parents=True)
        for i in range(each):
            Image.fromarray(draw.integers(0, 255, (12, 12, 3), np.uint8)).save(place / name / f"{i}.png")
    return place


def shards_of(pictures: Path, place: Path, **options: Any) -> str:
    return ensure(BuildConfig(source="folder", path=str(pictures), output=str(place), **options))


def spoil(trainer: Trainer) -> None:
    """Two samples turn out not to be pictures."""
    split: Any = trainer.loader.split
    read = split.read
    split.read = lambda index: b"GIF89a, or so it says" if index in (5, 17) else read(index)


def test_a_picture_that_does_not_decode_counts_nothing_and_the_epoch_stays_exact(
    small: str, count: int, output: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(small, output, base=PLAIN)
    train(config, stop_at=7, prepare=spoil)
    train(config, prepare=spoil)
    assert "2 pictures do not decode; their weight is zero (sample 5: " in caplog.text
    for epoch in range(2):
        seen = [i for (_, e, _, _), indices in samples(output).items() for i in indices if e == epoch]
        assert sorted(seen) == [i for i in range(count) if i not in (5, 17)]
    with pytest.raises(UserError, match=r"(?s)sample (5|17): .*data\.max_bad"):
        train(settings(small, output.parent / "strict", "data.max_bad=0", base=PLAIN), prepare=spoil)


@pytest.mark.dist
@pytest.mark.parametrize("base", [PLAIN, TINY], ids=["cross_entropy", "prototypical"])
def test_more_ranks_than_samples(tmp_path: Path, base: list[str]) -> None:
    pictures = folder_of_pictures(tmp_path / "in", ["a", "b"], 2)
    url = shards_of(pictures, tmp_path / "shards", validation_fraction=0.5)  # two to train on, two to test
    output = tmp_path / "run"
    output.mkdir()
    ends = on_ranks(3, leg, settings(url, output, "model.norm=group", base=base), 0)
    assert len(set(ends)) == 1  # every rank made the same number of steps
    assert lost_or_repeated(output, 2) == []


def test_control_characters_in_class_names_do_not_reach_the_terminal(
    tmp_path: Path, output: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = "\x1b[31mred\x07"
    url = shards_of(folder_of_pictures(tmp_path / "in", [name, "plain"], 12), tmp_path / "shards")
    train(settings(url, output, base=PLAIN))
    subprocess.run([sys.executable, "-m", "shards.verify", f"url={url}"], check=False)
    said = capfd.readouterr()
    assert "\x1b[31m" not in said.out + said.err
    assert "\x07" not in said.out + said.err


# -- numbers and memory ----------------------------------------------------------------------------


def test_a_loss_that_stays_infinite_stops_the_run_with_step_samples_and_checkpoint(small: str, output: Path) -> None:
    words = [
        "optim.lr=1e30",
        "train.max_bad_steps=2",
        "train.log_every=1",
        "train.epochs=5",
        "checkpoint.every_steps=1",
    ]
    with pytest.raises(UserError) as stopped:
        train(settings(small, output, *words, base=PLAIN))
    said = str(stopped.value)
    assert "not finite for 3 steps in a row" in said
    assert "step-0000000" in said
    last = samples(output)[max(samples(output))]
    assert ", ".join(map(str, last[:16])) in said


def test_out_of_memory_names_the_settings_that_help() -> None:
    try:
        torch.empty(1 << 60, dtype=torch.uint8)
    except RuntimeError as error:
        said = explain_failure(error, 3, "stage 1, epoch 2, step 7 (99 in all)", 60)
    assert "rank 3, stage 1, epoch 2, step 7" in said
    assert "out of memory" in said
    for setting in ("data.batch", "optim.accumulate", "model.checkpoint_activations", "train.precision"):
        assert setting in said


# -- company ---------------------------------------------------------------------------------------


def test_a_second_job_on_the_same_folder_refuses(small: str, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output.mkdir()
    hold = "import sys, time; from pipeline.checkpoints.run_lock import lock; lock(sys.argv[1]); print(flush=True); time.sleep(99)"
    other = subprocess.Popen([sys.executable, "-c", hold, str(output)], stdout=subprocess.PIPE)
    assert other.stdout
    other.stdout.readline()
    code, said = ends_with([*TINY, f"shards.url={small}", f"output={output}"], capsys)
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    assert code == 2
    assert f"Another job (process {other.pid}" in said
    make(settings(small, output))  # the kernel gave the folder back
    let_go()
    assert World().is_main
