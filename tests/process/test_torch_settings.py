"""What a run sets in torch, in processes of their own: the settings are those of the whole process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

SHOW = """
import json, os, torch
from pipeline import train
assert train.main(["shards.url=/nowhere", "tracking.uri=", *{words}]) == 2  # refused, after the settings were made
cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
print(json.dumps({{
    "matmul": [cuda.matmul.allow_tf32, cuda.matmul.fp32_precision, torch.get_float32_matmul_precision()],
    "convolution": cudnn.allow_tf32, "benchmark": cudnn.benchmark, "deterministic": cudnn.deterministic,
    "algorithms": torch.are_deterministic_algorithms_enabled(),
    "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG"), "nccl": os.environ.get("NCCL_ALGO"),
}}))
"""


def settings(folder: Any, *words: str) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k not in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")}
    environment["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] = "1"  # as NVIDIA's images have it
    code = SHOW.format(words=[f"output={folder}", *words])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


FAST = {"benchmark": True, "deterministic": False, "algorithms": False, "cublas": None, "nccl": None}
SAME = {"benchmark": False, "deterministic": True, "algorithms": True, "cublas": ":4096:8", "nccl": "^NVLS"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"convolution": True, **FAST}),
        (["train.tf32=false", "train.deterministic=true"], {"convolution": False, **SAME}),
    ],
)
def test_only_convolutions_may_round_and_determinism_is_asked_for(
    tmp_path: Any, words: list[str], expected: Any
) -> None:
    """Both of torch's interfaces can be read afterwards: torch.compile fails where they contradict each other."""
    assert settings(tmp_path, *words) == {"matmul": [False, "ieee", "highest"], **expected}


REUSE = """
import resource, torch
from pipeline.process.torch_settings import keep_freed_memory
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def work():
    for _ in range(10):
        torch.empty(16 << 20).fill_(1.0)
{call}
work()
before = faults()
work()
print(faults() - before)
"""


def test_memory_of_freed_tensors_is_used_again() -> None:
    """In pages that the system had to bring: ten tensors of 64 MB have 163 840."""
    pages = {}
    for call in ("", "keep_freed_memory()"):
        done = subprocess.run([sys.executable, "-c", REUSE.format(call=call)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        pages[call] = int(done.stdout)
    assert pages["keep_freed_memory()"] < max(1000, pages[""] / 10)  # fewer where the system has huge pages
