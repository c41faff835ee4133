"""The learning rate: end points and steps."""

import math
from typing import Any

import pytest
from rivals import Course, Pictures, small_config

from pipeline.config import Config, OptimConfig
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


def by_step(optim: OptimConfig, epochs: int, steps: int) -> list[float]:
    return [lr_at(optim, e, epochs, False, s, steps) for e in range(epochs) for s in range(steps)]


def test_by_epoch_every_step_of_an_epoch_has_one_rate() -> None:
    optim = OptimConfig(lr=0.1, warmup_epochs=2)
    rates = by_step(optim, 5, 4)
    assert rates == [lr_at(optim, e, 5) for e in range(5) for _ in range(4)]


def test_by_step_is_what_by_epoch_would_be_if_every_step_were_an_epoch() -> None:
    for settings in ({}, {"schedule": "restarts", "restart_epochs": 2}, {"schedule": "constant"}):
        optim = OptimConfig(lr=0.1, final_lr=1e-3, schedule_by="step", **settings)
        whole = optim.model_copy(update={"schedule_by": "epoch", "restart_epochs": 7 * optim.restart_epochs})
        assert by_step(optim, 4, 7) == pytest.approx([lr_at(whole, s, 28) for s in range(28)])


def test_warm_up_by_step_may_end_inside_an_epoch_and_never_exceeds_the_rate() -> None:
    optim = OptimConfig(lr=0.3, schedule="steps", schedule_by="step", warmup_epochs=0.5)
    assert by_step(optim, 2, 5) == pytest.approx([0.12, 0.24, 0.3, *[0.3] * 7])


def test_a_fraction_of_an_epoch_is_refused_where_rates_change_by_epoch() -> None:
    with pytest.raises(ValueError, match=r"optim\.schedule_by=step"):
        Config.model_validate({"optim": {"warmup_epochs": 0.5}})


@pytest.mark.parametrize(("method", "passes"), [("cross_entropy", 1), ("dividemix", 2)])
def test_the_trainer_steps_through_the_schedule_in_every_pass(method: str, passes: int) -> None:
    """So that two networks with passes of their own learn at the same rates."""
    optim = {"lr": 0.01, "schedule": "cosine", "schedule_by": "step"}
    run, rates = Course(small_config({"name": method}, optim=optim, train={"epochs": 2}), Pictures(32)), []
    step = run.trainer.engine.step

    def noted(batch: Any, lr: float) -> Any:
        rates.append((run.position.epoch, batch.learner, lr))
        return step(batch, lr)

    run.trainer.engine.step = noted  # type: ignore[method-assign]
    for _ in run.steps():
        pass
    for learner in range(passes):
        for epoch in range(2):
            found = [rate for e, n, rate in rates if (e, n) == (epoch, learner)]
            expected = [lr_at(run.config.optim, epoch, 2, False, s, len(found)) for s in range(len(found))]
            assert found == expected
            assert len(found) == len(set(found))
    assert rates[-1][2] == run.trainer.history[-1]["train/lr"] == run.config.optim.final_lr
