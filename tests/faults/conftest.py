from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import JOBS, settings, train

from shards.build import ensure
from shards.config import BuildConfig


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digits, long-tailed and mislabelled: a couple of hundred samples in several shards."""
    place = tmp_path_factory.mktemp("shards") / "small"
    return ensure(BuildConfig(output=str(place), largest=60, shard_samples=40))


@pytest.fixture(scope="session")
def count(small: str) -> int:
    """Training samples in it."""
    from shards.reader import open_split

    return len(open_split(small))


@pytest.fixture(scope="session")
def undisturbed(small: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Warm-up, surveys, cleaning in the second epoch, evaluation: to the end in one go."""
    output = tmp_path_factory.mktemp("undisturbed")
    train(settings(small, output))
    return output


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def _no_job_outlives_its_test() -> Iterator[None]:
    yield
    while JOBS:
        JOBS.pop().kill()
