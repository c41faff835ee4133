"""The exported model as MLflow loads it: pictures in, a table of predictions out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.inference.model import Model, load_exported

if TYPE_CHECKING:
    import pandas as pd


class PyfuncModel:
    """What mlflow.pyfunc.load_model returns inside its wrapper."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> pd.DataFrame:
        import pandas as pd

        pictures = model_input["image"] if isinstance(model_input, pd.DataFrame) else model_input
        rows = []
        for prediction in self.model.predict(pictures):
            best = -1 if prediction.scores is None else int(prediction.scores.argmax())
            rows.append(
                {
                    "label": self.model.classes[best] if best >= 0 else "",
                    "class": best,
                    "score": float(prediction.scores[best]) if prediction.scores is not None else float("nan"),
                    "scores": prediction.scores.astype(float).tolist() if prediction.scores is not None else [],
                    "problem": prediction.problem,
                }
            )
        return pd.DataFrame(rows, columns=["label", "class", "score", "scores", "problem"])


def _load_pyfunc(data_path: str) -> PyfuncModel:
    """Called by mlflow (loader_module in MLmodel)."""
    return PyfuncModel(load_exported(Path(data_path)))
