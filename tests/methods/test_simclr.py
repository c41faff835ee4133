"""model.start=simclr: what a self-supervised start promises with any method."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from engine_bench import apart, make_trainer, small
from ranks import on_ranks
from rivals import Course, Pictures
from test_rivals_together import METHODS, STEPLESS, config_of

from pipeline.config import Config
from pipeline.data.batch import Batch
from pipeline.distributed.world import World
from pipeline.methods.base import Method
from pipeline.models.network import Average, Network
from pipeline.training.estimate import estimate

START = {"start": "simclr", "start_part": 0.67}  # two of three epochs


def started(name: str, **sections: Any) -> Config:
    model = {"norm": "batch", **({} if name == "elr_plus" else {"ema": 0.9}), **START, **sections.pop("model", {})}
    return config_of(name, model=model, **sections)


def networks(method: Method, averaged: bool = False) -> list[Network]:
    inside = {id(m) for average in method.modules() if isinstance(average, Average) for m in average.modules()}
    return [m for m in method.modules() if isinstance(m, Network) and (averaged or id(m) not in inside)]


def steps_in_start(run: Course) -> int:
    return 2 * run.trainer.loader.steps(run.method.passes()[0])


@pytest.mark.parametrize("name", METHODS)
def test_every_network_begins_with_the_backbone_that_has_learned_and_with_its_own_head(name: str) -> None:
    plain, run = (
        Course(config_of(name, model=started(name).model.model_dump() | {"start": "", "start_part": 0})),
        Course(started(name)),
    )
    before = {key: value.clone() for key, value in run.method.state_dict().items() if not key.startswith("start_")}
    assert all(torch.equal(value, plain.method.state_dict()[key]) for key, value in before.items())
    run.method.set_epoch(0, 0)
    count, losses = steps_in_start(run), []
    for found in islice(run.steps(), count):
        losses.append(found)
    assert all(set(found) == {"loss", "contrastive"} for found in losses)
    first, *_ = networks(run.method)
    moved = {
        key for key, value in run.method.state_dict().items() if key in before and not torch.equal(value, before[key])
    }
    prefix = next(key for key, module in run.method.named_modules() if module is first)
    assert moved
    assert all(key.startswith(f"{prefix}.backbone.") for key in moved)  # no head, average, table or belief
    learned = {key: value.clone() for key, value in first.backbone.state_dict().items()}

    seen: list[Batch] = []
    run.trainer.on_batch = lambda _, batch: seen.append(batch)
    run.trainer.engine.step = lambda batch, lr: {"loss": torch.zeros(())}  # type: ignore[method-assign, misc]
    list(islice(run.trainer.steps(), 1))
    assert run.method.get_submodule(prefix) is first
    if name not in STEPLESS:
        assert (run.position.stage, len(seen)) == (1, 1)
        plain_seen: list[Batch] = []
        plain.trainer.on_batch = lambda _, batch: plain_seen.append(batch)
        list(islice(plain.steps(), 1))
        assert torch.equal(seen[0].index, plain_seen[0].index)  # the order of a run without the start
        assert all(torch.equal(seen[0].views[view], value) for view, value in plain_seen[0].views.items())
    for network in networks(run.method, averaged=True):
        assert all(
            torch.equal(value, learned[key])
            for key, value in network.backbone.state_dict().items()
            if "running" not in key
        )
    assert not any(key.startswith("start_") for key in run.method.state_dict())
    heads = {name: value for name, value in run.method.state_dict().items() if ".head." in name}
    if name not in STEPLESS:  # which writes its head
        assert all(torch.equal(value, before[key]) for key, value in heads.items())


@pytest.mark.parametrize("name", METHODS)
def test_a_restart_inside_the_start_and_behind_it_changes_not_one_bit(name: str) -> None:
    config = started(name)
    run = Course(config)
    run.method.set_epoch(0, 0)
    count, losses, states = steps_in_start(run), [], []
    for found in islice(run.steps(), count + 2):
        losses.append(found)
        states.append(run.state())
    ends = [0, count // 2 - 1, count - 2, count - 1, len(states) - 2]
    for step in ends if name not in STEPLESS else ends[:3]:
        again = Course(config)
        again.load(states[step])
        assert list(islice(again.steps(), 1)) == losses[step + 1 : step + 2], step
        state = again.state()["method"]
        assert state.keys() == states[step + 1]["method"].keys()
        assert all(torch.equal(state[key], value) for key, value in states[step + 1]["method"].items()), step


def train_with_start(world: World, samples: int) -> dict[str, Any]:
    found = {}
    for name in ("cross_entropy", "sfa", "mopro", "aum"):
        run = Course(started(name, train={"epochs": 2}), Pictures(samples), world=world, double=True)
        found[name] = (list(run.steps()), run.state()["method"])
    return found


@pytest.mark.dist
@pytest.mark.parametrize(("size", "samples"), [(2, 19), (3, 29)])
def test_many_ranks_compute_what_one_computes(size: int, samples: int) -> None:
    """Batches of 16: the last is short, cut unevenly, and some ranks have nothing but padding of it."""
    alone = on_ranks(1, train_with_start, samples)[0]
    ranks = on_ranks(size, train_with_start, samples)
    for name, (losses, state) in alone.items():
        for step, parts in enumerate(losses):
            mean = {part: sum(rank[name][0][step][part] for rank in ranks) / size for part in parts}
            assert mean == pytest.approx(parts, rel=1e-7, abs=1e-9), (name, step)
        for key, value in state.items():
            whole = ranks[0][name][1][key]
            assert all(torch.equal(rank[name][1][key], whole) for rank in ranks), (name, key)
            gap = (whole.double() - value.double()).abs().max()
            assert gap <= 1e-6 * max(1.0, float(value.double().abs().max())), (name, key)


def test_the_start_is_the_same_for_every_method() -> None:
    """One and two networks, with a projector of its own and without: equal losses, so equal backbones."""
    runs = [
        Course(config_of(name, model={"norm": "batch", **START}))
        for name in ("cross_entropy", "prototypical", "dividemix", "har")
    ]
    courses = [[found["loss"] for found in islice(run.steps(), 6)] for run in runs]
    assert courses == [courses[0]] * len(courses)
    assert len(set(courses[0])) == 6


def test_the_loss_falls_and_views_of_one_picture_come_together() -> None:
    run = Course(started("cross_entropy", model={"width": 8, "start_part": 20}), Pictures(32))
    run.method.set_epoch(0, 0)
    losses = [found["loss"] for found in islice(run.steps(), 120)]
    assert np.mean(losses[:6]) > np.log(31) - 0.5  # one of 31 other views
    assert np.mean(losses[-6:]) < np.mean(losses[:6]) - 0.5


def test_pictures_that_do_not_decode_do_not_count() -> None:
    config = started("cross_entropy", data={"max_bad": 1.0})
    damaged, other = Pictures(), Pictures()
    for index in range(0, 40, 4):
        damaged.encoded[index] = b"no picture"
        other.encoded[index] = b"nor this"
    run = Course(config, damaged)
    losses = [found["loss"] for found in islice(run.steps(), 4)]
    assert np.isfinite(losses).all()
    assert max(losses) < np.log(2 * 16)  # of at most 16 pictures


def test_half_precision_learns_every_weight_of_the_backbone() -> None:
    sections: dict[str, Any] = {"train": {"precision": "bf16"}, "optim": {"weight_decay": 0.0, "momentum": 0.0}}
    run = Course(started("cross_entropy", data={"batch": 8}, **sections))
    before = {key: value.clone() for key, value in run.method.named_parameters()}
    list(islice(run.steps(), 1))
    same = {key for key, value in run.method.named_parameters() if torch.equal(value, before[key])}
    assert same == {key for key in before if key.startswith(("network.head", "average."))}


def test_the_estimate_counts_its_projector_and_its_views() -> None:
    def parts(**model: Any) -> dict[str, int]:
        found = estimate(config_of("cross_entropy", model=model, data={"batch": 64}), 1000, 10, 1)
        return {part.name: part.bytes for part in found.device}

    with_start, without = parts(**START), parts()
    projector = 4 * (32 * 32 + 32 + 32 * 128 + 128)  # the features of width 4 are 32 numbers
    assert with_start["weights"] - without["weights"] == projector
    assert with_start["momentum"] - without["momentum"] == projector
    activations = "activations and images of a micro-batch"
    assert with_start[activations] > 1.8 * without[activations]


ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "zero 0": {"engine": "deepspeed", "deepspeed": {"stage": 0}},
    "zero 1": {"engine": "deepspeed", "deepspeed": {"stage": 1}},
    "zero 3": {"engine": "deepspeed", "deepspeed": {"stage": 3}},
}


def with_engines(world: World, url: str, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name, engine in ENGINES.items():
        config = small(model={"width": 4, "norm": "group", "ema": 0.9, "start": "simclr", "start_part": 1}, **engine)
        trainer = make_trainer(world, url, f"{folder}/{name}", config)
        trainer.run()
        trainer.checkpoints.close()
        found[name] = {key: value.clone() for key, value in trainer.method.state_dict().items()}
    return found


@pytest.mark.dist
@pytest.mark.timeout(600)
def test_deepspeed_does_what_ddp_does(digits: str, tmp_path: Any) -> None:
    for found in on_ranks(2, with_engines, digits, str(tmp_path)):
        for name in ENGINES:
            assert apart(found[name], found["ddp"]) < 2e-4, name
