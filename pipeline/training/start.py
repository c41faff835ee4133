"""Begin where another run ended: its backbone, its head and, on the same shards, what it believed (`model.start`)."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.checkpoints.checkpointer import read_checkpoint
from pipeline.config import Config
from pipeline.features.encoder import stored_encoder
from pipeline.methods.base import Method
from pipeline.process.log import log
from shards.base.errors import UserError
from shards.base.settings import validate

BACKBONE, AVERAGE = "network.backbone.", "average."


def start_from(method: Method, config: Config, manifest: str) -> None:
    """Fill the method from the newest checkpoint of the run `model.start`. `manifest`: hash of the shards in use."""
    run, loaded = config.model.start, read_checkpoint(config.model.start)
    tensors: dict[str, Tensor] = dict(loaded.tree["method"])
    theirs = validate(Config, loaded.tree["config"], run)
    _compare(theirs, config, run)
    if theirs.model.from_features and not config.model.from_features:
        url = loaded.tree["data"]["features"]["url"]
        weights = stored_encoder(theirs, url, torch.device("cpu")).state_dict()
        tensors |= {f"{BACKBONE}{name}": value for name, value in weights.items()}
    same_shards = loaded.tree["data"]["manifest"] == manifest
    own, samples = method.state_dict(), len(method.data)
    taken: dict[str, Tensor] = {}
    for name, value in own.items():
        found = tensors.get(name.removeprefix(AVERAGE) if name not in tensors else name)
        per_sample = value.ndim > 0 and len(value) == samples
        if found is not None and found.shape == value.shape and (same_shards or not per_sample):
            taken[name] = found
    needed = {"network.head.weight", *(name for name in own if name.startswith((BACKBONE, "network.head.")))}
    if missing := sorted(needed - taken.keys()):
        raise UserError(
            f"model.start: {run} cannot be the start of {config.method.name}: {len(missing)} tensors do not fit, such as "
            f"{missing[0]}. Both need one network, the same backbone and the same classes."
        )
    method.load_state_dict(taken, strict=False)
    others = sorted({name.partition(".")[0] for name in taken} - {"network", "average"})
    beliefs = f" and {', '.join(others)}" if others else "; what it believed is of other shards" * (not same_shards)
    log.info("started from %s (%s): weights%s", run, loaded.name, beliefs)


def _compare(theirs: Config, ours: Config, run: str) -> None:
    """The head is of use only behind the same features."""
    for key in ("backbone", "width", "norm", "feature_norm"):
        then, now = getattr(theirs.model, key), getattr(ours.model, key)
        if then != now:
            raise UserError(f"model.start: {run} has model.{key}={then}, here it is {now}. Set model.{key}={then}.")
