"""A run trained for a test, and commands as a user gives them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Trained:
    folder: Path
    uri: str
    shards: str

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def run_id(self) -> str:
        return self.summary["run_id"]


def command(module: str, *words: object, cwd: Path | None = None, ok: bool = True) -> subprocess.CompletedProcess[str]:
    """Run `python -m module words...` as a user would."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    line = [sys.executable, "-m", module, *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, cwd=cwd or ROOT)
    assert not ok or done.returncode == 0, done.stdout + done.stderr
    return done


def train(shards: str, *words: str) -> None:
    """Three short epochs of the Prototypical Classifier, the last two of them cleaning."""
    command(
        "pipeline.train", "--config", ROOT / "configs/digits.yaml", f"shards.url={shards}", "tracking.experiment=tests",
        "train.epochs=3", "model.width=4", "method.name=prototypical", "method.warmup_steps=4", "method.cleaning_start=0.34",
        "method.threshold=fixed", "method.threshold_start=0.12", "data.batch=128", *words,
    )  # fmt: skip
