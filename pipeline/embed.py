"""`python -m pipeline.embed SHARDS model.backbone=... model.pretrained=...`: store the features of a frozen backbone.

Training with data.loader=features does the same by itself where they are missing. Under torchrun all ranks share the work.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, NonNegativeInt

from pipeline.config import CONFIGS, Config, DataConfig, ModelConfig, TrainConfig
from pipeline.process.exit_status import run_rank
from shards.base import cli
from shards.base.settings import NoEffect, Settings, Tree, merge


class EmbedConfig(Settings):
    shards: str = Field(min_length=1, description="finished shards: a folder or URL")
    views: NonNegativeInt = Field(
        4, description="weak and strong views stored of every training sample; 0 = the test view stands for both"
    )
    output: NoEffect[str] = Field("", description="folder or URL for the features; empty = beside the shards")
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()


def _combine(file_tree: Tree, overrides: Tree) -> Tree:
    """Of a training's file only what decides the features."""
    return merge({key: file_tree[key] for key in ("data", "model", "train") if key in file_tree}, overrides)


COMMAND = cli.Command(
    "python -m pipeline.embed",
    "Store what a frozen backbone makes of every sample, for training with data.loader=features.\n"
    "For more than one rank: torchrun --nproc_per_node=8 -m pipeline.embed SHARDS",
    EmbedConfig,
    words=("shards",),
    combine=_combine,
    configs=CONFIGS,
)


def as_training(config: EmbedConfig) -> Config:
    """The settings of a training on these features."""
    chosen: dict[str, Any] = {"loader": "features", "features": config.output, "feature_views": config.views}
    tree = config.model_dump(include={"data", "model", "train"}, exclude_unset=True)
    return Config.model_validate({**tree, "data": {**tree.get("data", {}), **chosen}, "shards": {"url": config.shards}})


def main(argv: list[str]) -> int:
    config = as_training(COMMAND.load(argv))
    from pipeline.distributed.world import init_distributed, shutdown_distributed
    from pipeline.features.write import ensure_features
    from pipeline.models.pretrained import with_weights_defaults
    from pipeline.models.timm_models import check_picture_size
    from pipeline.process.log import start_logging
    from pipeline.process.torch_settings import apply_torch_settings

    apply_torch_settings(config.train)
    world = init_distributed(config.train.device, config.train.timeout)
    start_logging(world.is_main)
    config = with_weights_defaults(config)
    check_picture_size(config.model.backbone, config.data.size)
    url = ensure_features(config, config.shards.url, world)
    shutdown_distributed()
    if world.is_main:
        print(f"Features: {url}. Train on them with data.loader=features and the same data.* and model.* settings.")
    return 0


def start() -> None:
    run_rank(main)


if __name__ == "__main__":
    start()
