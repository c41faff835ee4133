"""Builds that the tests of shards share."""

from __future__ import annotations

from pathlib import Path

import pytest
from shards_help import Build

from shards.build import ensure
from shards.config import BuildConfig


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command writes to the current folder does not end in the checkout."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Build shards with these options; returns where they are. `said` collects what was logged."""

    def run(output: str = "out", **options: object) -> str:
        run.said = []  # type: ignore[attr-defined]
        run.tmp = tmp_path  # type: ignore[attr-defined]
        tree = {"output": str(tmp_path / output), **options}
        return ensure(BuildConfig.model_validate(tree), run.said.append)  # type: ignore[attr-defined]

    return run
