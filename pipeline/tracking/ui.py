"""How to see runs in MLflow: the line to type and the address to open."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

from pipeline.config import TrackingConfig
from shards.base.errors import UserError
from shards.base.redact import redact

LOCAL = "http://127.0.0.1:5000"


def ui_line(uri: str, experiment: str) -> str:
    """What opens the runs of an experiment. Asks MLflow for its id, so only commands call it."""
    from pipeline.tracking.mlflow_sync import mlflow_client

    found = None
    try:
        with mlflow_client(uri) as client:
            found = client.get_experiment_by_name(experiment)
    except UserError:  # a server that is away still has an address
        pass
    return ui_line_of_id(uri, found.experiment_id if found else "")


def ui_line_of_id(uri: str, experiment_id: str) -> str:
    """The same where the id is known; an empty one leads to the list of experiments."""
    page = f"/#/experiments/{experiment_id}/runs" if experiment_id else ""
    if uri.startswith(("http://", "https://")):
        return redact(uri.rstrip("/")) + page
    return f"{_mlflow()} ui --backend-store-uri {shlex.quote(redact(uri))}   then open {LOCAL}{page}"


def _mlflow() -> str:
    """The command as it can be typed: with its folder where that is not on the path of this shell."""
    beside = Path(sys.executable).with_name("mlflow")
    if shutil.which("mlflow") or not beside.is_file():
        return "mlflow"
    here = Path.cwd()
    inside = beside.is_relative_to(here) and beside.parent != here  # a bare name is looked for on the path
    return shlex.quote(str(beside.relative_to(here) if inside else beside))


def where_tracked(config: TrackingConfig) -> str:
    """One line for the log: where the run goes, after file, command line and environment were read."""
    if not config.uri:
        return "MLflow: none (tracking.uri is empty); the journal keeps everything"
    return f"MLflow: experiment {config.experiment} at {redact(config.uri)}"
