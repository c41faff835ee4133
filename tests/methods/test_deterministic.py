"""With train.deterministic every method takes its steps, and asks for no operation that CUDA would refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rivals import Course
from test_rivals_together import METHODS, config_of
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.config import ModelConfig
from pipeline.models.backbones import build_backbone

# What has no deterministic CUDA kernel, by the documentation of torch.use_deterministic_algorithms (2.13). Cross-entropy
# of one label per picture is nll_loss, which has one; nll_loss2d has none.
REFUSED = {
    "avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward",
    "max_unpool2d", "max_unpool3d", "upsample_linear1d_backward", "upsample_bilinear2d_backward",
    "upsample_bicubic2d_backward", "upsample_trilinear3d_backward", "reflection_pad1d_backward",
    "reflection_pad2d_backward", "reflection_pad3d_backward", "nll_loss2d_forward", "_ctc_loss_backward", "put_", "histc",
    "median", "nanmedian", "kthvalue", "grid_sampler_2d_backward", "grid_sampler_3d_backward", "scatter_reduce",
}  # fmt: skip


class Refused(TorchDispatchMode):
    """Notes operations that torch refuses on CUDA in deterministic mode."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        sums = name in ("cumsum", "cumsum_") and torch.is_floating_point(args[0])
        weights = name == "bincount" and len(args) > 1 and args[1] is not None
        if name in REFUSED or sums or weights:
            self.found.add(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", METHODS)
def test_a_training_asks_for_nothing_that_would_be_refused(name: str) -> None:
    with Refused() as refused:
        for _ in Course(config_of(name, model={"norm": "batch"})).steps():
            pass
    assert refused.found == set()


def test_a_self_supervised_start_asks_for_nothing_that_would_be_refused() -> None:
    with Refused() as refused:
        for _ in Course(config_of("cross_entropy", model={"norm": "batch", "start": "simclr"})).steps():
            pass
    assert refused.found == set()


def test_the_paper_s_large_backbone_asks_for_nothing_that_would_be_refused() -> None:
    backbone, _ = build_backbone(ModelConfig(backbone="inception_resnet_v2"))
    with Refused() as refused:
        backbone(torch.randn(2, 3, 75, 75)).sum().backward()
    assert refused.found == set()


def test_what_would_be_refused_is_noticed() -> None:
    with Refused() as refused:
        torch.nn.AdaptiveAvgPool2d(2)(torch.randn(1, 2, 4, 4, requires_grad=True)).sum().backward()
        torch.ones(3).cumsum(0)
        torch.ones(3, dtype=torch.long).cumsum(0)
    assert refused.found == {"_adaptive_avg_pool2d_backward", "cumsum"}
