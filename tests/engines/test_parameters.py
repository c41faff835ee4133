"""Which parameters an optimiser may move: the type of the module decides, not its name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rivals import Pictures, batch_of, make_method, small_config
from torch import Tensor, nn

from pipeline.data.batch import Batch, TrainingSet
from pipeline.distributed.world import World
from pipeline.engines import parameters
from pipeline.engines.ddp import TorchEngine
from pipeline.methods.base import Stage
from pipeline.methods.cross_entropy import CrossEntropy
from pipeline.models.network import Average

AVERAGED = {
    "cross_entropy": "average.",
    "dividemix": "average.",
    "sfa": "balanced_average.",
    "dasc": "projectors_average.",
    "mopro": "key_average.",
    "elr_plus": "average.",
}


def names(method: nn.Module) -> set[str]:
    return {name for name, _ in parameters.trainable_parameters(method)}


class Weighted(CrossEntropy):
    """Its own layer has a name that ends like that of a moving average."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.weighted_average = nn.Linear(self.network.features, self.data.classes)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        features, _ = self.network(batch.views["weak"], batch.mask)
        loss = nn.functional.cross_entropy(self.weighted_average(features), batch.label)
        return {"loss": loss}


def test_a_layer_called_weighted_average_is_trained() -> None:
    config, world = small_config({"name": "cross_entropy"}, model={"ema": 0.9}), World()
    method = Weighted(config, TrainingSet(Pictures().given, 3, 0, 16), world).double()
    engine = TorchEngine(config, method, world)
    engine.begin_stage(Stage("train", epochs=1), resuming=False)
    before = method.weighted_average.weight.detach().clone()
    averaged = method.average.network.head.weight.detach().clone()
    engine.step(batch_of(method, 8), 0.1)
    assert {"weighted_average.weight", "weighted_average.bias"} <= names(method)
    assert not torch.equal(method.weighted_average.weight, before)
    assert torch.equal(method.average.network.head.weight, averaged)  # the network's own head had no gradient


@pytest.mark.parametrize("name", AVERAGED)
def test_no_moving_average_of_any_method_is_trained(name: str) -> None:
    ema = {} if name == "elr_plus" else {"ema": 0.9}
    options = {"queue": 24} if name == "mopro" else {}
    method = make_method(small_config({"name": name, **options}, model=ema), Pictures().given, 3)
    everything = {key for key, _ in method.named_parameters()}
    averaged = everything - names(method)
    assert averaged == {key for key in everything if "average." in key}
    assert any(key.startswith(AVERAGED[name]) for key in averaged)


def test_an_average_is_known_by_its_type_wherever_it_lies_and_with_recomputed_activations() -> None:
    config = small_config({"name": "cross_entropy"}, model={"checkpoint_activations": True})
    method = make_method(config, np.array([0, 1, 2], np.int32), 3)
    plain = names(method)
    assert not any("_checkpoint_wrapped_module" in name for name in plain)
    method.teachers = nn.ModuleDict({"slow": Average(method.network, 0.9)})
    assert names(method) == plain
    assert {name for name, _ in parameters.parameters(method)} == plain | {
        name.replace("network.", "teachers.slow.network.", 1) for name in plain
    }
