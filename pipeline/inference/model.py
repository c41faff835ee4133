"""A trained model as plain files, and the same files as an MLflow model.

`model/` holds weights.safetensors and model.json (settings, classes, class counts), of a method on stored features
also backbone.safetensors: no pickle, nothing that can run. MLflow loads it through pipeline.exported. In any process with the package installed

    mlflow.pyfunc.load_model("runs:/RUN_ID/model").predict(pandas.DataFrame({"image": [picture, ...]}))

takes encoded pictures (bytes) or uint8 arrays (H,W,3) and returns label, class, score and all scores of each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor

from pipeline.checkpoints.upgrade import upgrade_config
from pipeline.config import Config
from pipeline.data.augment import normalise
from pipeline.data.batch import TrainingSet
from pipeline.data.crops import Views, center_crop
from pipeline.distributed.world import World
from pipeline.features.encoder import Encoder, encoder_of
from pipeline.methods.base import Method
from pipeline.methods.simclr import method_class
from pipeline.models.precision import autocast_for
from shards.base.errors import UserError
from shards.base.redact import redact_all
from shards.base.settings import Settings, merge, validate
from shards.decode import DecodeError, decode
from shards.features import BACKBONE

WEIGHTS, MODEL_INFO, FORMAT = "weights.safetensors", "model.json", 1
LARGE = 1 << 20
MAX_SAMPLES = 1 << 31
Picture = bytes | memoryview | np.ndarray
OpenEncoder = Callable[[Config, torch.device], Encoder]


@dataclass(frozen=True)
class Prediction:
    """The scores of one picture, or why there are none."""

    scores: np.ndarray | None  # (K,) probabilities of the main head
    problem: str = ""


class Model:
    """A method with its weights, ready for inference."""

    def __init__(
        self,
        config: Config,
        classes: Sequence[str],
        clean_counts: Sequence[int],
        method: Method,
        partial: bool = False,
        open_encoder: OpenEncoder | None = None,
    ) -> None:
        """`open_encoder`: of a method on stored features, how to get the backbone that made them."""
        self.config, self.classes, self.method = config, list(classes), method.eval()
        self._open_encoder = open_encoder
        self.partial = partial  # without its per-sample state: only the main head is complete
        self.clean_counts = np.asarray(clean_counts, np.int64)  # of the training set: many, medium, few
        self.views = Views(config.data)
        self.device = method.world.device
        self.autocast = autocast_for(config.train.precision, self.device)

    def prepare(self, picture: Picture) -> np.ndarray:
        """(size, size, 3) uint8: the test view of an encoded or decoded picture; raises DecodeError."""
        if isinstance(picture, np.ndarray):
            if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or not picture.size:
                raise DecodeError(f"an array must be uint8 (H,W,3), not {picture.dtype} {picture.shape}")
            whole = picture
        elif not isinstance(picture, bytes | bytearray | memoryview):
            raise DecodeError(f"a picture is bytes or a uint8 array, not {type(picture).__name__}")
        else:
            whole, _ = decode(picture, self.views.min_side)
        return center_crop(whole, self.views.short, self.config.data.size, self.config.data.interpolation)

    @cached_property
    def encoder(self) -> Encoder | None:
        """The frozen backbone before a method on stored features."""
        return self._open_encoder(self.config, self.device) if self._open_encoder else None

    def inputs(self, views: Sequence[np.ndarray]) -> Tensor:
        """(B,3,H,W) images, or (B,D) features of a method on stored features."""
        levels = torch.from_numpy(np.stack(views)).to(self.device).permute(0, 3, 1, 2)
        channels_last = self.config.model.channels_last or self.config.model.from_features
        layout = torch.channels_last if channels_last else torch.contiguous_format
        images = normalise(levels.contiguous(memory_format=layout), self.config.data.mean, self.config.data.std)
        return images if self.encoder is None else self.encoder(images)

    @torch.no_grad()
    def scores(self, inputs: Tensor) -> np.ndarray:
        """(B,K) probabilities of the main head."""
        with self.autocast:
            score = next(iter(self.method.scores(inputs).values()))
        return score.float().softmax(1).cpu().numpy()

    def predict(self, pictures: Iterable[Picture]) -> Iterator[Prediction]:
        """One prediction per picture, in order, computed in batches. A picture that cannot be read gets a `problem`."""
        waiting: list[tuple[np.ndarray | None, str]] = []
        for picture in pictures:
            try:
                waiting.append((self.prepare(picture), ""))
            except DecodeError as error:
                waiting.append((None, str(error)))
            if len(waiting) == self.config.data.eval_rows(1):
                yield from self._predict(waiting)
                waiting = []
        yield from self._predict(waiting)

    def _predict(self, waiting: list[tuple[np.ndarray | None, str]]) -> Iterator[Prediction]:
        views = [view for view, _ in waiting if view is not None]
        rows = iter(self.scores(self.inputs(views)) if views else ())
        for view, problem in waiting:
            yield Prediction(None, problem) if view is None else Prediction(next(rows))


# -- plain files -----------------------------------------------------------------------------------


def export_model(
    method: Method,
    config: Config,
    classes: Sequence[str],
    clean_counts: Sequence[int],
    folder: Path,
    encoder: Encoder | None = None,
) -> Path:
    """Write the model into `folder`. Large per-sample buffers of the method are left out.

    `encoder`: the backbone of a method on stored features, so that the model can classify pictures.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    buffers, state, samples = dict(method.named_buffers()), method.state_dict(), len(method.data)
    rows = {name for name, value in buffers.items() if value.ndim and len(value) == samples} | method.growing
    left_out = {name for name in rows & state.keys() if state[name].nbytes > LARGE}
    left_out |= method.tables if method.world.size > 1 else set()  # other ranks hold the other rows
    tensors = {n: value.detach().cpu().contiguous().clone() for n, value in state.items() if n not in left_out}
    save_file(tensors, folder / WEIGHTS)
    if encoder is not None:
        (folder / BACKBONE).write_bytes(encoder.to_bytes())
    info = {
        "format": FORMAT,
        "config": redact_all(config.model_dump(mode="json")),
        "classes": list(classes),
        "given_counts": method.data.counts.tolist(),
        "clean_counts": [int(count) for count in clean_counts],
        "left_out": sorted(left_out),
    }
    (folder / MODEL_INFO).write_text(json.dumps(info, indent=1) + "\n", encoding="utf-8")
    return folder


class ModelInfo(Settings):
    """model.json"""

    format: int
    config: dict[str, Any]
    classes: list[str] = Field(min_length=1)
    given_counts: list[NonNegativeInt]
    clean_counts: list[NonNegativeInt] = Field(default_factory=list)
    left_out: list[str]


def load_exported(folder: Path, device: torch.device | None = None) -> Model:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tree = json.loads((folder / MODEL_INFO).read_text(encoding="utf-8"))
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            raise ValueError(f"{MODEL_INFO} is not of format {FORMAT}")
        info = validate(ModelInfo, tree, str(folder / MODEL_INFO))
        if not len(info.classes) == len(info.given_counts) == len(info.clean_counts or info.classes):
            raise ValueError(f"{MODEL_INFO} does not count every class")
        if sum(info.given_counts) > MAX_SAMPLES:
            raise ValueError(f"{MODEL_INFO} counts more samples than there can be")
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{folder} does not hold a complete model ({error}). Take another copy of it.") from None
    given, counts = placeholder_labels(info.given_counts), info.clean_counts or info.given_counts

    def open_encoder(config: Config, device: torch.device) -> Encoder:
        try:
            return encoder_of(config, (folder / BACKBONE).read_bytes(), str(folder / BACKBONE), device)
        except OSError as error:
            raise UserError(f"{folder} does not hold a complete model ({error}). Take another copy of it.") from None

    left_out = set(info.left_out)
    return restore(info.config, info.classes, given, counts, tensors, device, left_out, open_encoder=open_encoder)


def placeholder_labels(given_counts: Sequence[int]) -> np.ndarray:
    """Labels with the right counts, for a model whose training set is not available."""
    return np.repeat(np.arange(len(given_counts), dtype=np.int32), given_counts)


def restore(
    config_tree: dict[str, Any],
    classes: Sequence[str],
    given: np.ndarray,
    clean_counts: Sequence[int],
    tensors: dict[str, Tensor],
    device: torch.device | None = None,
    left_out: set[str] | None = None,
    position: dict[str, Any] | None = None,
    open_encoder: OpenEncoder | None = None,
) -> Model:
    """The model from its settings and weights, at the end of its training or at `position`. Needs neither the shards
    nor a file of pretrained weights.
    """
    tree = merge(upgrade_config(config_tree), {"model": {"pretrained": "", "compile": False}})
    config = validate(Config, tree, "this model")
    data = TrainingSet(given, len(classes), config.seed, config.data.batch)
    world = World(device=device or torch.device("cpu"))
    method = method_class(config)(config, data, world)
    try:
        result = method.load_state_dict(tensors, strict=False)
    except RuntimeError as error:  # other shapes
        raise UserError(f"The weights do not fit {config.method.name}: {str(error).splitlines()[-1].strip()}") from None
    wrong = [*result.unexpected_keys, *(set(result.missing_keys) - (left_out or set()))]
    if wrong:
        raise UserError(f"The weights do not fit {config.method.name}: {', '.join(sorted(wrong)[:5])}.")
    method.set_epoch(*_last_epoch(method, position))
    return Model(
        config,
        classes,
        clean_counts,
        method.to(world.device),
        bool(left_out),
        open_encoder if config.model.from_features else None,
    )


def _last_epoch(method: Method, position: dict[str, Any] | None) -> tuple[int, int]:
    """(stage, epoch) that was started last."""
    stages = method.stages()
    if position is None or position["stage"] >= len(stages):
        return len(stages) - 1, max(stages[-1].epochs, 1) - 1
    return position["stage"], max(position["epoch"] - (not position["epoch_started"]), 0)
