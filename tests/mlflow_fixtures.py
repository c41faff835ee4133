"""A local MLflow database, and one small run trained for real; loaded with pytest_plugins."""

from __future__ import annotations

from pathlib import Path

import pytest
from trained import Trained, train


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database; making its tables takes seconds, copying it does not."""
    from pipeline.tracking.mlflow_sync import create_client

    database = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    create_client(f"sqlite:///{database}")
    return database


@pytest.fixture
def database(migrated: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "store" / "mlflow.db"
    copy.parent.mkdir()
    copy.write_bytes(migrated.read_bytes())
    return copy


@pytest.fixture(scope="session")
def trained(digits: str, migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The Prototypical Classifier, small and short, but cleaning, tracked and with its model logged."""
    place = tmp_path_factory.mktemp("trained")
    (place / "mlflow.db").write_bytes(migrated.read_bytes())
    run = Trained(place / "run", f"sqlite:///{place / 'mlflow.db'}", digits)
    train(digits, f"output={run.folder}", f"tracking.uri={run.uri}", "tracking.register_as=digits")
    return run
