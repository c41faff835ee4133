"""What every rival here promises, whatever its mathematics: ranks, restarts, poor data, learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks
from rivals import Course, Pictures, small_config

from pipeline.config import Config
from pipeline.models.network import Network
from pipeline.train import build
from pipeline.world import World

RIVALS: dict[str, dict[str, Any]] = {
    "ldam": {},
    "ldam_drw": {"reweight_start": 0.5},
    "crt": {"classifier_part": 0.3},
    "ncm": {},
    "coteaching": {"ramp": 0.3},
    "mentornet": {"burn_in": 0.3, "dropout_part": 0.3, "soft_start": 0.6},
    "elr": {},
    "elr_plus": {"ramp": 0.5},
    "har": {"probe_part": 0.3, "reweight_start": 0.5},
    "aum": {"probe_part": 0.3},
}
every_rival = pytest.mark.parametrize("name", RIVALS)


def course(name: str, world: World | None = None, **sections: dict[str, Any]) -> Course:
    sections = {"train": {"epochs": 2}, **sections}
    return Course(small_config({"name": name, **RIVALS[name]}, **sections), Pictures(35), world=world or World())


def train_all(world: World) -> dict[str, tuple[list[dict[str, float]], dict[str, torch.Tensor]]]:
    """Losses of every step and all state at the end; in double precision, lest rounding grows."""
    found = {}
    for name in RIVALS:
        run = course(name, world)
        for network in (m for m in run.method.double().modules() if isinstance(m, Network)):
            network.register_forward_pre_hook(lambda _, args: (args[0].double(),))
        found[name] = (list(run.steps()), run.method.state_dict())
    return found


@pytest.mark.dist
def test_two_ranks_compute_what_one_computes() -> None:
    """35 samples in batches of 16: in the last one a rank holds nothing but rows that stand for nothing."""
    alone = on_ranks(1, train_all)[0]
    first, second = on_ranks(2, train_all)
    for name, (losses, state) in alone.items():
        for step, parts in enumerate(losses):
            both = {part: (first[name][0][step][part] + second[name][0][step][part]) / 2 for part in parts}
            assert both == pytest.approx(parts, rel=1e-6), (name, step)
        for key, value in state.items():
            assert torch.equal(first[name][1][key], second[name][1][key]), (name, key)
            assert torch.allclose(first[name][1][key].double(), value.double(), rtol=1e-3, atol=1e-4), (
                name,
                key,
            )


@every_rival
def test_a_restart_changes_not_one_bit(name: str) -> None:
    run = course(name, model={"norm": "batch"})
    losses, states = [], []
    for found in run.steps():
        losses.append(found)
        states.append(run.state())
    for step in {len(states) // 3, 2 * len(states) // 3}:
        again = course(name, model={"norm": "batch"})
        again.load(states[step])
        assert list(again.steps()) == losses[step + 1 :]
        for key, value in run.method.state_dict().items():
            assert torch.equal(again.method.state_dict()[key], value), key


def poor(given: list[int], same: bool = False) -> Pictures:
    pictures = Pictures(len(given))
    pictures.given = np.array(given, np.int32)
    pictures.encoded = pictures.encoded[:1] * len(given) if same else pictures.encoded
    return pictures


POOR = {
    "five pictures of a hundred classes": (poor([7, 7, 30, 99, 99]), 100),
    "one picture": (poor([1]), 3),
    "classes without pictures": (poor([0] * 12 + [2] * 5), 5),
    "all pictures the same": (poor([0] * 12 + [1] * 4 + [2], same=True), 3),
}


@every_rival
@pytest.mark.parametrize("case", POOR)
def test_poor_data_is_survived(name: str, case: str) -> None:
    pictures, classes = POOR[case]
    run = Course(small_config({"name": name, **RIVALS[name]}, train={"epochs": 2}), pictures, classes)
    assert all(np.isfinite(list(found.values())).all() for found in run.steps())
    assert not any(value.isnan().any() for value in run.method.state_dict().values())
    images = torch.randn(4, 3, 8, 8)
    run.method.eval()
    with torch.no_grad():
        for score in run.method.scores(images).values():
            assert score.shape == (4, classes)
            assert torch.isfinite(score).all()
        assert torch.isfinite(run.method.embeddings(images)).all()
    beliefs = run.method.beliefs()
    if beliefs:
        known = (beliefs.weight, beliefs.label, beliefs.clean, beliefs.score)
        assert all(value is None or len(value) == len(pictures) for value in known)


@pytest.mark.parametrize("name", ["crt", "elr_plus", "har"])
def test_half_precision_reaches_every_weight_that_learns(name: str) -> None:
    """Weights cast for a pass without gradient, or for a gradient's gradient, must still learn."""
    run = course(name, train={"epochs": 2, "precision": "bf16"}, optim={"weight_decay": 0.0, "momentum": 0.0})
    before: dict[str, torch.Tensor] = {}
    for _ in run.steps():
        after = {k: p.detach().clone() for k, p in run.method.named_parameters() if p.requires_grad}
        if before.keys() == after.keys():
            assert not [k for k in after if torch.equal(before[k], after[k])]
        before = after


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digits with a long tail and every fifth label wrong."""
    from shards.build import ensure
    from shards.config import BuildConfig

    return ensure(BuildConfig(output=str(tmp_path_factory.mktemp("shards") / "digits"), rho=10, noise=0.2))


DIGITS: dict[str, dict[str, Any]] = {
    "ldam": {"scale": 10},
    "ldam_drw": {"scale": 10, "reweight_start": 0.5},
    "crt": {"classifier_part": 0.5},
    "coteaching": {"ramp": 0.4},
    "mentornet": {"dropout": 0.1},
    "elr_plus": {"ema": 0.9},
    "har": {"strength": 1, "probe_part": 0.4},
}


@pytest.mark.parametrize("name", sorted(RIVALS.keys() - {"ldam"}))  # LDAM-DRW is LDAM until it is late
def test_it_learns_digits(name: str, shards: str, tmp_path: Path) -> None:
    """Seconds of training: the loss falls, and test pictures are told apart far better than by chance."""
    tree = {
        "output": str(tmp_path), "shards": {"output": shards, "noise": 0.2}, "tracking": {"uri": ""},
        "checkpoint": {"every_epochs": 0}, "data": {"batch": 32, "size": 8, "padding": 1},
        "model": {"width": 8}, "train": {"epochs": 6}, "method": {"name": name, **DIGITS.get(name, {})},
    }  # fmt: skip
    trainer, _ = build(Config.model_validate(tree), World())
    trainer.run()
    trainer.checkpoints.close()
    history = trainer.history
    assert history[-1]["test/top1"] > 35
    assert history[-1]["loss/total"] < history[0]["loss/total"]
    if "clean/f1" in history[-1]:
        assert history[-1]["clean/f1"] > 0.7
