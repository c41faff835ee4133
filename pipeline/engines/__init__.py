"""Runs the optimiser step: plain torch, DistributedDataParallel or DeepSpeed."""

from __future__ import annotations

from pipeline.config import Config
from pipeline.distributed.world import World
from pipeline.engines.engine import Engine
from pipeline.methods.base import Method


def make_engine(config: Config, method: Method, world: World) -> Engine:
    if config.engine == "deepspeed":
        from pipeline.engines.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(config, method, world)
    from pipeline.engines.ddp import TorchEngine

    return TorchEngine(config, method, world)
