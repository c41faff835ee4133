"""Which parameters a method has, and which of them an optimiser may move."""

from __future__ import annotations

from torch import nn

from pipeline.methods.base import Method


def parameters(method: Method) -> list[tuple[str, nn.Parameter]]:
    """By the names of the state_dict, which do not tell whether activations are recomputed."""
    return [(name.replace("_checkpoint_wrapped_module.", ""), p) for name, p in method.named_parameters()]


def trainable_parameters(method: Method) -> list[tuple[str, nn.Parameter]]:
    """Parameters an optimiser may move: all but those of moving averages."""
    return [(name, p) for name, p in parameters(method) if "average." not in name]
