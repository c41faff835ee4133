"""Where DeepSpeed would do otherwise than DDP: half-precision gradients, channels_last, odd numbers of parameters.

Each function runs on a rank, with every ZeRO stage; the tests judge what the ranks return.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_bench import Bench, apart, copied, small
from PIL import Image
from ranks import on_ranks, on_started_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.config import Config
from pipeline.distributed.world import World
from shards.base.settings import merge

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
ZERO = (0, 1, 2, 3)
ENGINES: dict[Any, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    **{stage: {"engine": "deepspeed", "deepspeed": {"stage": stage}} for stage in ZERO},
}


class Reductions(TorchDispatchMode):
    """Numbers that were summed over ranks, by type."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "reduce" in func.name():
            for tensor in torch.utils._pytree.tree_leaves(args):
                if isinstance(tensor, Tensor):
                    self.numbers[tensor.dtype] += tensor.numel()
        return func(*args, **(kwargs or {}))


def half_precision_step(world: World, url: str, own: str) -> dict[Any, Any]:
    """One step in bf16. Momentum after the first step is the gradient, with weight decay."""
    found = {}
    asked = {("half", stage): merge(ENGINES[stage], {"deepspeed": {"config": own}}) for stage in ZERO}
    for name, engine in {**ENGINES, **asked}.items():
        bench = Bench(world, url, small(data={"batch": 16}, model={"width": 4}, train={"precision": "bf16"}, **engine))
        with Reductions() as reductions:
            bench.steps(16)
        momentum = copied(bench.engine.optimizer_state_dict()["momentum"])
        found[name] = reductions.numbers, momentum, bench.weights()
    return found


def stopped_and_resumed(world: World, url: str, config: Config) -> dict[str, Any]:
    """A step of everything, then two of the head, without and with a new start between them."""
    bench = Bench(world, url, config)
    layout = {name: p.stride() for name, p in bench.method.named_parameters()}
    in_channels_last = set()

    def look(module: nn.Module, args: Any, out: Tensor) -> None:
        if out.shape[-1] > 1:  # a single pixel lies in both layouts
            in_channels_last.add(out.is_contiguous(memory_format=torch.channels_last))

    for module in bench.method.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(look)
    bench.steps(16)
    bench.engine.set_trainable(("network.head",))
    bench.steps(16, order_key=1)
    state, weights = bench.engine.optimizer_state_dict(), bench.weights()
    resumed = Bench(world, url, config)
    resumed.engine.set_trainable(("network.head",))
    resumed.engine.load_model_state_dict(weights)
    resumed.engine.load_optimizer_state_dict({**state, "momentum": copied(state["momentum"])})
    for one in (bench, resumed):
        one.steps(16, order_key=2)
    bench.engine.close()
    return {
        "weights": bench.weights(),
        "momentum": copied(bench.engine.optimizer_state_dict()["momentum"]),
        "resumed": resumed.weights(),
        "resumed momentum": copied(resumed.engine.optimizer_state_dict()["momentum"]),
        "channels_last": in_channels_last,
        "layout": layout == {name: p.stride() for name, p in bench.method.named_parameters()},
    }


def in_all_engines(world: World, url: str, settings: dict[str, Any]) -> dict[Any, Any]:
    return {
        name: stopped_and_resumed(world, url, small(**merge({"data": {"batch": 12}, **settings}, engine)))
        for name, engine in ENGINES.items()
    }


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Here once, rather than in every forked rank."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.runtime.zero.muon.muon_optimizer

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


@pytest.fixture(scope="module")
def three_classes(tmp_path_factory: pytest.TempPathFactory) -> str:
    from shards.build import ensure
    from shards.config import BuildConfig

    place, noise = tmp_path_factory.mktemp("three"), np.random.default_rng(0)
    for label in "abc":
        (place / "raw" / label).mkdir(parents=True)
        for number in range(16):
            picture = noise.integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(picture).save(place / "raw" / label / f"{number}.png")
    return ensure(BuildConfig(source="folder", path=str(place / "raw"), output=str(place / "shards")))


def check_like_ddp(found: list[dict[Any, Any]]) -> None:
    for of_rank in found:
        for name in ENGINES:
            for key in ("weights", "momentum"):
                assert apart(of_rank[name][key], found[0]["ddp"][key]) < 1e-3, (name, key)
                again = of_rank[name]["resumed" if key == "weights" else "resumed momentum"]
                assert apart(again, of_rank[name][key]) < 1e-5, (name, key)
            assert of_rank[name]["layout"], name


def test_gradients_of_half_precision_layers_travel_in_fp32_unless_asked_for(three_classes: str, tmp_path: Path) -> None:
    own = tmp_path / "half.json"
    layers = ["torch.nn.Conv2d", "torch.nn.Linear"]
    half = {"communication_data_type": "bf16", "torch_autocast": {"lower_precision_safe_modules": layers}}
    own.write_text(json.dumps(half))
    for found in on_ranks(2, half_precision_step, three_classes, str(own)):
        _, gradient, weights = found["ddp"]
        learn = sum(tensor.numel() for tensor in gradient.values())
        for stage in ZERO:
            numbers, its_gradient, its_weights = found[stage]
            assert numbers[torch.bfloat16] == 0
            assert numbers[torch.float32] >= learn
            assert apart(its_gradient, gradient) < 1e-5
            assert apart(its_weights, weights) < 1e-5
            assert found["half", stage][0][torch.bfloat16] > learn / 2
            assert apart(found["half", stage][1], gradient) > 1e-4


def test_channels_last_weights_learn_what_they_learn_in_ddp_and_get_their_layout_back(three_classes: str) -> None:
    # Not narrower: torch's own channels_last convolution corrupts memory with 4 channels on CPU.
    model = {"width": 8, "norm": "batch", "ema": 0.5, "channels_last": True}
    found = on_ranks(2, in_all_engines, three_classes, {"model": model})
    check_like_ddp(found)
    assert all(of_rank[name]["channels_last"] == {True} for of_rank in found for name in ENGINES)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_odd_number_of_parameters_learns_what_it_learns_in_ddp(three_classes: str, ranks: int) -> None:
    found = on_started_ranks(ranks, in_all_engines, three_classes, {"model": {"width": 4}})
    check_like_ddp(found)
    momentum = found[0]["ddp"]["momentum"]
    everything, head = ([m.numel() for name, m in momentum.items() if part in name] for part in ("", "network.head"))
    assert sum(everything) % 2
    assert sum(head) % 2
