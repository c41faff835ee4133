"""Parameters of a method, and which of them are trained."""

from __future__ import annotations

from torch import nn

from pipeline.methods.base import Method
from pipeline.models.network import Average, Network
from shards.base.errors import UserError


def parameters(method: Method) -> list[tuple[str, nn.Parameter]]:
    """All parameters by their state_dict names, which are the same with and without activation checkpointing."""
    return [(name.replace("_checkpoint_wrapped_module.", ""), p) for name, p in method.named_parameters()]


def trainable_parameters(method: Method) -> list[tuple[str, nn.Parameter]]:
    """Parameters that are trained at some time: all but those inside an Average module and those that model.freeze=true
    lets rest for the whole training."""
    rest = {id(p) for module in method.modules() if isinstance(module, Average) for p in module.parameters()}
    if method.config.model.freeze is True:
        rest |= {id(p) for network in networks(method) for p in network.backbone.parameters()}
    return [(name, p) for name, p in parameters(method) if id(p) not in rest]


def trained_parameters(method: Method, prefixes: tuple[str, ...]) -> dict[str, nn.Parameter]:
    """Parameters that are trained in this epoch: those with these prefixes that do not rest."""
    rest = {id(p) for network in networks(method) if network.frozen for p in network.backbone.parameters()}
    found = {n: p for n, p in trainable_parameters(method) if n.startswith(prefixes) and id(p) not in rest}
    if not found:
        raise UserError(
            f"model.freeze leaves nothing to train in a stage that trains {', '.join(prefixes)}. Set model.freeze=false, or "
            "choose another method."
        )
    return found


def require_gradients(method: Method, trained: dict[str, nn.Parameter]) -> None:
    """Gradients for these parameters and no others."""
    for name, parameter in parameters(method):
        parameter.requires_grad_(name in trained)
        parameter.grad = None


def networks(method: Method) -> list[Network]:
    return [module for module in method.modules() if isinstance(module, Network)]
