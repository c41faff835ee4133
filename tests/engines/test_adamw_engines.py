"""AdamW with groups and a backbone that thaws: DeepSpeed in every ZeRO stage does what DDP does, and each loads the other's
state. Each function runs on a rank; the tests judge what the ranks return."""

from __future__ import annotations

import os
from typing import Any

import pytest
from engine_bench import Bench, apart, copied, poisoned, same, small
from ranks import on_started_ranks
from torch import Tensor

from pipeline.config import Config
from pipeline.distributed.world import World
from shards.base.settings import merge

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
ENGINES: dict[Any, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    **{stage: {"engine": "deepspeed", "deepspeed": {"stage": stage}} for stage in range(4)},
}
SETTINGS: dict[str, Any] = {
    "data": {"batch": 12},
    "model": {"width": 4, "norm": "batch", "freeze": 1, "ema": 0.5},
    "optim": {"name": "adamw", "decay_norms": False, "layer_decay": 0.8, "backbone_scale": 0.5, "weight_decay": 0.1},
}
LR = 1e-3


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Here once, rather than in every forked rank."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.runtime.zero.muon.muon_optimizer

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def started(world: World, url: str, config: Config, epoch: int, state: Any = None) -> Bench:
    bench = Bench(world, url, config)
    enter(bench, epoch)
    if state is not None:
        bench.engine.load_model_state_dict(copied(state["weights"]))
        bench.engine.load_optimizer_state_dict(state["engine"])
    return bench


def enter(bench: Bench, epoch: int) -> None:
    bench.method.set_epoch(bench.stage, epoch)
    bench.engine.set_trainable(bench.method.stages()[bench.stage].trainable)
    bench.method.train()


def state_of(bench: Bench) -> dict[str, Any]:
    engine: Any = dict(bench.engine.optimizer_state_dict())
    tensors = {key: copied(engine[key]) for key in ("exp_avg", "exp_avg_sq")}
    return {"weights": bench.weights(), "engine": {**engine, **tensors}}


def thawed(world: World, url: str) -> dict[Any, list[dict[str, Any]]]:
    """States of every engine: at the start, after two steps of the head, after another that is skipped and two of everything,
    and after one more by an engine of another kind that took over."""
    found = {}
    configs = {name: small(**merge(SETTINGS, engine)) for name, engine in ENGINES.items()}
    for name, config in configs.items():
        bench = started(world, url, config, epoch=0)
        states = [{"weights": bench.weights()}]
        bench.steps(24, lr=LR)
        states.append(state_of(bench))
        for batch in bench.batches(12, 3):
            bench.engine.step(poisoned(batch), LR)
        enter(bench, epoch=1)
        bench.steps(24, order_key=1, lr=LR)
        states.append(state_of(bench))
        bench.engine.close()
        other = started(world, url, configs[1 if name == "ddp" else "ddp"], 1, states[-1])
        other.steps(12, order_key=2, lr=LR)
        states.append(state_of(other))
        other.engine.close()
        found[name] = states
    return found


def backbone(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in weights.items() if key.startswith("network.backbone.")}


@pytest.mark.parametrize("ranks", [1, 2])
def test_adamw_and_a_thaw_are_the_same_in_every_engine(digits: str, ranks: int) -> None:
    for of_rank in on_started_ranks(ranks, thawed, digits):
        expected = of_rank["ddp"]
        assert same(backbone(expected[1]["weights"]), backbone(expected[0]["weights"]))
        assert apart(backbone(expected[2]["weights"]), backbone(expected[0]["weights"])) > 1e-4
        for name, states in of_rank.items():
            assert same(backbone(states[1]["weights"]), backbone(states[0]["weights"])), name
            for state, wanted in zip(states[1:], expected[1:]):
                assert apart(state["weights"], wanted["weights"]) < 1e-3, name
                for key in ("exp_avg", "exp_avg_sq"):
                    trained = {n: value for n, value in wanted["engine"][key].items() if n in state["engine"][key]}
                    assert apart(state["engine"][key], trained) < 1e-3, (name, key)
            steps = states[2]["engine"]["steps"]
            assert (steps["network.head.bias"], steps["network.backbone.stem.0.weight"]) == (4, 2), name
            assert states[3]["engine"]["steps"] == {n: count + 1 for n, count in steps.items()}, name
