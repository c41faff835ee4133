"""Opening a RUN: an output folder, a checkpoint, an MLflow run id or an MLflow model, whatever is at hand."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.exported import FACTS, Model, load_exported, restore, stand_in
from pipeline.journal import redact
from shards.settings import UserError

if TYPE_CHECKING:
    from shards.reader import Split

DEFAULT_URI = "sqlite:///runs/mlflow.db"
HELP = "output folder of a run, checkpoint (folder or URL), MLflow run id, or MLflow model (models:/NAME/1)"
_RUN_ID = re.compile(r"[0-9a-f]{32}")


@dataclass
class Opened:
    """A trained model and where it came from."""

    name: str
    model: Model
    position: dict[str, int] | None = None  # of the training, if this is a checkpoint
    shards: str = ""  # where its training data was
    run_id: str = ""  # its MLflow run, if known

    def split(self, name: str, url: str = "") -> Split:
        """A split of the run's own shards, or of those at `url`; its classes must be the model's."""
        from shards.reader import open_split

        data = self.model.config.data
        place = url or self.shards
        if not place:
            raise UserError(f"{self.name} does not say where its shards are. Give them with --shards.")
        split = open_split(place, name, data.cache)
        if list(split.classes) != self.model.classes:
            raise UserError(
                f"{place} has other classes ({_few(split.classes)}) than {self.name} was trained for "
                f"({_few(self.model.classes)}). Give shards with the same classes."
            )
        return split


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f", ... {len(names)} in all" if len(names) > 4 else "")


def tracking_uri(uri: str = "") -> str:
    return uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


def open_run(run: str, uri: str = "", best: bool = False, shards: str = "", own_labels: bool = False) -> Opened:
    """The model of a run. `best`: of the best checkpoint instead of the newest.

    `own_labels`: what the method believes of single samples is wanted, so the training labels must be the
    real ones, from the run's shards or from `shards`.
    """
    if run.startswith(("models:/", "runs:/")):
        return _mlflow_model(run, tracking_uri(uri))
    if _RUN_ID.fullmatch(run) and not Path(run).exists():
        return _mlflow_run(run, tracking_uri(uri), best, shards, own_labels)
    if (Path(run) / FACTS).is_file():
        model = load_exported(Path(run), _device())
        return Opened(run, model, shards=model.config.shards.place())
    return _checkpoint(run, best, shards, own_labels)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _checkpoint(run: str, best: bool, shards: str, own_labels: bool) -> Opened:
    from pipeline.checkpoint import read_checkpoint
    from shards.config import BuildConfig
    from shards.reader import open_split
    from shards.settings import validate

    if "://" not in run and not Path(run).exists():
        raise UserError(f"There is no run '{run}': it is no folder, no URL and no MLflow run id.")
    loaded = read_checkpoint(run, best)
    tree: dict[str, Any] = loaded.tree
    place = validate(BuildConfig, tree["config"]["shards"], "shards").place()
    given: np.ndarray = stand_in(tree["data"]["given_counts"])
    if own_labels:
        split = open_split(shards or place)
        if split.manifest.hash != tree["data"]["manifest"]:
            raise UserError(f"{run} was trained on other shards than {shards or place}. Give its own by --shards.")
        given = split.given
    model = restore(tree["config"], tree["data"]["classes"], given, tree["method"], _device())
    run_id = tree.get("tracking", {}).get("run_id") or ""
    return Opened(f"{run} ({loaded.name})", model, tree["position"], place, run_id)


def _mlflow_run(run_id: str, uri: str, best: bool, shards: str, own_labels: bool) -> Opened:
    """By the run's own checkpoints where they can be reached, else by the model it logged, which knows no
    single sample but can still judge them all."""
    from mlflow import MlflowException

    from pipeline.shipping import connect

    client, _ = connect(uri)
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        what = f"MLflow at {redact(uri)}: no run {run_id} ({error.error_code})"
        raise UserError(f"{what}. Check the id and --uri.") from None
    url, output = run.data.params.get("checkpoint.url", ""), run.data.params.get("output", "")
    for place in filter(None, (url, output)):
        if "://" in place or (Path(place) / "checkpoints").is_dir() or place == url:
            return replace(_checkpoint(place, best, shards, own_labels), run_id=run_id)
    return replace(_mlflow_model(f"runs:/{run_id}/model", uri), run_id=run_id)


def _mlflow_model(address: str, uri: str) -> Opened:
    import mlflow
    from mlflow import MlflowException

    from pipeline.shipping import connect

    _, clean = connect(uri)
    mlflow.set_tracking_uri(clean)
    try:
        folder = Path(mlflow.artifacts.download_artifacts(address))
    except (MlflowException, OSError) as error:
        reason = redact(str(error)).splitlines()[0]
        raise UserError(f"The model {address} cannot be fetched from {redact(uri)}: {reason}") from None
    found = list(folder.rglob(FACTS))
    if not found:
        raise UserError(f"{address} is not a model of this project.")
    model = load_exported(found[0].parent, _device())
    return Opened(address, model, shards=model.config.shards.place())
