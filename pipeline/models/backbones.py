"""Backbones by name: PreAct ResNet-18 of our own, everything else from timm."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from torch import nn

from pipeline.config import ModelConfig
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
    if config.checkpoint_activations:
        _checkpoint_activations(backbone, config.backbone)
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


def _checkpoint_activations(backbone: nn.Module, name: str) -> None:
    """Recompute the inside of the repeated blocks in the backward pass."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    repeated = {"PreActBlock", "Block35", "Block17", "Block8"}

    def wrap(module: nn.Module) -> nn.Module:
        norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        contexts = lambda: (nullcontext(), _frozen_running_stats(norms))  # noqa: E731, forward and recomputation
        return checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.NO_REENTRANT, context_fn=contexts)

    if not any(type(m).__name__ in repeated for m in backbone.modules()):
        if hasattr(backbone, "set_grad_checkpointing"):
            backbone.set_grad_checkpointing(True)  # type: ignore[operator]
            return
        raise UserError(
            f"model.checkpoint_activations: {name} has no blocks known to be repeated. Switch it off, or use gradient accumulation (optim.accumulate)."
        )
    apply_activation_checkpointing(
        backbone, checkpoint_wrapper_fn=wrap, check_fn=lambda m: type(m).__name__ in repeated
    )


@contextmanager
def _frozen_running_stats(norms: list[nn.modules.batchnorm._BatchNorm]) -> Iterator[None]:
    """The recomputed forward pass of a batch must not update running statistics a second time."""
    momenta = [norm.momentum for norm in norms]
    try:
        for norm in norms:
            norm.momentum = 0.0
        yield
    finally:
        for norm, momentum in zip(norms, momenta):
            norm.momentum = momentum
