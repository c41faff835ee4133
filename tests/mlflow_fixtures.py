"""A local MLflow database for tests; load it with pytest_plugins."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database; making its tables takes seconds, copying it does not."""
    from pipeline.shipping import connect

    database = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    connect(f"sqlite:///{database}")
    return database


@pytest.fixture
def database(migrated: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "store" / "mlflow.db"
    copy.parent.mkdir()
    copy.write_bytes(migrated.read_bytes())
    return copy
