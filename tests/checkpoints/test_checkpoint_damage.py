"""Whatever happens to a checkpoint, also while it is written: it is noticed, and never taken for good."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_trees import SmallDisk, flip, same, saved, tree_of
from checkpoint_trees import small_disk as small_disk

from pipeline.checkpoints import file_format
from pipeline.checkpoints.checkpointer import Checkpointer, SaveError, choose
from pipeline.distributed.world import World
from shards.base.errors import UserError
from shards.base.storage import store_at


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


# -- damage ----------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def replace_by(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped byte in a tensor": (lambda f: flip(f / "tensors.safetensors", -3), "has other bytes"),
    "a flipped byte in the state": (lambda f: flip(f / "state.json", 9), "state.json has other bytes"),
    "a flipped byte in the manifest": (lambda f: flip(f / "manifest.json", 14), "manifest.json"),
    "tensors cut": (lambda f: cut(f / "tensors.safetensors"), "bytes instead of"),
    "state cut": (lambda f: cut(f / "state.json"), "bytes instead of"),
    "manifest cut": (lambda f: cut(f / "manifest.json"), "manifest.json is not readable"),
    "manifest empty": (lambda f: (f / "manifest.json").write_bytes(b""), "manifest.json is not readable"),
    "tensors missing": (lambda f: (f / "tensors.safetensors").unlink(), "tensors.safetensors is missing"),
    "manifest missing": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    "an empty folder": (lambda f: (shutil.rmtree(f), f.mkdir()), "manifest.json is missing"),
    "files of another step": (lambda f: replace_by(f, f.parent / "step-000000001"), "belongs to step 1"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_the_checkpoint_before_is_used(
    folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = saved(folder, [1, 2])
    harm, sentence = DAMAGE[damage]
    harm(folder / "step-000000002")
    loaded = checkpointer.load()
    assert loaded is not None
    assert loaded.step == 1
    assert same(loaded.tree, tree_of(1))
    assert len(loaded.rejected) == 1
    assert sentence in loaded.rejected[0]
    assert "step-000000002 is not used" in caplog.text


def test_no_flipped_byte_anywhere_goes_unnoticed(folder: Path) -> None:
    saved(folder, [1])
    wrong = []
    for path in sorted((folder / "step-000000001").iterdir()):
        whole = path.read_bytes()
        for at in range(len(whole)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
            try:
                found, _ = choose(store_at(str(folder)), ["step-000000001"])
            except UserError:
                continue
            if found is None or not same(found.tree, tree_of(1)):
                wrong.append((path.name, at))
        path.write_bytes(whole)
    assert wrong == []


def test_with_no_good_one_left_training_does_not_silently_start_again(folder: Path) -> None:
    checkpointer = saved(folder, [1, 2])
    for name in file_format.listed(checkpointer.store):
        flip(folder / name / "tensors.safetensors", -1)
    with pytest.raises(UserError, match=r"(?s)step-000000002.*step-000000001.*start anew"):
        checkpointer.load()


def test_a_newer_format_is_told_not_skipped(folder: Path) -> None:
    checkpointer = saved(folder, [1, 2])
    manifest = folder / "step-000000002" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    with pytest.raises(UserError, match="newer version"):
        checkpointer.load()


class Trap:
    """Unpickling this leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


def test_a_planted_pickle_is_never_opened(folder: Path, tmp_path: Path) -> None:
    checkpointer = saved(folder, [1, 2])
    mark = tmp_path / "the pickle ran"
    one = folder / "step-000000002"
    for name in ("extra.pkl", ".metadata", "optimizer.pt"):
        (one / name).write_bytes(pickle.dumps(Trap(mark)))
    loaded = checkpointer.load()
    assert loaded is not None
    assert loaded.step == 2  # strangers beside the three files are not looked at
    forged = {"format": 1, "step": 2, "best": False, "files": {}}
    for name in ("tensors.safetensors", "state.json"):
        (one / name).write_bytes(pickle.dumps(Trap(mark)))
    forged["files"] = {name: described(one / name) for name in ("tensors.safetensors", "state.json")}
    (one / "manifest.json").write_text(json.dumps({**forged, "seal": file_format._seal(forged)}))
    loaded = checkpointer.load()  # now with right digests: it is still not data we read
    assert loaded is not None
    assert loaded.step == 1
    assert "cannot be read" in loaded.rejected[0]
    assert not mark.exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "extra.pkl", "..\\x", "a/../../b"])
def test_a_manifest_cannot_point_outside_its_folder(folder: Path, tmp_path: Path, name: str) -> None:
    checkpointer = saved(folder, [1, 2])
    one = folder / "step-000000002"
    manifest = json.loads((one / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": 0, "sha256": "0" * 64}
    manifest["seal"] = file_format._seal(manifest)
    (one / "manifest.json").write_text(json.dumps(manifest))
    loaded = checkpointer.load()
    assert loaded is not None
    assert loaded.step == 1
    assert "has no place in a checkpoint" in loaded.rejected[0]


def test_hostile_headers_are_refused(folder: Path) -> None:
    checkpointer = saved(folder, [1])
    headers = [
        b"\xff" * 8,
        (1 << 40).to_bytes(8, "little") + b"{}",
        *(
            len(text).to_bytes(8, "little") + text + b"\0" * 8
            for text in (
                b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}',
                b'{"a":{"dtype":"F32","shape":[99999999999],"data_offsets":[0,4]}}',
                b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}}',
                b'{"a":{"dtype":"EVIL","shape":[1],"data_offsets":[0,4]}}',
                b"[" * 100_000,
            )
        ),
    ]
    one = folder / "step-000000001"
    for header in headers:
        (one / "tensors.safetensors").write_bytes(header)
        manifest = json.loads((one / "manifest.json").read_text())
        manifest["files"]["tensors.safetensors"] = described(one / "tensors.safetensors")
        manifest["seal"] = file_format._seal(manifest)
        (one / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(UserError, match="cannot be read"):
            checkpointer.load()


def described(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


# -- unfinished writes -----------------------------------------------------------------------------


def test_an_upload_that_was_cut_off_is_no_loss_and_is_cleared_away(tmp_path: Path) -> None:
    checkpointer = Checkpointer(f"memory://cut-{tmp_path.name}", 2, World())
    store = checkpointer.store
    store.fs.pipe_file(store.at("step-000000001/tensors.safetensors"), b"half")
    assert checkpointer.load() is None  # the first save was cut off: nothing was there before it either
    checkpointer.save(1, tree_of(1))
    store_name = checkpointer.load()
    assert store_name is not None
    assert store_name.name == "step-000000001.1"
    checkpointer.save(2, tree_of(2))
    checkpointer.close()
    assert file_format.listed(store) == ["step-000000001.1", "step-000000002"]


def in_child(work: Callable[[], object]) -> int:
    """Run in a forked copy of this process; how it ended."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def save_and_die_at(folder: Path, event: int) -> Callable[[], object]:
    """Save step 3, and be killed at the n-th time the file system is touched."""

    def work() -> None:
        seen = 0

        def watch(name: str, args: tuple[Any, ...]) -> None:
            nonlocal seen
            if (name == "open" or name.startswith(("os.", "shutil."))) and str(folder) in str(args):
                seen += 1
                if seen == event:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        checkpointer = Checkpointer(str(folder), 2, World())
        checkpointer.check_writable()
        checkpointer.save(3, tree_of(3), wait=True)

    return work


def test_killed_at_any_file_event_of_a_save_a_complete_checkpoint_is_there(folder: Path) -> None:
    for event in range(1, 200):
        shutil.rmtree(folder, ignore_errors=True)
        saved(folder, [1, 2])
        finished = in_child(save_and_die_at(folder, event)) == 0
        checkpointer = Checkpointer(str(folder), 2, World())
        checkpointer.check_writable()
        loaded = checkpointer.load()
        assert loaded is not None
        assert loaded.rejected == []  # nothing half-written ever bears the name of a checkpoint
        assert loaded.step == (3 if finished else loaded.step)
        assert loaded.step in (2, 3)
        assert same(loaded.tree, tree_of(loaded.step))
        checkpointer.save(4, tree_of(4), wait=True)
        assert not list(folder.glob(".tmp*"))
        if finished:
            break
    assert event > 12  # it did die at every event before it came through


def test_killed_at_random_moments_of_background_saves(folder: Path) -> None:
    def work() -> None:
        checkpointer = Checkpointer(str(folder), 2, World())
        checkpointer.check_writable()
        start = checkpointer.load()
        for step in range(start.step + 1 if start else 1, 10_000):
            checkpointer.save(step, {"weight": torch.full((500_000,), float(step))})

    chance = random.Random(5)
    newest = 0
    for _ in range(12):
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)
                work()
            finally:
                os._exit(1)
        time.sleep(chance.uniform(0.02, 0.25))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        loaded = Checkpointer(str(folder), 2, World()).load()
        if loaded is None:
            assert newest == 0
            continue
        assert loaded.rejected == []
        assert bool((loaded.tree["weight"] == loaded.step).all())
        assert loaded.step >= newest
        newest = loaded.step
    assert newest > 0


# -- disks that are full or read-only --------------------------------------------------------------


def test_a_full_disk_is_a_warning_and_leaves_no_stump(small_disk: SmallDisk, caplog: pytest.LogCaptureFixture) -> None:
    folder = small_disk.path / "checkpoints"
    checkpointer = Checkpointer(str(folder), 2, World())
    checkpointer.check_writable()
    checkpointer.save(1, {"weight": torch.ones(100_000)})
    checkpointer.save(2, {"weight": torch.ones(1_000_000)})
    with caplog.at_level(logging.WARNING):
        checkpointer.save(3, {"weight": torch.ones(100_000)})
    assert "The checkpoint of step 2 could not be written" in caplog.text
    assert small_disk.when_full in caplog.text
    assert "Training goes on." in caplog.text
    loaded = checkpointer.load()
    assert loaded is not None
    assert (loaded.step, loaded.rejected) == (3, [])
    assert sorted(path.name for path in folder.iterdir()) == ["step-000000001", "step-000000003"]
    with pytest.raises(SaveError, match=rf"step 4 .*{small_disk.when_full}\."):
        checkpointer.save(4, {"weight": torch.ones(1_000_000)}, wait=True)
    checkpointer.save(5, {"weight": torch.ones(1_000_000)})
    with pytest.raises(SaveError, match="step 5"):
        checkpointer.close()


def test_a_disk_that_becomes_read_only(small_disk: SmallDisk) -> None:
    folder = str(small_disk.path / "checkpoints")
    checkpointer = Checkpointer(folder, 2, World())
    checkpointer.save(1, tree_of(1), wait=True)
    with small_disk.unwritable(folder) as reason:
        checkpointer.save(2, tree_of(2))
        with pytest.raises(SaveError, match=rf"step 2 .*{reason}"):
            checkpointer.close()
        with pytest.raises(UserError, match="Checkpoints cannot be written"):
            Checkpointer(folder, 2, World()).check_writable()
    loaded = checkpointer.load()
    assert loaded is not None
    assert loaded.step == 1


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"Checkpoints cannot be written to .*file/checkpoints.*checkpoint\.url"):
        Checkpointer(str(tmp_path / "file" / "checkpoints"), 2, World()).check_writable()


@pytest.mark.parametrize("url", ["pipe:cat", "ftp://host/x", "s3://user:secret@bucket/x"])
def test_urls_that_are_not_stores_are_refused_without_showing_secrets(url: str) -> None:
    with pytest.raises(UserError) as error:
        Checkpointer(url, 2, World()).check_writable()
    assert "secret" not in str(error.value)
