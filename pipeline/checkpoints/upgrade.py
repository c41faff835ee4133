"""Checkpoints and models of version 0.1 use other names for some things. They are renamed when read."""

from __future__ import annotations

from typing import Any

Tree = dict[str, Any]

_KEYS = {"found": "epoch_metrics", "sums": "loss_sums"}
_POSITION = {"begun": "epoch_started", "walk": "pass_index", "steps": "global_step"}
_ENGINE = {"bad": "nonfinite_steps"}
_DATA = {"ahead": "prefetch"}
_LATER: dict[str, Tree] = {  # settings that came later, with the value that was in use before
    "shards": {"validation": 0.0},
    "train": {"tf32": True, "evaluate_every": 1},
    "data": {"feature_views": 4, "interpolation": "bilinear", "contrast_area": [0.2, 1.0]},
    "model": {
        "freeze": False,
        "freeze_statistics": False,
        "feature_norm": "none",
        "from_features": False,
        "start_part": 0.0,
        "start_temperature": 0.5,
    },
    "optim": {
        "name": "sgd",
        "betas": [0.9, 0.999],
        "decay_norms": True,
        "backbone_scale": 1.0,
        "layer_decay": 1.0,
        "schedule_by": "epoch",
    },
}
_PARAMS = {"data.ahead": "data.prefetch", "data.cache.ahead": "data.cache.prefetch"}


def upgrade_checkpoint(tree: Tree) -> Tree:
    tree = _renamed(tree, _KEYS)
    for section, names in (("position", _POSITION), ("engine", _ENGINE)):
        if section in tree:
            tree[section] = _renamed(tree[section], names)
    if "config" in tree:
        tree["config"] = upgrade_config(tree["config"])
    return tree


def upgrade_config(tree: Tree) -> Tree:
    """Settings stored with a checkpoint or a model."""
    tree = {**tree, **{section: later | tree[section] for section, later in _LATER.items() if section in tree}}
    if "data" not in tree:
        return tree
    data = _renamed(tree["data"], _DATA)
    if "cache" in data:
        data["cache"] = _renamed(data["cache"], _DATA)
    return {**tree, "data": data}


def upgrade_params(params: dict[str, str]) -> dict[str, str]:
    """The parameters of an MLflow run (settings by their dotted names)."""
    later = {f"{section}.{key}": str(value) for section, keys in _LATER.items() for key, value in keys.items()}
    return later | _renamed(params, _PARAMS)


def _renamed(tree: Tree, names: dict[str, str]) -> Tree:
    return {names.get(key, key): value for key, value in tree.items()}
