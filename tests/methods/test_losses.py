"""Each loss against a slow, obvious version in float64, and the same on any number of ranks."""

import math

import numpy as np
import pytest
import torch
from ranks import on_ranks
from torch.nn.functional import normalize

from pipeline.distributed.world import World
from pipeline.methods.parts.losses import (
    cross_entropy,
    instance_contrastive,
    nt_xent,
    prototype_logits,
    soft_cross_entropy,
)
from pipeline.models.precision import full_precision


def rows(seed: int, n: int = 7, d: int = 5) -> torch.Tensor:
    return normalize(torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d))), dim=1)


def slow_contrastive(weak: torch.Tensor, strong: torch.Tensor, temperature: float) -> float:
    """The formula as written: one positive, 2(B-1) negatives, anchors are weak views."""
    total = 0.0
    for i in range(len(weak)):
        positive = math.exp(float(weak[i] @ strong[i]) / temperature)
        others = [b for b in range(len(weak)) if b != i]
        negatives = sum(math.exp(float(weak[i] @ weak[b]) / temperature) for b in others)
        negatives += sum(math.exp(float(weak[i] @ strong[b]) / temperature) for b in others)
        total -= math.log(positive / (positive + negatives))
    return total / len(weak)


def test_contrastive_loss_is_the_formula() -> None:
    weak, strong = rows(0), rows(1)
    found = instance_contrastive(weak, strong, torch.ones(7), 0.3, World(), (7,))
    assert float(found) == pytest.approx(slow_contrastive(weak, strong, 0.3), rel=1e-9)


def test_contrastive_loss_ignores_rows_that_stand_for_nothing() -> None:
    weak, strong = rows(0), rows(1)
    valid = torch.tensor([1.0, 1, 0, 1, 1, 0, 1])
    kept = valid > 0
    found = instance_contrastive(weak, strong, valid, 0.3, World(), (7,))
    assert float(found) == pytest.approx(slow_contrastive(weak[kept], strong[kept], 0.3), rel=1e-9)


def test_nt_xent_has_both_views_as_anchors() -> None:
    first, second = rows(0), rows(1)
    valid = torch.tensor([1.0, 1, 0, 1, 1, 0, 1])
    for mask in (torch.ones(7), valid):
        a, b = first[mask > 0], second[mask > 0]
        expected = (slow_contrastive(a, b, 0.3) + slow_contrastive(b, a, 0.3)) / 2
        assert float(nt_xent(first, second, mask, 0.3, World(), (7,))) == pytest.approx(expected, rel=1e-9)


def test_weighted_losses_are_weighted_means() -> None:
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(rng.normal(size=(6, 4)))
    label = torch.from_numpy(rng.integers(0, 4, 6))
    weight = torch.from_numpy(rng.random(6))
    target = torch.from_numpy(rng.dirichlet(np.ones(4), 6))
    log_p = logits - logits.exp().sum(1, keepdim=True).log()
    hard = sum(-w * log_p[i, y] for i, (w, y) in enumerate(zip(weight, label))) / weight.sum()
    soft = sum(-w * (target[i] * log_p[i]).sum() for i, w in enumerate(weight)) / weight.sum()
    assert float(cross_entropy(logits, label, weight, World())) == pytest.approx(float(hard), rel=1e-12)
    assert float(soft_cross_entropy(logits, target, weight, World())) == pytest.approx(float(soft), rel=1e-12)


def test_a_batch_without_weight_gives_zero_and_finite_gradients() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    loss = cross_entropy(logits, torch.zeros(3, dtype=torch.long), torch.zeros(3), World())
    loss.backward()
    assert float(loss) == 0
    assert torch.isfinite(logits.grad).all()


def test_zero_embeddings_give_finite_losses() -> None:
    z = torch.zeros(4, 5, requires_grad=True)
    loss = (
        instance_contrastive(z, z, torch.ones(4), 0.3, World(), (4,))
        + prototype_logits(z, torch.zeros(3, 5), 0.3).sum()
    )
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(z.grad).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_leave_autocast(dtype) -> None:
    seen = []

    @full_precision
    def look(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append((a @ b).dtype)
        return a @ b

    with torch.autocast("cpu", dtype=dtype):
        half = torch.randn(3, 3) @ torch.randn(3, 3)
        assert half.dtype == dtype
        assert look(half, half).dtype == torch.float32
        loss = instance_contrastive(normalize(half), normalize(half), torch.ones(3), 0.3, World(), (3,))
    assert seen == [torch.float32]
    assert loss.dtype == torch.float32


def contrastive_gradient(world: World, cut: list[int], both: bool) -> tuple[float, torch.Tensor]:
    """Loss and gradient of the weak rows this rank holds, as an engine that averages over ranks would see them."""
    start = sum(cut[: world.rank])
    mine = slice(start, start + cut[world.rank])
    weak = rows(0, sum(cut))[mine].clone().requires_grad_()
    strong = rows(1, sum(cut))[mine].clone().requires_grad_()
    loss = (nt_xent if both else instance_contrastive)(weak, strong, torch.ones(len(weak)), 0.3, world, cut)
    loss.backward()
    return float(loss) / world.size, torch.cat([weak.grad, strong.grad], 1) / world.size


@pytest.mark.dist
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("cut", [[4, 4], [5, 3], [2, 2, 3, 1]])
def test_contrastive_gradients_do_not_depend_on_ranks(cut, both) -> None:
    alone_loss, alone_grad = on_ranks(1, contrastive_gradient, [sum(cut)], both)[0]
    parts = on_ranks(len(cut), contrastive_gradient, cut, both)
    assert sum(loss for loss, _ in parts) == pytest.approx(alone_loss, rel=1e-9)
    assert torch.allclose(torch.cat([grad for _, grad in parts]), alone_grad, atol=1e-12)
