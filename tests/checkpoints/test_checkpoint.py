"""A checkpoint comes back exactly as it was saved, or it is refused with the reason; never anything in
between.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_trees import flip, same, saved, tree_of
from ranks import free_port
from safetensors.torch import load_file

from pipeline.checkpoints import file_format
from pipeline.checkpoints.checkpointer import Checkpointer, read_checkpoint
from pipeline.checkpoints.run_lock import lock
from pipeline.distributed.world import World
from shards.base import storage
from shards.base.errors import UserError
from shards.base.storage import RemoteStore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture(params=["local path", "file URL", "object store"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "object store":
        yield f"memory://run-{tmp_path.name}/checkpoints"
        RemoteStore("memory://", "memory").fs.rm(f"/run-{tmp_path.name}", recursive=True)
    else:
        yield ("file://" if request.param == "file URL" else "") + str(tmp_path / "checkpoints")


# -- what is saved comes back ----------------------------------------------------------------------


def test_the_tree_comes_back_exactly_from_any_store(url: str) -> None:
    checkpointer = Checkpointer(url, 3, World())
    assert checkpointer.load() is None
    checkpointer.save(12, tree_of(12))
    loaded = checkpointer.load()
    assert loaded is not None
    assert (loaded.name, loaded.step, loaded.rejected) == ("step-000000012", 12, [])
    assert same(loaded.tree, tree_of(12))


def test_numbers_are_exact_and_the_unusual_ones_survive(folder: Path) -> None:
    floats = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, math.inf, -math.inf, math.nan, 2**53 + 1.0]
    tensors = [
        torch.tensor([math.nan, math.inf, -0.0]),
        torch.empty(0, 3),
        torch.tensor(7),
        torch.get_rng_state(),
    ]
    kinds = [torch.ones(3, dtype=dtype) for dtype in file_format._DTYPES.values()]
    checkpointer = Checkpointer(str(folder), 2, World())
    checkpointer.save(
        1,
        {
            "floats": floats,
            "int": 2**80,
            "tensors": tensors,
            "kinds": kinds,
            "a/b": {"c": tensors[2]},
            "a": {"b/c": tensors[1]},
        },
    )
    back = checkpointer.load()
    assert back is not None
    assert repr(back.tree["floats"]) == repr(floats)
    assert back.tree["int"] == 2**80
    for one, other in zip(tensors + kinds, back.tree["tensors"] + back.tree["kinds"]):
        assert one.dtype == other.dtype
        assert (
            torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
            if one.is_floating_point()
            else torch.equal(one, other)
        )
    assert torch.equal(back.tree["a/b"]["c"], tensors[2])  # two paths that read alike do not collide
    assert back.tree["a"]["b/c"].shape == (0, 3)


def test_any_safetensors_reader_opens_the_tensors(folder: Path) -> None:
    saved(folder, [3])
    read = load_file(folder / "step-000000003" / "tensors.safetensors")
    assert torch.equal(read["model/weight"], tree_of(3)["model"]["weight"])
    assert torch.equal(read["beliefs/clean"], tree_of(3)["beliefs"]["clean"])


def test_what_is_written_is_the_moment_of_the_call(folder: Path) -> None:
    weight = torch.zeros(1_000_000)
    checkpointer = Checkpointer(str(folder), 2, World())
    for step in (1, 2):
        weight.fill_(step)
        checkpointer.save(step, {"weight": weight, "list": (values := [step])})
        weight.fill_(-1.0)
        values.append(-1)
        loaded = checkpointer.load()
        assert loaded is not None
        assert bool((loaded.tree["weight"] == step).all())
        assert loaded.tree["list"] == [step]


def test_views_and_strides_are_saved_by_value(folder: Path) -> None:
    base = torch.arange(24.0).reshape(2, 3, 2, 2)
    checkpointer = Checkpointer(str(folder), 2, World())
    checkpointer.save(
        1, {"last": base.to(memory_format=torch.channels_last), "turned": base[0, :, 0].T, "part": base[1:]}
    )
    loaded = checkpointer.load()
    assert loaded is not None
    assert torch.equal(loaded.tree["last"], base)
    assert torch.equal(loaded.tree["turned"], base[0, :, 0].T)
    assert torch.equal(loaded.tree["part"], base[1:])


@pytest.mark.parametrize("value", [{1: 2}, {"$tensor": "x"}, {"a": object()}, {"a": [b"bytes"]}, {"a": {1, 2}}])
def test_what_json_cannot_hold_is_refused_at_once_with_its_place(folder: Path, value: Any) -> None:
    with pytest.raises(TypeError, match=r"checkpoint: .*'part"):
        Checkpointer(str(folder), 2, World()).save(1, {"part": value})


# -- which are kept --------------------------------------------------------------------------------


def test_the_newest_and_the_best_are_kept(url: str) -> None:
    checkpointer = Checkpointer(url, 2, World())
    for step in range(1, 7):
        checkpointer.save(step, tree_of(step), best=step in (2, 3))
    checkpointer.close()
    assert file_format.listed(checkpointer.store) == ["step-000000003", "step-000000005", "step-000000006"]
    best, newest = checkpointer.best(), checkpointer.load()
    assert best is not None
    assert newest is not None
    assert (best.step, newest.step) == (3, 6)
    assert read_checkpoint(url, best=True).step == 3


def test_a_step_saved_twice_does_not_overwrite_and_the_later_one_counts(url: str) -> None:
    checkpointer = Checkpointer(url, 3, World())
    checkpointer.save(4, {"try": 1})
    checkpointer.save(4, {"try": 2})
    checkpointer.close()
    loaded = checkpointer.load()
    assert loaded is not None
    assert (loaded.name, loaded.tree) == ("step-000000004.1", {"try": 2})
    assert len(file_format.listed(checkpointer.store)) == 2


def test_a_refused_checkpoint_does_not_take_the_place_of_a_good_one(folder: Path) -> None:
    saved(folder, [1, 2, 3])
    (folder / "step-000000003" / "state.json").unlink()
    checkpointer = Checkpointer(str(folder), 2, World())
    checkpointer.load()
    checkpointer.save(2, tree_of(2))
    checkpointer.close()
    assert "step-000000003" in file_format.listed(checkpointer.store)  # ahead of us: not ours to delete
    checkpointer.save(4, tree_of(4))
    checkpointer.close()
    assert file_format.listed(checkpointer.store) == ["step-000000002.1", "step-000000004"]  # passed by now


# -- reading from outside --------------------------------------------------------------------------


def test_a_checkpoint_is_found_from_the_run_the_folder_or_itself(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoints", [1, 2])
    (tmp_path / "manifest.json").write_text("{}")  # of the shards: a run keeps a copy in its folder
    for place in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "step-000000002"):
        found = read_checkpoint(place)
        assert (found.step, found.name) == (2, "step-000000002")
        assert same(found.tree, tree_of(2))
    copied = shutil.copytree(tmp_path / "checkpoints" / "step-000000001", tmp_path / "a name of mine")
    assert read_checkpoint(copied).step == 1
    flip(copied / "state.json", 5)
    with pytest.raises(UserError, match="sha256 differs"):
        read_checkpoint(copied)
    with pytest.raises(UserError, match="There is no checkpoint in"):
        read_checkpoint(tmp_path / "nowhere")


# -- a real object store -----------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_s3_from_save_to_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3
    from moto.server import ThreadedMotoServer

    port = free_port()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}.items():
        monkeypatch.setenv(name, value)
    storage._filesystem.cache_clear()
    try:
        with pytest.raises(UserError, match="Checkpoints cannot be written to s3://nowhere"):
            Checkpointer("s3://nowhere/run", 2, World()).check_writable()
        s3 = boto3.client("s3")
        s3.create_bucket(Bucket="bucket")
        checkpointer = Checkpointer("s3://bucket/run", 2, World())
        for step in range(1, 6):
            checkpointer.save(step, tree_of(step), best=step == 2)
        checkpointer.close()
        assert file_format.listed(checkpointer.store) == ["step-000000002", "step-000000004", "step-000000005"]
        s3.put_object(Bucket="bucket", Key="run/step-000000005/state.json", Body=b"{}")
        s3.put_object(Bucket="bucket", Key="run/step-000000006/tensors.safetensors", Body=b"half an upload")
        loaded = checkpointer.load()
        assert loaded is not None
        assert (loaded.step, len(loaded.rejected)) == (4, 2)
        assert same(loaded.tree, tree_of(4))
        assert read_checkpoint("s3://bucket/run", best=True).step == 2
    finally:
        server.stop()
        storage._filesystem.cache_clear()


# -- one job per folder ----------------------------------------------------------------------------


def test_the_second_job_on_a_folder_refuses_until_the_first_is_gone(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pipeline.checkpoints.run_lock import lock; lock(sys.argv[1]); "
        "print('mine', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "mine\n"
    with pytest.raises(UserError, match=rf"Another job \(process {other.pid} on .*Wait for it"):
        lock(tmp_path, timeout=0.2)
    other.kill()
    other.wait()
    lock(tmp_path)
