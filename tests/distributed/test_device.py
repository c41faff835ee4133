"""A run never lands on CPUs by mistake, and says what it runs on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeline import train
from pipeline.distributed import device
from pipeline.distributed.device import choose_device, compare_devices
from pipeline.distributed.world import init_distributed
from pipeline.inference import open_run
from shards.base.errors import UserError


@pytest.fixture(autouse=True)
def no_usable_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the tests run. A GPU that the driver shows would be a file in this folder."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "GPU_FILES", str(tmp_path / "nvidia[0-9]*"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_without_a_gpu_the_cpu_is_taken_and_named() -> None:
    world = init_distributed()
    assert world.device == torch.device("cpu")
    assert world.about == f"1 rank on cpu, torch {torch.__version__}"


def test_a_gpu_that_torch_cannot_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidiactl").touch()  # not a GPU
    assert choose_device().type == "cpu"
    (tmp_path / "nvidia0").touch()
    for choose in (choose_device, open_run._device):
        with pytest.raises(UserError, match=r"nvidia0.*CUDA.*nvidia-smi.*Install a build.*train\.device=cpu"):
            choose()
    assert choose_device("cpu").type == "cpu"
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    with pytest.raises(UserError, match=r"is built for CUDA 12\.6"):
        choose_device()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device().type == "cpu"


def test_a_gpu_that_is_asked_for_and_missing_is_answered_with_a_sentence(
    digits: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([f"shards.url={digits}", f"output={tmp_path / 'run'}", "train.device=cuda"]) == 2
    assert capsys.readouterr().err.startswith("error: train.device=cuda, but torch can use no GPU here (there is no ")


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device(local_rank=1) == torch.device("cuda", 1)
    with pytest.raises(UserError, match=r"rank 2 \(LOCAL_RANK, from 0\), and torch sees 2 .*--nproc_per_node=2"):
        choose_device(local_rank=2)


def compared(kinds: list[str]) -> list[list[str] | str]:
    """What each rank is told; every rank has its own connection to a real store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def rank(number: int) -> list[str] | str:
        store = dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=60))
        try:
            return compare_devices(store, number, len(kinds), kinds[number])
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(len(kinds)) as ranks:
        return list(ranks.map(rank, range(len(kinds))))


def test_all_ranks_must_have_the_same_kind_of_device() -> None:
    assert compared(["cuda (A)", "cuda (B)", "cuda (A)"]) == [["cuda (A)", "cuda (B)"]] * 3
    told = compared(["cuda (A)", "cpu", "cuda (A)"])
    assert len(set(map(str, told))) == 1
    assert "different devices (cuda (A): rank 0, 2; cpu: rank 1)" in told[0]
