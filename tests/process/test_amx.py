"""Half precision on a CPU must not end with "illegal instruction", whatever the processor says of itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.process import amx

MULTIPLY = """
import torch
from pipeline.config import TrainConfig
from pipeline.process.torch_settings import apply_torch_settings
apply_torch_settings(TrainConfig(precision="bf16"))
ones = torch.ones(64, 256, dtype=torch.bfloat16)
print(float((ones @ ones.T)[0, 0]))
"""


def test_half_precision_works_on_this_processor() -> None:
    environment = {name: value for name, value in os.environ.items() if name != amx.LIMIT}
    done = subprocess.run([sys.executable, "-c", MULTIPLY], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout.split()) == (0, ["256.0"]), done.stderr


@pytest.fixture
def announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "CPUINFO", tmp_path / "cpuinfo")
    amx.CPUINFO.write_text("flags : fpu amx_bf16 amx_tile\n")
    monkeypatch.delenv(amx.LIMIT, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # what the test sets is not for other tests


def test_what_ends_a_copy_of_the_process_is_not_used(announced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "_multiply", lambda: os.kill(os.getpid(), signal.SIGILL))
    assert amx.avoid_broken_amx()
    assert os.environ[amx.LIMIT] == amx.BEST_WITHOUT


def test_a_copy_that_hangs_is_ended(announced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "_multiply", signal.pause)
    monkeypatch.setattr(amx, "SECONDS", 0.1)
    assert amx.avoid_broken_amx()


def test_what_works_is_used(announced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "_multiply", lambda: None)
    assert not amx.avoid_broken_amx()
    assert amx.LIMIT not in os.environ


@pytest.mark.parametrize("text", ["flags : fpu avx2\n", None])
def test_without_amx_nothing_is_tried(announced: None, text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if text is None:
        amx.CPUINFO.unlink()
    else:
        amx.CPUINFO.write_text(text)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("tried"))
    assert not amx.avoid_broken_amx()


def test_a_limit_that_somebody_has_set_stays(announced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ[amx.LIMIT] = "AVX2"
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("tried"))
    assert not amx.avoid_broken_amx()
    assert os.environ[amx.LIMIT] == "AVX2"
