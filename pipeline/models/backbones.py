"""Backbones by name: PreAct ResNet-18 of our own, everything else from timm."""

from __future__ import annotations

import difflib
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch import nn

from pipeline.config import ModelConfig
from pipeline.models.batchnorm import CountedRows
from pipeline.models.preact_resnet import PreActResNet18
from shards.base.errors import UserError


def build_backbone(config: ModelConfig) -> tuple[nn.Module, int]:
    """(module from images to pooled features, number of features)."""
    if config.backbone == "preact_resnet18":
        own = PreActResNet18(config.width, config.norm)
        backbone: nn.Module = own
        features = own.features
    else:
        backbone, features = _timm(config.backbone)
    if config.pretrained:
        _load_weights(backbone, config.pretrained)
    return backbone, features


def _timm(name: str) -> tuple[nn.Module, int]:
    from pipeline.models import torchvision_compat

    torchvision_compat.patch_torchvision()
    import timm

    if name not in timm.list_models():
        matches = difflib.get_close_matches(name, ["preact_resnet18", *timm.list_models()], 1)
        hint = f" Did you mean '{matches[0]}'?" if matches else " timm.list_models() names them all."
        raise UserError(f"model.backbone: there is no backbone '{name}'.{hint}")
    # drop_rate=0 because the ports the papers trained have no dropout before the head
    model = timm.create_model(name, pretrained=False, num_classes=0, drop_rate=0.0)
    return model, int(model.num_features)  # type: ignore[arg-type]


def _load_weights(backbone: nn.Module, path: str) -> None:
    from safetensors.torch import load_file

    if not Path(path).is_file() or not path.endswith(".safetensors"):
        raise UserError(
            f"model.pretrained: {path} is not a .safetensors file on this machine. Convert the weights first; pickles are never loaded."
        )
    weights = load_file(path)
    try:
        missing, unexpected = backbone.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise UserError(
            f"model.pretrained: {path} holds weights of other shapes. {str(error).splitlines()[-1].strip()}"
        ) from None
    if missing:
        raise UserError(
            f"model.pretrained: {path} lacks {len(missing)} weights of the backbone, for example {missing[0]}. Use weights of the same architecture."
        )
    del unexpected  # a head beside the backbone is normal in published weights


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
