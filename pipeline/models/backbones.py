"""Backbones by name: PreAct ResNet-18 of our own, everything else from timm."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor, nn

from pipeline.config import Config, ModelConfig
from pipeline.models import timm_models
from pipeline.models.batchnorm import CountedRows
from pipeline.models.preact_resnet import PreActResNet18
from pipeline.models.pretrained import find_weights, load_weights
from shards.base.errors import UserError


class FeatureInput(nn.Module):
    """Stands where the backbone would be in a network that starts from stored features."""

    def forward(self, features: Tensor) -> Tensor:
        return features


def input_shape(config: Config) -> tuple[int, ...]:
    """The shape of one input of the network: (D,) for stored features, else (3, S, S)."""
    size = config.data.size
    return (feature_width(config.model),) if config.model.from_features else (3, size, size)


def feature_width(config: ModelConfig) -> int:
    """The number of features of the backbone."""
    return _width(config.backbone, config.width)


@lru_cache
def _width(backbone: str, width: int) -> int:
    with torch.device("meta"):  # without weights, in a moment
        return build_backbone(ModelConfig(backbone=backbone, width=width))[1]


def build_backbone(config: ModelConfig) -> tuple[nn.Module, int]:
    """(module from images to pooled features, number of features)."""
    weights = find_weights(config.backbone, config.pretrained) if config.pretrained else None
    if config.backbone == timm_models.OWN:
        own = PreActResNet18(config.width, config.norm)
        backbone: nn.Module = own
        features = own.features
    else:
        backbone = timm_models.create(config.backbone, str(weights.file) if weights and weights.by_timm else "")
        features = int(backbone.num_features)  # type: ignore[arg-type]
    if weights and not weights.by_timm:
        load_weights(backbone, config, weights.file)
    return backbone, features


def checkpoint_activations(backbone: nn.Module, name: str, rows: CountedRows) -> None:
    """Recompute the inside of the repeated blocks in the backward pass."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    blocks = set(_repeated_blocks(backbone))
    if not blocks:
        raise UserError(
            f"model.checkpoint_activations: {name} has no sequence of blocks. Switch it off, or use gradient accumulation (optim.accumulate)."
        )

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Called in the forward pass: a context for it, and one for its recomputation, where the same rows count."""
        return nullcontext(), rows.use(rows.mask, recomputing=True)

    def wrap(module: nn.Module) -> nn.Module:
        return checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.NO_REENTRANT, context_fn=contexts)

    apply_activation_checkpointing(backbone, checkpoint_wrapper_fn=wrap, check_fn=lambda m: m in blocks)


def _repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost elements of sequences that hold several layers with weights."""
    sequence, blocks = (nn.Sequential, nn.ModuleList), []
    for child in module.children():
        layers = sum(p.ndim > 1 for p in child.parameters())
        if isinstance(module, sequence) and not isinstance(child, sequence) and layers > 1:
            blocks.append(child)
        else:
            blocks += _repeated_blocks(child)
    return blocks


def layer_numbers(backbone: nn.Module) -> tuple[dict[int, int], int]:
    """The layer of every parameter, by its id, and how many blocks there are. 0 is what stands before the first block; what
    stands behind a block counts with it."""
    blocks = _smallest_blocks(backbone)
    inside = {id(p): number for number, block in enumerate(blocks, 1) for p in block.parameters()}
    found, layer = {}, 0
    for parameter in backbone.parameters():
        found[id(parameter)] = layer = inside.get(id(parameter), layer)
    return found, len(blocks)


def _smallest_blocks(module: nn.Module) -> list[nn.Module]:
    """Repeated blocks that hold no others: of a stage of several blocks each block."""
    return [inner for block in _repeated_blocks(module) for inner in _smallest_blocks(block) or [block]]
