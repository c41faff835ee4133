"""The checks for machines with GPUs, on CPU ranks: all of them run, and each can fail."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ranks import worker_env
from torch import nn

from launch.gpu_check import CHECKS, CheckConfig, Row, _worst, conversion
from pipeline.distributed.world import World
from pipeline.models import batchnorm

TINY = ["device=cpu", "ranks=2", "backbone=resnet18", "size=32", "rows=8", "steps=1"]
LONG = ["one_step", "precisions", "variants"]
QUICK = [check.__name__ for check in CHECKS if check.__name__ not in LONG]


def gpu_check(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.gpu_check", *TINY, *words]
    return subprocess.run(command, capture_output=True, text=True, env=worker_env(), timeout=600, check=False)


def verdicts(table: str) -> dict[str, str]:
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in table.splitlines() if line.startswith("| ")]
    return {check: verdict for check, _, verdict in rows[1:] if check}


@pytest.mark.dist
def test_checks_pass_on_cpu_ranks() -> None:
    done = gpu_check(f"only=[{','.join(QUICK)}]")
    assert done.returncode == 0, done.stdout + done.stderr
    found = verdicts(done.stdout)
    assert "All checks passed." in done.stdout
    assert len(found) >= 10
    assert set(found.values()) == {"ok", ""}


@pytest.mark.slow
def test_long_checks_pass_on_cpu_ranks() -> None:
    done = gpu_check(f"only=[{','.join(LONG)}]")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(verdicts(done.stdout)) == 9


def test_a_check_that_fails_on_one_rank_is_shown_with_its_rank() -> None:
    rows = [Row("gather", "exact", True), Row("gather", "wrong for int64", False)]
    assert str(_worst(rows)) == "| gather | rank 1: wrong for int64 | FAILED |"
    assert _worst(rows[:1]) == rows[0]


def test_an_unknown_check_is_named() -> None:
    done = gpu_check("only=[sped]")
    assert done.returncode == 2
    assert "no check sped" in done.stderr
    assert "speed" in done.stderr


def test_no_gpu_is_said_in_one_sentence() -> None:
    command = [sys.executable, "-m", "launch.gpu_check"]
    env = worker_env() | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)
    assert done.returncode == 2
    assert "sees no GPU" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_network_that_lost_its_activations_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's own conversion does to timm's normalisations."""

    def lossy(backbone: nn.Module, rows: object) -> nn.Module:
        return nn.SyncBatchNorm.convert_sync_batchnorm(backbone)

    monkeypatch.setattr(batchnorm, "convert_batchnorm", lossy)
    (row,) = conversion(World(), CheckConfig(device="cpu", backbone="efficientnet_b0"))
    assert row.passed is False
