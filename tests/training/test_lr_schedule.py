"""The learning rate: end points and steps."""

import math

import pytest

from pipeline.config import OptimConfig
from pipeline.training.lr_schedule import lr_at


def test_cosine_is_stepped_before_the_epoch() -> None:
    optim = OptimConfig(lr=0.02, final_lr=2e-4)
    rates = [lr_at(optim, e, 200) for e in range(200)]
    assert rates[0] == pytest.approx(2e-4 + 0.5 * (0.02 - 2e-4) * (1 + math.cos(math.pi / 200)))
    assert rates[0] < 0.02
    assert rates[-1] == pytest.approx(2e-4)
    assert rates == sorted(rates, reverse=True)


def test_a_constant_stage_runs_at_the_initial_rate() -> None:
    assert lr_at(OptimConfig(lr=0.02), 0, 0, constant=True) == 0.02


def test_steps_with_linear_warm_up() -> None:
    optim = OptimConfig(lr=0.1, schedule="steps", milestones=(0.8, 0.9), decay=0.01, warmup_epochs=5)
    assert lr_at(optim, 0, 200) == pytest.approx(0.02)
    assert lr_at(optim, 4, 200) == pytest.approx(0.1)
    assert lr_at(optim, 159, 200) == pytest.approx(0.1)
    assert lr_at(optim, 160, 200) == pytest.approx(1e-3)
    assert lr_at(optim, 180, 200) == pytest.approx(1e-5)


def test_restarts_come_back_to_the_initial_rate() -> None:
    optim = OptimConfig(lr=0.02, schedule="restarts", restart_epochs=10, final_lr=1e-3)
    assert lr_at(optim, 0, 150) == lr_at(optim, 10, 150) == 0.02
    assert lr_at(optim, 9, 150) < 0.0015


def test_a_stage_measured_in_steps_runs_at_the_initial_rate() -> None:
    assert lr_at(OptimConfig(lr=0.1, final_lr=0.001), 0, 0) == 0.1
