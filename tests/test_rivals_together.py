"""Methods that divide, correct or guess: the same on any number of ranks, after any restart; they learn."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from rivals import Course, small_config

from pipeline.config import Config
from pipeline.train import build
from pipeline.world import World

METHODS: dict[str, dict[str, Any]] = {
    "dividemix": {"warmup": 0.34, "unlabelled_ramp": 0.5, "loss_epochs": 2},
    "rolt": {"warmup": 0.34, "unlabelled_ramp": 0.5, "reweight_start": 0.5},
    "sfa": {"warmup": 0.34, "unlabelled_ramp": 0.5, "sampled_above": 5},
    "rrl": {"warmup_steps": 2, "cleaning_start": 0.34, "neighbours": 5, "use_above": 0.5},
    "mopro": {
        "queue": 24,
        "momentum": 0.9,
        "prototype_momentum": 0.9,
        "cleaning_start": 0.34,
        "relabel_above": 0.5,
    },
}

SHORT = {"warmup": 0.6, "warmup_batch": 1, "unlabelled_ramp": 0.2}
# For eight epochs of digits: settings, learning rate, and the loss to watch.
DIGITS: dict[str, tuple[dict[str, Any], float, str]] = {
    "dividemix": (SHORT, 0.05, "loss/labelled"),
    "rolt": (SHORT, 0.05, "loss/labelled"),
    "sfa": (SHORT, 0.05, "loss/balanced_labelled"),
    "rrl": ({"contrastive": 0.3, "prototype": 2, "cleaning_start": 0.6, "neighbours": 20}, 0.03, "loss/pc"),
    "mopro": (
        {"queue": 256, "momentum": 0.99, "prototype_momentum": 0.99, "cleaning_start": 0.7, "retrain_part": 0.1},
        0.05,
        "loss/ce",
    ),
}


def course(name: str, **sections: dict[str, Any]) -> Course:
    return Course(small_config({"name": name, **METHODS[name]}, **sections))


def train_all(world: World) -> dict[str, Any]:
    """Losses of every step and all state at the end, for each method."""
    out = {}
    for name in METHODS:
        run = Course(small_config({"name": name, **METHODS[name]}), world=world, double=True)
        out[name] = (list(run.steps()), run.state()["method"])
    return out


@pytest.mark.dist
def test_one_rank_and_two_ranks_train_alike() -> None:
    """45 samples in batches of 16: the last is cut unevenly. All state is compared, weights and beliefs."""
    alone = on_ranks(1, train_all)[0]
    ranks = on_ranks(2, train_all)
    for name in METHODS:
        losses, state = alone[name]
        assert len(losses) == len(ranks[0][name][0]), name
        for step, one in enumerate(losses):
            for part, value in one.items():
                both = sum(rank[name][0][step][part] for rank in ranks) / 2
                assert both == pytest.approx(value, rel=1e-9, abs=1e-12), (name, step, part)
        for key, value in state.items():
            assert torch.equal(ranks[0][name][1][key], ranks[1][name][1][key]), (name, key)
            assert torch.allclose(ranks[0][name][1][key].double(), value.double(), atol=1e-6), (name, key)


@pytest.mark.parametrize("name", METHODS)
def test_going_on_from_a_saved_state_is_bit_equal(name) -> None:
    """From inside a pass and from before the next survey, with batch statistics."""
    run = course(name, model={"norm": "batch"})
    losses, states = [], []
    for found in run.steps():
        losses.append(found)
        states.append(run.state())
    ends = [i for i in range(len(states) - 2) if states[i]["at"]["epoch"] < states[i + 1]["at"]["epoch"]]
    for step in (ends[-1] - 1, ends[-1]):
        again = course(name, model={"norm": "batch"})
        again.load(states[step])
        assert list(islice(again.steps(), 2)) == losses[step + 1 : step + 3]
        end, straight = again.state()["method"], states[step + 2]["method"]
        assert all(torch.equal(end[key], straight[key]) for key in straight)


@pytest.mark.parametrize("name", METHODS)
def test_it_learns_digits(name, digits, tmp_path: Path) -> None:
    """A long tail and every second label wrong: far better than the 10 % of chance, the loss falling, and
    clean labels told from wrong ones better than by believing all of them (F1 0.67)."""
    method, lr, part = DIGITS[name]
    settings = {
        "output": str(tmp_path), "shards": {"output": digits}, "tracking": {"uri": ""},
        "checkpoint": {"every_epochs": 0}, "train": {"epochs": 8}, "optim": {"lr": lr},
        "data": {"size": 8, "padding": 1, "augmix": "none"}, "model": {"width": 8},
        "method": {"name": name, **method},
    }  # fmt: skip
    trainer, _ = build(Config.model_validate(settings), World())
    trainer.run()
    losses = [past[part] for past in trainer.history if part in past]
    assert losses[-1] < losses[0]
    assert trainer.history[-1]["test/top1"] > 35
    assert trainer.history[-1]["clean/f1"] > 0.7
