"""Open a RUN: an output folder, a checkpoint, an MLflow run id or an MLflow model."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.checkpoints.checkpointer import Loaded, read_checkpoint
from pipeline.data.feature_loader import FeatureLoader
from pipeline.data.loader import Loader, open_loader
from pipeline.distributed.device import choose_device, use_device
from pipeline.distributed.world import World
from pipeline.features.encoder import stored_encoder
from pipeline.features.write import encoding_loader
from pipeline.inference.model import MODEL_INFO, Model, load_exported, placeholder_labels, restore
from pipeline.process.torch_settings import apply_torch_settings
from pipeline.tracking.tracker import tracking_uri
from shards.base.errors import UserError
from shards.base.redact import one_line, redact
from shards.base.settings import validate
from shards.config import BuildConfig
from shards.features import FeatureSplit, read_features
from shards.reader import Split, open_split, read_manifest

_RUN_ID = re.compile(r"[0-9a-f]{32}")


@dataclass
class OpenedRun:
    """A trained model and where it came from."""

    name: str
    model: Model
    position: dict[str, int] | None = None  # of the training, if this is a checkpoint
    shards: str = ""  # where its training data was
    run_id: str = ""  # its MLflow run, if known
    features: str = ""  # where the features it was trained on were

    def split(self, name: str, url: str = "") -> Split:
        """A split of the run's own shards, or of those at `url`; its classes must be the model's."""
        place = shards_url(self.name, url, self.shards)
        split = open_split(place, name, self.model.config.data.cache)
        if list(split.classes) != self.model.classes:
            raise UserError(
                f"{place} has other classes ({_first_few(split.classes)}) than {self.name} was trained for "
                f"({_first_few(self.model.classes)}). Give shards with the same classes."
            )
        return split

    def loader(self, split: Split, world: World) -> Loader:
        """Batches of a split as the method takes them."""
        model, config = self.model, self.model.config
        if not config.model.from_features:
            return open_loader(split, config.data, config.seed, world, 1, config.model.channels_last)
        about = read_features(self.features) if self.features else None
        if about is not None and about.shards == split.manifest.hash and split.name in about.splits:
            stored = FeatureSplit(self.features, split.name, about, config.data.cache)
            return FeatureLoader(split.given, stored, config.data, config.seed, world)
        assert model.encoder is not None
        return encoding_loader(split, config, model.encoder, world)


def _first_few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f", ... {len(names)} in all" if len(names) > 4 else "")


def shards_url(run: str, url: str, own: str) -> str:
    """Where the shards are: the given URL, else the run's own, if they are still there."""
    if url:
        return url
    try:
        read_manifest(own)
    except UserError as error:
        raise UserError(f"{error} {run} was trained on them; if they are elsewhere now, add shards=URL.") from None
    return own


def open_run(run: str, uri: str = "", best: bool = False, shards: str = "", own_labels: bool = False) -> OpenedRun:
    """The model of a run; this process computes as precisely as its training did. `best`: of the best checkpoint instead
    of the newest.

    `own_labels`: load the training labels too, from the run's shards or from `shards`; beliefs about single samples
    need them.
    """
    opened = _open(run, uri, best, shards, own_labels)
    apply_torch_settings(opened.model.config.train)
    return opened


def _open(run: str, uri: str, best: bool, shards: str, own_labels: bool) -> OpenedRun:
    if _RUN_ID.fullmatch(run) and not Path(run).exists():
        return _mlflow_run(run, tracking_uri(uri), best, shards, own_labels)
    single = run.startswith(("models:/", "runs:/")) or (Path(run) / MODEL_INFO).is_file()
    if single and best:
        raise UserError(f"best=true chooses among checkpoints, and {run} is one model. Give the run's folder or id.")
    if single:
        return _exported(Path(run), run) if Path(run).is_dir() else _mlflow_model(run, tracking_uri(uri))
    if "://" not in run and not Path(run).exists():
        raise UserError(f"There is no run '{run}': it is no folder, no URL and no MLflow run id.")
    return _checkpoint(run, read_checkpoint(run, best), shards, own_labels)


def _device() -> torch.device:
    """The GPU of this rank, or the first; the CPU where there is none."""
    device = choose_device(local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    use_device(device)
    return device


def _exported(folder: Path, name: str) -> OpenedRun:
    model = load_exported(folder, _device())
    return OpenedRun(name, model, shards=model.config.shards.place())


def _checkpoint(run: str, loaded: Loaded, shards: str, own_labels: bool) -> OpenedRun:
    tree: dict[str, Any] = loaded.tree
    data = tree["data"]
    place = validate(BuildConfig, tree["config"]["shards"], "shards").place()
    given: np.ndarray = placeholder_labels(data["given_counts"])
    if own_labels:
        split = open_split(shards_url(run, shards, place))
        if split.manifest.hash != data["manifest"]:
            raise UserError(f"{run} was trained on other shards than {shards or place}. Give its own by shards=URL.")
        given = split.given
    counts = data.get("clean_counts", data["given_counts"])
    features = data.get("features", {}).get("url", "")
    model = restore(
        tree["config"],
        data["classes"],
        given,
        counts,
        tree["method"],
        _device(),
        position=tree["position"],
        open_encoder=lambda config, device: stored_encoder(config, features, device),
    )
    run_id = tree.get("tracking", {}).get("run_id") or _run_id_of_summary(Path(run))
    return OpenedRun(f"{run} ({loaded.name})", model, tree["position"], place, run_id, features)


def _run_id_of_summary(run: Path) -> str:
    """The run id from the summary: a short run saves its last checkpoint before MLflow has answered."""
    for folder in (run, *run.parents[:2]):
        if (folder / "summary.json").is_file():
            return json.loads((folder / "summary.json").read_text(encoding="utf-8")).get("run_id") or ""
    return ""


def _mlflow_run(run_id: str, uri: str, best: bool, shards: str, own_labels: bool) -> OpenedRun:
    """From the run's checkpoints where they can be read, else from the model it logged, which has no per-sample
    state."""
    from mlflow import MlflowException

    from pipeline.tracking.mlflow_sync import JOB_TAG, mlflow_client

    with mlflow_client(uri) as client:
        try:
            run = client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise UserError(f"There is no run {run_id} at {redact(uri)}. Check the id and uri=.") from None
    for key in ("checkpoint.url", "output"):
        place = run.data.params.get(key, "")
        try:
            loaded = read_checkpoint(place, best) if place else None
        except UserError:  # on another machine, or removed
            continue
        # The same path may hold another run's checkpoints here.
        if loaded and loaded.tree.get("tracking", {}).get("job") == run.data.tags.get(JOB_TAG):
            return replace(_checkpoint(place, loaded, shards, own_labels), run_id=run_id)
    if best:
        raise UserError(f"The checkpoints of run {run_id} are not here; without best=true its final model is taken.")
    return _mlflow_model(f"runs:/{run_id}/model", uri)


def _mlflow_model(address: str, uri: str) -> OpenedRun:
    import tempfile

    import mlflow

    from pipeline.tracking.mlflow_sync import mlflow_client

    with tempfile.TemporaryDirectory() as folder:
        with mlflow_client(uri):
            try:
                mlflow.artifacts.download_artifacts(address, dst_path=folder)
            except (mlflow.MlflowException, OSError) as error:
                raise UserError(
                    f"The model {address} cannot be fetched from {redact(uri)}: {one_line(error)}."
                ) from None
        info = next(Path(folder).rglob(MODEL_INFO), None)
        if info is None:
            raise UserError(f"{address} is not a model of this project.")
        description = next(Path(folder).rglob("MLmodel"), None)
        run_id = mlflow.models.Model.load(str(description)).run_id if description else ""
        return replace(_exported(info.parent, address), run_id=run_id or "")
