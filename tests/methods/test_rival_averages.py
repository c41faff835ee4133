"""Averages of weights follow what learns, memories forget what broke, and stages are as long as they should be."""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import pytest
import torch
from rivals import Course, Pictures, make_method, small_config

from pipeline.data.batch import Pass
from pipeline.methods.mopro import RETRAIN
from shards.base.errors import UserError


def weights(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()]).clone()


@pytest.mark.parametrize("name", ["dividemix", "rolt", "sfa"])
def test_the_average_of_a_resting_network_rests(name: str) -> None:
    run = Course(small_config({"name": name, "warmup": 0.34}, model={"ema": 0.5}, train={"epochs": 2}))
    moved = set()
    steps, before = run.steps(), [weights(average) for average in run.method.average]
    for _ in steps:
        learning = [next(network.parameters()).requires_grad for network in run.method.networks]
        after = [weights(average) for average in run.method.average]
        if sum(learning) == 1:  # a pass of one network
            moved.add(learning.index(True))
            assert [not torch.equal(a, b) for a, b in zip(before, after)] == learning
        before = after
    assert moved == {0, 1}


def test_mopros_last_stage_reaches_an_averaged_network() -> None:
    settings = {"name": "mopro", "queue": 24, "cleaning_start": 0.34, "retrain_part": 0.5}
    run = Course(small_config(settings, model={"ema": 0.9}, train={"epochs": 2}))
    images, first = torch.randn(4, 3, 8, 8), None
    for _ in run.steps():
        if run.method.stage == RETRAIN:
            with torch.no_grad():
                run.method.eval()
                said = run.method.scores(images)["linear"]
                run.method.train()
            first = said if first is None else first
    assert first is not None
    assert not torch.equal(first, said)


def test_mopro_forgets_a_step_that_broke() -> None:
    run = Course(small_config({"name": "mopro", "queue": 24, "cleaning_start": 0.34}))
    list(islice(run.steps(), 2))
    method = run.method
    whole = torch.tensor([[0, 0], [1, 1]])
    rows = torch.randn(2, 2 * method.queue.shape[1] + 4)
    rows[0, 3] = math.nan
    rows[:, -1] = 1
    rows[:, -2] = 0.25  # the score
    written, score, prototype = int(method.written), float(method.score[0]), method.prototypes[0].clone()
    method.pending = [(whole, rows)]
    method.after_step()
    for memory in (method.prototypes, method.queue, method.score):
        assert memory.isfinite().all()
    assert (int(method.written), float(method.score[0]), float(method.score[1])) == (written + 1, score, 0.25)
    assert torch.allclose(method.prototypes[0], prototype, atol=1e-6)


def test_crts_second_stage_is_as_long_as_its_balanced_sampler() -> None:
    pictures = Pictures()
    method = make_method(small_config({"name": "crt"}), pictures.given, 4)  # the fourth class has no picture
    method.set_epoch(1, 0)
    assert len(method.passes()[0].order) == 3 * int(method.data.counts.max())


def test_elr_plus_averages_slowly_at_first_or_over_its_ramp() -> None:
    def decays(**options: float) -> list[float]:
        run = Course(small_config({"name": "elr_plus", "ema": 0.9, **options}, train={"epochs": 4}))
        return [run.method.average[0].decay for _ in run.steps()]

    true_average = decays()
    assert true_average[:3] == pytest.approx([1 / 2, 2 / 3, 3 / 4])
    ramp = decays(ema_ramp=0.5)
    steps = len(ramp)
    assert ramp[0] == pytest.approx(0.9 * math.exp(-5))
    assert ramp[steps // 4] == pytest.approx(0.9 * math.exp(-5 / 4))
    assert ramp[-1] == pytest.approx(0.9)
    with pytest.raises(UserError, match=r"elr_plus averages its weights itself \(method\.ema\)"):
        Course(small_config({"name": "elr_plus"}, model={"ema": 0.9}))


def test_dropped_samples_lend_the_prototypical_loss_nothing() -> None:
    run = Course(small_config({"name": "prototypical", "warmup_steps": 0, "mixup": 8}))
    next(run.steps())
    method = run.method
    batch = next(iter(run.trainer.loader.batches(Pass(np.arange(16), ("weak", "strong")), 0)))
    weight = torch.rand(len(batch.index))
    weight[::3] = 0
    options = (("weak", "strong"), 8.0, 0.3)
    first = method.prototype_loss(batch, batch.label, weight, *options)
    for view in batch.views.values():
        view[::3] = torch.randn_like(view[::3])
    assert method.prototype_loss(batch, batch.label, weight, *options).item() == pytest.approx(first.item(), rel=1e-6)
