"""The backbone of a self-supervised start, kept for other runs: they take the file as `model.pretrained`."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from pipeline.config import Config
from pipeline.models.pretrained import START_FILE, START_NOTE, weights_digest
from pipeline.process.log import log
from shards.base.files import atomic_write
from shards.base.redact import redact_all

FOLDER = "simclr"
MADE_BY = ("seed", "data", "model", "optim", "train")  # settings on which it depends


def write_backbone(backbone: nn.Module, config: Config, manifest: str) -> Path:
    """Write the weights, and a note of what made them, below the folder of the run."""
    from safetensors.torch import save

    folder = Path(config.output) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in backbone.state_dict().items()}
    atomic_write(folder / START_FILE, save(tensors))
    settings = redact_all(config.model_dump(mode="json", include=set(MADE_BY)))
    note = {"manifest": manifest, "weights": weights_digest(backbone), "settings": settings}
    atomic_write(folder / START_NOTE, json.dumps(note, indent=1) + "\n")
    log.info("the self-supervised start is done; other runs begin with it by model.pretrained=%s", folder / START_FILE)
    return folder / START_FILE
