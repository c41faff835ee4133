"""Optimisers: groups of parameters with their learning rates and weight decays, and state by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config import OptimConfig
from pipeline.engines.engine import OptimizerState
from pipeline.engines.parameters import networks
from pipeline.methods.base import Method
from pipeline.models.backbones import layer_numbers

# Tensors of an optimiser's state as a checkpoint and as torch name them.
STATE = {"sgd": {"momentum": "momentum_buffer"}, "adamw": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}}
Tensors = dict[str, dict[str, Tensor]]  # by the checkpoint's name, then by parameter


def state_names(optim: OptimConfig) -> dict[str, str]:
    """Of the tensors that this optimiser keeps of every parameter."""
    return {} if optim.name == "sgd" and not optim.momentum else STATE[optim.name]


def parameter_groups(
    method: Method, trained: Mapping[str, nn.Parameter], optim: OptimConfig, steps: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """One group for the parameters of equal learning rate, weight decay and, if given, steps done."""
    rates, groups = _rates(method, optim), dict[tuple[Any, ...], dict[str, Any]]()
    for name, parameter in trained.items():
        rate, decays = rates.get(id(parameter), 1.0), optim.decay_norms or parameter.ndim > 1
        done = steps.get(name, 0) if steps else 0
        group = groups.setdefault(
            (rate, decays, done), {"params": [], "rate": rate, "decays": decays, "steps_done": done}
        )
        group["params"].append(parameter)
    return list(groups.values())


def _rates(method: Method, optim: OptimConfig) -> dict[int, float]:
    """Factors on the learning rate of the parameters of backbones, by id. As in published recipes the last block already
    has one decay and the head has none."""
    found: dict[int, float] = {}
    for network in networks(method):
        layers, blocks = layer_numbers(network.backbone)
        found |= {i: optim.backbone_scale * optim.layer_decay ** (blocks + 1 - n) for i, n in layers.items()}
    return found


def make_optimizer(groups: list[dict[str, Any]], optim: OptimConfig, fused: bool = True) -> torch.optim.Optimizer:
    """`fused`, because a fused step can be skipped on the device (found_inf) without asking the host."""
    if optim.name == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, optim.lr, fused=fused)
    else:
        optimizer = torch.optim.SGD(groups, optim.lr, fused=fused)
    set_options(optimizer, optim)
    return optimizer


def set_options(optimizer: torch.optim.Optimizer, optim: OptimConfig) -> None:
    own = {"betas": optim.betas} if optim.name == "adamw" else {"momentum": optim.momentum}
    for group in optimizer.param_groups:
        group.update(own, weight_decay=optim.weight_decay if group["decays"] else 0.0)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["rate"]


def fresh_state(optim: OptimConfig, parameter: Tensor, steps: int = 0) -> dict[str, Tensor]:
    """Of one parameter, with averages of zero."""
    state = {theirs: torch.zeros_like(parameter) for theirs in STATE[optim.name].values()}
    if optim.name == "adamw":
        state["step"] = torch.full((), float(steps), dtype=torch.float32, device=parameter.device)
    return state


def saved_tensors(state: OptimizerState) -> Tensors:
    """The tensors of a saved state, those of either optimiser."""
    return {name: dict(state[name]) for names in STATE.values() for name in names if name in state}  # type: ignore[literal-required]
