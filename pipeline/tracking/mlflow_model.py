"""Upload an exported model as an MLflow model of its run, and register it if asked."""

from __future__ import annotations

import io
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from mlflow.models import ModelSignature


def log_model(uri: str, run_id: str, folder: Path, register_as: str = "") -> str:
    """Upload the exported folder as an MLflow model of the run, once; returns the model's id."""
    from mlflow import MlflowClient

    from pipeline.tracking.mlflow_sync import use_server

    use_server(uri)  # the registry uses this one, not the client's
    client = MlflowClient()
    run = client.get_run(run_id)
    known = run.outputs.model_outputs if run.outputs else []
    model_id = known[0].model_id if known else _upload(client, run, folder)
    if register_as and not client.search_model_versions(f"name = '{register_as}' and run_id = '{run_id}'"):
        _register(client, register_as, model_id, run_id)
    return model_id


def _upload(client: MlflowClient, run: Run, folder: Path) -> str:
    import mlflow
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    run_id = run.info.run_id
    signature, example = _signature()
    params = {key: value for key, value in run.data.params.items() if key in ("method.name", "seed", "train.epochs")}
    earlier = client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run_id}'")
    model = next(iter(earlier), None)  # of an attempt that was interrupted
    if model is None:
        model = client.create_logged_model(run.info.experiment_id, "model", run_id, params=params)
    with tempfile.TemporaryDirectory() as temporary:
        saved = Path(temporary) / "model"
        mlflow.pyfunc.save_model(
            str(saved),
            loader_module="pipeline.exported",
            data_path=str(folder),
            signature=signature,
            input_example=example,
            pip_requirements=_requirements(),
            mlflow_model=mlflow.models.Model(run_id=run_id, model_uuid=model.model_id, model_id=model.model_id),
        )
        client.log_model_artifacts(model.model_id, str(saved))
    client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
    return model.model_id


def _signature() -> tuple[ModelSignature, pd.DataFrame]:
    import pandas as pd
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema
    from mlflow.types.schema import Array
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.full((32, 32, 3), 128, np.uint8)).save(file, "png")
    answers: list[tuple[str, DataType | Array]] = [
        ("label", DataType.string), ("class", DataType.long), ("score", DataType.double),
        ("scores", Array(DataType.double)), ("problem", DataType.string),
    ]  # fmt: skip
    outputs = Schema([ColSpec(kind, name) for name, kind in answers])
    signature = ModelSignature(Schema([ColSpec(DataType.binary, "image")]), outputs)
    return signature, pd.DataFrame({"image": [file.getvalue()]})


def _requirements() -> list[str]:
    """This package and the packages its numbers depend on."""
    requirements = []
    for name in ("evenhand", "torch", "mlflow"):
        try:
            requirements.append(f"{name}=={version(name).partition('+')[0]}")
        except PackageNotFoundError:
            continue  # run from a source tree
    return requirements


def _register(client: MlflowClient, name: str, model_id: str, run_id: str) -> None:
    from mlflow import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    client.create_model_version(name, f"models:/{model_id}", run_id, model_id=model_id)
