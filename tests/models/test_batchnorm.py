"""Batch norm over ranks: one rank and many have the same statistics, outputs and gradients; padding has no part in them."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from pipeline.config import ModelConfig
from pipeline.distributed.world import World
from pipeline.models.backbones import build_backbone
from pipeline.models.batchnorm import BatchNorm, CountedRows, convert_batchnorm
from pipeline.models.network import Network
from shards.base.errors import UserError
from tests.ranks import on_ranks

ROOT = Path(__file__).parents[2]


def named_backbones() -> list[str]:
    """Backbones of the config files and the docs."""
    configs = [yaml.safe_load(path.read_text()) for path in (ROOT / "configs").glob("*.yaml")]
    found = {config["model"]["backbone"] for config in configs if "backbone" in config.get("model", {})}
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        found |= set(re.findall(r"model\.backbone=([a-z0-9_.]+)", page.read_text()))
    return sorted(found | {"efficientnet_b0"})  # it has the same normalisation with activation


def randomised(module: nn.Module) -> nn.Module:
    """Running statistics and scales as after some training."""
    generator = torch.Generator().manual_seed(0)
    for m in module.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            for tensor, low in ((m.weight, 0.5), (m.bias, -0.5), (m.running_mean, -0.5), (m.running_var, 0.5)):
                tensor.data.uniform_(low, low + 1, generator=generator)
    return module


@pytest.mark.parametrize("name", named_backbones())
def test_a_converted_backbone_equals_the_original_to_the_bit(name: str) -> None:
    torch.manual_seed(0)
    original = randomised(build_backbone(ModelConfig(backbone=name, width=8))[0]).eval()
    converted = convert_batchnorm(copy.deepcopy(original), CountedRows()).eval()
    assert original.state_dict().keys() == converted.state_dict().keys()
    assert any(isinstance(m, BatchNorm) for m in converted.modules())
    images = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        assert torch.equal(original(images), converted(images))


def test_a_network_on_one_rank_trains_as_torchs_own_to_the_bit() -> None:
    torch.manual_seed(0)
    network = Network(ModelConfig(width=4), 3, World())
    torch.manual_seed(0)
    plain = build_backbone(ModelConfig(width=4))[0]
    images = torch.randn(6, 3, 16, 16)
    assert torch.equal(network(images, None)[0], plain(images))
    assert all(torch.equal(v, network.backbone.state_dict()[k]) for k, v in plain.state_dict().items())


def test_an_unknown_normalisation_is_refused() -> None:
    class Own(nn.BatchNorm2d):
        pass

    with pytest.raises(UserError, match="Own keeps running statistics"):
        convert_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 1), Own(4)), CountedRows())


CASES: dict[str, tuple[list[int], list[list[float]]]] = {  # rows by rank, and which of them count
    "equal": ([4, 4], [[1] * 4, [1] * 4]),
    "unequal": ([5, 3], [[1] * 5, [1] * 3]),
    "padding": ([6, 2], [[1, 1, 1, 1, 0, 1], [0, 0]]),
    "one row": ([2, 2], [[1, 0], [0, 0]]),
}


def batch_norm_of(world: World, rows: list[int], counts: list[list[float]], features: int, area: int) -> dict[str, Any]:
    """This rank's part of a batch through a batch norm with an activation, forward and backward."""
    torch.manual_seed(0)
    start = sum(rows[: world.rank]) if world.size > 1 else 0
    stop = start + rows[world.rank] if world.size > 1 else sum(rows)
    shape = (sum(rows), features, area, area) if area else (sum(rows), features)
    x = (torch.randn(shape) * 3 + 2)[start:stop].requires_grad_()
    weights = torch.randn(shape)[start:stop]
    mask = torch.tensor([value for part in counts for value in part])[start:stop]
    rows_ = CountedRows(world)
    norm = BatchNorm(randomised(nn.BatchNorm2d(features) if area else nn.BatchNorm1d(features)), rows_)  # type: ignore[arg-type]
    with rows_.use(None if mask.all() else mask):
        out = norm(x)
    counted = mask.view(-1, *[1] * (x.ndim - 1))
    (out.square() * weights * counted).sum().backward()
    return {
        "out": out.detach(),
        "dx": x.grad,
        "weight": norm.weight.grad,
        "bias": norm.bias.grad,
        "mean": norm.running_mean,
        "var": norm.running_var,
        "mask": mask,
    }


def reference(rows: list[int], counts: list[list[float]], features: int, area: int) -> dict[str, Tensor]:
    """torch's own batch norm, of the rows that count and nothing else."""
    torch.manual_seed(0)
    shape = (sum(rows), features, area, area) if area else (sum(rows), features)
    mask = torch.tensor([value for part in counts for value in part]) > 0
    x = (torch.randn(shape) * 3 + 2)[mask].double().requires_grad_()
    weights = torch.randn(shape)[mask]
    norm = randomised(nn.BatchNorm2d(features) if area else nn.BatchNorm1d(features)).double()
    out = norm(x)
    (out.square() * weights).sum().backward()
    return {"out": out, "dx": x.grad, "weight": norm.weight.grad, "bias": norm.bias.grad,
            "mean": norm.running_mean, "var": norm.running_var}  # type: ignore[dict-item]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "area"),  # torch's own refuses a single value per channel
    [(case, area) for case in CASES for area in (0, 5) if (case, area) != ("one row", 0)],
)
@pytest.mark.parametrize("size", [1, 2])
def test_statistics_and_gradients_are_those_of_the_rows_that_count(size: int, case: str, area: int) -> None:
    rows, counts = CASES[case]
    parts = on_ranks(size, batch_norm_of, rows, counts, 3, area)
    whole = reference(rows, counts, 3, area)
    mask = torch.cat([part["mask"] for part in parts]) > 0
    for name in ("out", "dx"):
        value = torch.cat([part[name] for part in parts])[mask]
        torch.testing.assert_close(value.double(), whole[name], rtol=1e-4, atol=1e-5)
    for name in ("weight", "bias"):
        value = torch.stack([part[name] for part in parts]).sum(0)
        torch.testing.assert_close(value.double(), whole[name], rtol=1e-4, atol=1e-5)
    for name in ("mean", "var"):
        for part in parts:
            torch.testing.assert_close(part[name].double(), whole[name], rtol=1e-5, atol=1e-6)
            assert torch.equal(part[name], parts[0][name])
    assert all((part["dx"][part["mask"] == 0] == 0).all() for part in parts)


def second_gradient(world: World, shared: bool) -> Tensor:
    """The gradient of a gradient's norm, as HAR takes it."""
    torch.manual_seed(0)
    x = torch.randn(8, 3, 4, 4, dtype=torch.float64)
    mask = torch.tensor([1.0] * 5 + [0, 1, 1])
    part = slice(4 * world.rank, 4 * world.rank + 4) if world.size > 1 else slice(0, 8)
    rows = CountedRows(world)
    norm = BatchNorm(randomised(nn.BatchNorm2d(3)), rows).double()  # type: ignore[arg-type]
    x, mask = x[part].requires_grad_(), mask[part]
    with rows.use(mask):
        out = norm(x)
    loss = (out.square().sum((1, 2, 3)) * mask).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (gradient.square().sum((1, 2, 3)) * mask).sum().backward()
    assert x.grad is not None
    return x.grad


def test_second_gradients_are_the_same_on_two_ranks_and_right() -> None:
    one, two = on_ranks(1, second_gradient, False)[0], torch.cat(on_ranks(2, second_gradient, True))
    torch.testing.assert_close(two, one)

    torch.manual_seed(0)
    images = torch.randn(8, 3, 4, 4, dtype=torch.float64)
    keep = torch.tensor([True] * 5 + [False, True, True])
    x = images[keep].requires_grad_()
    norm = randomised(nn.BatchNorm2d(3)).double()
    (gradient,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(one[keep], x.grad)
    assert (one[~keep] == 0).all()


@pytest.mark.parametrize("backbone", ["preact_resnet18", "resnet18"])
def test_recomputation_updates_running_statistics_once_and_keeps_the_mask(backbone: str) -> None:
    """Three forward passes with different rows, then the backward pass, as in a step of the method."""
    images, mask = torch.randn(8, 3, 32, 32), torch.tensor([1.0] * 6 + [0, 0])
    states, gradients = [], []
    for saving in (False, True):
        torch.manual_seed(0)
        network = Network(ModelConfig(backbone=backbone, width=4, checkpoint_activations=saving), 3, World())
        outputs = [
            network(images[:4], None)[1],
            network(images, mask)[1],
            network(torch.cat([images, images]), mask)[1],
        ]
        sum((out.square() * (torch.arange(3) + 1)).sum() for out in outputs).backward()  # type: ignore[union-attr]
        names = {n.replace("_checkpoint_wrapped_module.", ""): p for n, p in network.named_parameters()}
        states.append(network.state_dict())
        gradients.append({n: p.grad for n, p in names.items()})
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][n], states[1][n]) for n in states[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_half_precision_keeps_its_type_and_its_statistics() -> None:
    torch.manual_seed(0)
    x, rows = torch.randn(8, 4, 6, 6) + 1, CountedRows()
    exact, half = (BatchNorm(nn.BatchNorm2d(4), rows) for _ in range(2))
    with rows.use(torch.tensor([1.0] * 7 + [0])):
        exact(x.bfloat16().float())
        out = half(x.bfloat16().requires_grad_())
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(half.running_mean, exact.running_mean)
    torch.testing.assert_close(half.running_var, exact.running_var)
