"""Fine-tuning with every method: a frozen backbone rests to the bit, a thawed one learns; ranks and restarts change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks
from rivals import Course, Pictures, batch_of, make_method, small_config
from test_rivals_together import METHODS, PHASES, STEPLESS
from torch import Tensor, nn

from pipeline.config import Config
from pipeline.distributed.world import World
from pipeline.engines.ddp import TorchEngine
from pipeline.methods.base import Stage
from shards.base.errors import UserError
from shards.base.settings import merge

FINETUNING = {
    "optim": {
        "name": "adamw",
        "lr": 0.002,
        "schedule": "cosine",
        "schedule_by": "step",
        "warmup_epochs": 0.5,
        "decay_norms": False,
        "layer_decay": 0.8,
    },
    "model": {"norm": "batch", "freeze": 1},
}

WITH_STEPS = [name for name in METHODS if name not in STEPLESS]


def config_of(name: str, **sections: Any) -> Config:
    averages = {} if name == "elr_plus" else {"model": {"ema": 0.9}}
    sections = merge(merge(FINETUNING, averages), sections)
    return small_config({"name": name, **PHASES.get(name, {})}, **sections)


def backbones(run: Course) -> dict[str, Tensor]:
    """Weights and statistics of all backbones, averaged ones included."""
    return {key: v.clone() for key, v in run.method.state_dict().items() if "backbone." in key}


def finetune_all(world: World, samples: int, freeze: bool | int, epochs: int) -> dict[str, Any]:
    """Losses of every step, all state at the end, and in which (stage, epoch) a backbone or a head moved."""
    found = {}
    for name in WITH_STEPS:
        config = config_of(name, model={"freeze": freeze}, train={"epochs": epochs})
        run = Course(config, Pictures(samples), world=world, double=True)
        before, losses, moved = backbones(run), [], set()
        start = {key: v.clone() for key, v in run.method.state_dict().items()}
        for step in run.steps():
            losses.append(step)
            after = backbones(run)
            if not all(torch.equal(after[key], value) for key, value in before.items()):
                moved.add((run.position.stage, run.position.epoch))
            before = after
        state = run.state()["method"]
        heads = [key for key in state if "head." in key and not torch.equal(state[key], start[key])]
        found[name] = (losses, state, moved, heads)
    return found


@pytest.fixture(scope="module", params=["for an epoch", pytest.param("for ever", marks=pytest.mark.slow)])
def by_ranks(request: pytest.FixtureRequest) -> tuple[bool | int, list[dict[str, Any]]]:
    """Of one rank, then of each of two."""
    freeze, epochs = {"for an epoch": (1, 3), "for ever": (True, 2)}[request.param]
    return freeze, [r for size in (1, 2) for r in on_ranks(size, finetune_all, 19, freeze, epochs)]


@pytest.mark.dist
def test_a_frozen_backbone_does_not_move_by_one_bit_and_a_thawed_one_learns(by_ranks: Any) -> None:
    freeze, ranks = by_ranks
    for found in ranks:
        for name, (_, _, moved, heads) in found.items():
            assert heads, name
            if freeze is True:
                assert not moved, name
            else:
                assert moved, name
                assert all(epoch >= freeze for _, epoch in moved), name


@pytest.mark.dist
def test_two_ranks_compute_what_one_computes(by_ranks: Any) -> None:
    alone, *ranks = by_ranks[1]
    for name, (losses, state, _, _) in alone.items():
        for step, parts in enumerate(losses):
            mean = {part: sum(rank[name][0][step][part] for rank in ranks) / 2 for part in parts}
            assert mean == pytest.approx(parts, rel=1e-5, abs=1e-7), (name, step)
        for key, value in state.items():
            whole = ranks[0][name][1][key]
            gap = (whole.double() - value.double()).abs().max()
            assert gap <= 1e-4 * max(1.0, float(value.double().abs().max())), (name, key)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.parametrize("name", WITH_STEPS)
def test_a_restart_in_any_epoch_changes_not_one_bit(name: str) -> None:
    """From inside the frozen epoch and the first that is thawed, of the last stage that trains a backbone."""
    config = config_of(name)
    run, states = Course(config, Pictures(24)), []
    for _ in run.steps():
        states.append(run.state())
    places = [(s["position"]["stage"], s["position"]["epoch"]) for s in states]
    main = max(stage for stage, epoch in places if epoch == 1)
    for epoch in (0, 1):
        first = places.index((main, epoch))
        following = first + 2 + 2 * (epoch == 0)  # past the thaw
        again = Course(config, Pictures(24))
        again.load(states[first])
        for _ in zip(range(following - first), again.steps()):
            pass
        state = again.state()
        assert state["position"] == states[following]["position"]
        assert equal(state["method"], states[following]["method"])
        assert equal(state["engine"], states[following]["engine"])


def own_statistics(world: World) -> tuple[bool, bool]:
    """Each rank normalises by its own rows, and an average over ranks would round."""
    config = config_of("cross_entropy", model={"sync_batchnorm": False, "ema": 0.0})
    run = Course(config, Pictures(37), world=world)
    torch.manual_seed(1)
    for key, value in run.method.named_buffers():
        if "running" in key:
            value.uniform_(0.5, 1.5)
    start, moved = backbones(run), set()
    for _ in run.steps():
        if any(not torch.equal(v, start[key]) for key, v in backbones(run).items()):
            moved.add(run.position.epoch)
    return 0 in moved, 1 in moved


@pytest.mark.dist
def test_frozen_statistics_are_not_averaged_over_ranks() -> None:
    assert on_ranks(3, own_statistics) == [(False, True)] * 3


def test_har_keeps_its_loss_and_the_gradient_of_its_head_over_a_frozen_backbone() -> None:
    found = []
    for freeze in (False, True):
        config = small_config({"name": "har"}, model={"freeze": freeze})
        method = make_method(config, Pictures().given, 3).double()
        method.strengths.fill_(1.0)
        engine = TorchEngine(config, method, World())
        method.set_epoch(1, 0)
        engine.begin_stage(method.stages()[1], resuming=False)
        method.train()
        losses = method(batch_of(method, 8))
        losses["loss"].backward()
        found.append((losses, method.network.head.weight.grad, method.network.backbone.stem[0].weight.grad))
    (free, gradient, moves), (frozen, same, rests) = found
    assert float(free["har"].detach()) > 0
    assert all(torch.allclose(frozen[key], value) for key, value in free.items())
    assert torch.allclose(same, gradient)
    assert moves is not None
    assert rests is None


def test_a_backbone_that_rests_for_ever_has_no_place_in_the_optimiser() -> None:
    run = Course(config_of("cross_entropy", model={"freeze": True}))
    state = run.trainer.engine.optimizer_state_dict()
    assert set(state["exp_avg"]) == {"network.head.weight", "network.head.bias"}


def test_a_stage_with_nothing_to_train_is_answered_with_a_sentence() -> None:
    config = config_of("cross_entropy", model={"freeze": True})
    method = make_method(config, Pictures().given, 3)
    with pytest.raises(UserError, match=r"model\.freeze leaves nothing to train"):
        TorchEngine(config, method, World()).begin_stage(
            Stage("alone", epochs=1, trainable=("network.backbone",)), resuming=False
        )


def test_a_backbone_without_weights_may_be_frozen() -> None:
    config = small_config({"name": "cross_entropy"}, model={"freeze": True})
    method = make_method(config, Pictures().given, 3)
    method.network.backbone = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    method.network.head = nn.Linear(3, 3)
    engine = TorchEngine(config, method.double(), World())
    method.set_epoch(0, 0)
    engine.begin_stage(method.stages()[0], resuming=False)
    before = method.network.head.weight.detach().clone()
    engine.step(batch_of(method, 8), 0.1)
    assert not torch.equal(method.network.head.weight, before)
