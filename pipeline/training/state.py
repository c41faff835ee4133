"""What a checkpoint of a training holds."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from torch import Tensor

from pipeline.engines.engine import OptimizerState


class FeaturesState(TypedDict):
    url: str  # where they were
    digest: str  # of shards, backbone, weights and preprocessing


class DataState(TypedDict):
    manifest: str  # hash
    classes: list[str]
    given_counts: list[int]  # opens the model where the shards are not
    clean_counts: NotRequired[list[int]]  # many, medium and few wherever the model is evaluated; missing in older ones
    features: NotRequired[FeaturesState]  # of a run on stored features


class Effort(TypedDict):
    seconds: float
    images: float
    train_seconds: float
    wait_seconds: NotRequired[float]  # missing in older checkpoints


class TrainingState(TypedDict):
    config: dict[str, Any]  # the settings, secrets removed
    data: DataState
    position: dict[str, Any]  # fields of Position
    method: dict[str, Tensor]  # weights, beliefs, prototypes
    engine: OptimizerState
    history: list[dict[str, float]]  # metrics of every finished epoch
    epoch_metrics: dict[str, float]
    loss_sums: dict[str, Tensor]  # (R,) one per rank
    tracking: dict[str, Any]  # MLflow run and journal offset
    effort: Effort
