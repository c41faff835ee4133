"""Parameters of a method, and which of them are trained."""

from __future__ import annotations

from torch import nn

from pipeline.methods.base import Method
from pipeline.models.network import Average


def parameters(method: Method) -> list[tuple[str, nn.Parameter]]:
    """All parameters by their state_dict names, which are the same with and without activation checkpointing."""
    return [(name.replace("_checkpoint_wrapped_module.", ""), p) for name, p in method.named_parameters()]


def trainable_parameters(method: Method) -> list[tuple[str, nn.Parameter]]:
    """Parameters to train: all but those inside an Average module."""
    averaged = {id(p) for module in method.modules() if isinstance(module, Average) for p in module.parameters()}
    return [(name, p) for name, p in parameters(method) if id(p) not in averaged]
