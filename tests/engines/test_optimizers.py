"""Groups of parameters: which are decayed, and at which rate each layer learns; AdamW's state goes round."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_bench import Bench, apart, copied, make_trainer, poisoned, same, small
from rivals import Pictures, make_method, small_config
from torch import Tensor, nn

from pipeline.config import ModelConfig
from pipeline.distributed.world import World
from pipeline.engines.optimizers import parameter_groups
from pipeline.engines.parameters import trainable_parameters
from pipeline.models.backbones import build_backbone, layer_numbers

TINY = {"data": {"batch": 16}, "model": {"width": 4}}
PLAIN = {"momentum": 0.0, "weight_decay": 0.0}  # a step moves the weights by the rate times the gradient


def trained(url: str, **optim: Any) -> dict[str, Tensor]:
    """By how much one step moves every weight."""
    bench = Bench(World(), url, small(**TINY, optim=optim))
    before = bench.weights()
    bench.steps(16)
    return {name: value - before[name] for name, value in bench.weights().items()}


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_norms_and_biases_are_decayed_only_if_asked_for(digits: str, name: str) -> None:
    free = trained(digits, name=name, weight_decay=0.0)
    everything = trained(digits, name=name, weight_decay=0.5)
    some = trained(digits, name=name, weight_decay=0.5, decay_norms=False)
    for key, value in free.items():
        assert torch.equal(some[key], value if value.ndim <= 1 else everything[key]), key
        if key.endswith(("norm1.weight", "conv1.weight")):
            assert not torch.equal(everything[key], value)


def test_the_decay_of_adamw_does_not_pass_through_the_gradient(digits: str) -> None:
    bench = Bench(World(), digits, small(**TINY))
    start = bench.weights()
    free, decayed = (trained(digits, name="adamw", weight_decay=decay) for decay in (0.0, 0.5))
    expected = {name: value - 0.05 * 0.5 * start[name] for name, value in free.items()}
    assert apart(decayed, expected) < 1e-5


def test_the_first_step_of_adamw_has_the_length_of_the_rate(digits: str) -> None:
    moved = trained(digits, name="adamw", weight_decay=0.0)["network.head.weight"]
    assert torch.allclose(moved.abs(), torch.full_like(moved, 0.05), rtol=1e-2)


def test_the_backbone_learns_at_its_own_rate(digits: str) -> None:
    full, half = trained(digits, **PLAIN), trained(digits, **PLAIN, backbone_scale=0.5)
    expected = {name: value * (0.5 if ".backbone." in name else 1) for name, value in full.items()}
    assert apart(half, expected) < 1e-4


def test_the_rate_falls_from_the_last_block_to_the_stem() -> None:
    config = small_config({"name": "dividemix"}, optim={"layer_decay": 0.5, "backbone_scale": 0.1})
    method = make_method(config, Pictures().given, 3)
    learn = dict(trainable_parameters(method))
    rate = {id(p): group["rate"] for group in parameter_groups(method, learn, config.optim) for p in group["params"]}
    for n in range(2):
        found = {name: rate[id(p)] for name, p in learn.items() if name.startswith(f"networks.{n}.")}
        assert found[f"networks.{n}.head.bias"] == 1
        assert found[f"networks.{n}.backbone.stages.3.1.norm1.weight"] == 0.1 * 0.5
        assert found[f"networks.{n}.backbone.stages.3.0.shortcut.weight"] == 0.1 * 0.5**2
        assert found[f"networks.{n}.backbone.stages.0.0.conv1.weight"] == 0.1 * 0.5**8
        assert found[f"networks.{n}.backbone.stem.0.weight"] == 0.1 * 0.5**9


def test_one_group_holds_everything_if_nothing_is_asked_for() -> None:
    config = small_config({"name": "cross_entropy"})
    method = make_method(config, Pictures().given, 3)
    (group,) = parameter_groups(method, dict(trainable_parameters(method)), config.optim)
    assert (group["rate"], group["decays"]) == (1, True)


# name of a parameter: its layer; and how many blocks there are
LAYERS = {
    "resnet18": ({"conv1.weight": 0, "layer1.0.conv1.weight": 1, "layer4.1.bn2.bias": 8}, 8),
    "vit_tiny_patch16_224": ({"pos_embed": 0, "patch_embed.proj.weight": 0, "blocks.3.norm1.bias": 4, "norm.bias": 12}, 12),
    "convnext_atto": ({"stem.0.weight": 0, "stages.0.blocks.1.norm.weight": 2, "stages.3.blocks.1.mlp.fc1.bias": 12}, 12),
    "inception_resnet_v2": ({"conv2d_1a.conv.weight": 0, "repeat.9.conv2d.bias": 10, "conv2d_7b.bn.bias": 39}, 39),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_a_timm_model_are_its_blocks_in_order(name: str) -> None:
    expected, blocks = LAYERS[name]
    with torch.device("meta"):
        backbone, _ = build_backbone(ModelConfig(backbone=name))
    found, count = layer_numbers(backbone)
    by_name = {key: found[id(p)] for key, p in backbone.named_parameters()}
    assert {key: by_name[key] for key in expected} == expected
    assert count == blocks
    assert sorted(set(by_name.values())) == list(range(count + 1))


def test_a_backbone_without_parameters_has_no_layers() -> None:
    assert layer_numbers(nn.Identity()) == ({}, 0)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_state_of_adamw_goes_round_bit_for_bit(digits: str, precision: str) -> None:
    config = small(**TINY, optim={"name": "adamw"}, train={"precision": precision})
    first, second = (Bench(World(), digits, config) for _ in range(2))
    first.steps(32)
    first.engine.set_trainable(("network.head",))
    first.steps(16, order_key=1)
    state: Any = first.engine.optimizer_state_dict()
    tensors = {key: copied(state[key]) for key in ("exp_avg", "exp_avg_sq")}
    assert "momentum" not in state
    if precision == "fp32":
        assert (state["steps"]["network.head.bias"], state["steps"]["network.backbone.stem.0.weight"]) == (3, 2)
    second.engine.load_model_state_dict(first.weights())
    second.engine.load_optimizer_state_dict({**state, **tensors})
    for bench in (first, second):
        bench.engine.set_trainable(("",))
        bench.steps(32, order_key=2)
    assert same(first.weights(), second.weights())
    after: Any = second.engine.optimizer_state_dict()
    assert after["steps"] == first.engine.optimizer_state_dict()["steps"]


def test_a_skipped_step_of_adamw_is_not_counted(digits: str) -> None:
    bench = Bench(World(), digits, small(**TINY, optim={"name": "adamw"}))
    bench.steps(16)
    before = bench.weights()
    for batch in bench.batches(16, 1):
        bench.engine.step(poisoned(batch), 0.05)
    state: Any = bench.engine.optimizer_state_dict()
    assert same(before, bench.weights())
    assert set(state["steps"].values()) == {1}


@pytest.mark.parametrize("done", [5, 14])  # frozen, and thawed: an epoch has nine steps
def test_a_checkpoint_on_disk_restores_adamw_in_the_middle_of_an_epoch(digits: str, tmp_path: Path, done: int) -> None:
    config = small(
        model={"width": 4, "freeze": 1}, optim={"name": "adamw", "lr": 1e-3, "schedule_by": "step"}, train={"epochs": 2}
    )
    whole = make_trainer(World(), digits, str(tmp_path / "whole"), config)
    assert len(list(whole.steps())) == 18
    stopped = make_trainer(World(), digits, str(tmp_path / "stopped"), config)
    for _ in islice(stopped.steps(), done):
        pass
    stopped._save(wait=True)
    resumed = make_trainer(World(), digits, str(tmp_path / "stopped"), config)
    assert resumed.position.global_step == done
    assert len(list(resumed.steps())) == 18 - done
    assert same(resumed.method.state_dict(), whole.method.state_dict())
    after, expected = resumed.engine.optimizer_state_dict(), whole.engine.optimizer_state_dict()
    assert same(after["exp_avg_sq"], expected["exp_avg_sq"])
    assert after["steps"] == expected["steps"]
    assert set(after["steps"].values()) == {9, 18}
