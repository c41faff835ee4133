"""A million samples: memory stays flat, opening is quick."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def measure(*words: str) -> dict[str, float]:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(here / "shards_million.py"), *words],
        env=os.environ | {"PYTHONPATH": str(here.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def scale(samples: int, place: Path) -> None:
    built = measure("build", str(samples), str(place))
    print(built)
    assert built["peak_mib"] < 1024
    assert built["others"] >= 3  # two writers, and the process they come from
    assert 20 < built["highest_of_others_mib"] < 1024
    found = measure("open", "", str(place))
    print(found)
    assert found["peak_mib"] < 1024
    if samples == 1_000_000:  # below that, what any program needs outweighs the samples
        assert found["bytes_a_sample"] < 100
        assert found["seconds"] < 2


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_million_samples(tmp_path: Path) -> None:
    scale(1_000_000, tmp_path / "shards")


def test_thirty_thousand_samples(tmp_path: Path) -> None:
    scale(30_000, tmp_path / "shards")
