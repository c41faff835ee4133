"""DivideMix: its loss written the slow way, who learns from whose beliefs, and what used to break it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from ranks import on_ranks
from rivals import Course, Pictures, batch_of, make_method, small_config, survey_of

from pipeline.config import load
from pipeline.distributed.world import World
from pipeline.methods.dividemix import FIT, MIXUP_LAMBDA, MIXUP_PARTNERS, DivideMix, pair_across, uniform_penalty
from pipeline.methods.parts.gaussian_mixture import posterior
from pipeline.methods.parts.mixup import mixup_lambda
from shards.base.errors import UserError

K, VIEWS = 3, ("weak", "weak2")


def divider(epochs: int = 8, epoch: int = 4, **options: object) -> DivideMix:
    """In the middle of its ramp, in float64, with beliefs that are neither 0 nor 1."""
    config = small_config({"name": "dividemix", "warmup": 0.25, **options}, train={"epochs": epochs})
    method = make_method(config, Pictures().given, K).double()
    assert isinstance(method, DivideMix)
    method.belief.copy_(torch.from_numpy(np.random.default_rng(0).random(method.belief.shape)))
    method.set_epoch(0, epoch)
    return method.train()


def softmax(row: torch.Tensor) -> list[float]:
    powers = [math.exp(float(v)) for v in row.detach()]
    return [p / sum(powers) for p in powers]


def slow_losses(method: DivideMix, batch, unlabelled: bool, ramp: float) -> dict[str, float]:
    """The formulas for network 0, one picture at a time (group normalisation allows that)."""
    own, peer, options = method.network(0), method.network(1), method.options
    say = lambda network, image: softmax(network(image[None])[1][0])  # noqa: E731
    sharp = lambda p: [v**2 / sum(w**2 for w in p) for v in p]  # noqa: E731, temperature 1/2
    streams = [batch, batch.second] if batch.second is not None else [batch]
    rows = []  # (image, target, stream, valid)
    for number, stream in enumerate(streams):
        targets = []
        for i in range(len(stream.index)):
            views = [stream.views[v][i] for v in VIEWS]
            said = [say(own, v) for v in views] + ([say(peer, v) for v in views] if number else [])
            mean = [sum(p[k] for p in said) / len(said) for k in range(K)]
            if number == 0:
                trust = float(method.belief[1, stream.index[i]])
                mean = [trust * (k == int(stream.label[i])) + (1 - trust) * mean[k] for k in range(K)]
            targets.append(sharp(mean))
        for v in VIEWS:
            rows += [(stream.views[v][i], targets[i], number, float(stream.valid[i])) for i in range(len(targets))]
    lam = mixup_lambda(batch, options.mixup, MIXUP_LAMBDA, fold=True)
    partner = pair_across(streams, MIXUP_PARTNERS).tolist()
    labelled, without, mean = [], [], []
    for (image, target, number, valid), j in zip(rows, partner):
        if not valid or (number and not unlabelled):
            continue
        said = say(own, lam * image + (1 - lam) * rows[j][0])
        mixed = [lam * a + (1 - lam) * b for a, b in zip(target, rows[j][1])]
        mean.append(said)
        if number:
            without.append(sum((p - t) ** 2 for p, t in zip(said, mixed)) / K)
        else:
            labelled.append(-sum(t * math.log(p) for p, t in zip(said, mixed)))
    average = [sum(p[k] for p in mean) / len(mean) for k in range(K)]
    out = {
        "labelled": sum(labelled) / len(labelled),
        "penalty": sum(math.log(1 / K / p) / K for p in average),
    }
    if without:
        out["unlabelled"] = sum(without) / len(without)
    out["loss"] = out["labelled"] + options.unlabelled * ramp * out.get("unlabelled", 0) + out["penalty"]
    return out


@pytest.mark.parametrize(("beside", "weight"), [(True, 25.0), (True, 0.0), (False, 25.0)])
def test_the_loss_is_the_formula(beside, weight) -> None:
    method = divider(unlabelled=weight, unlabelled_ramp=0.5)
    batch = batch_of(method, 6, views=VIEWS)
    if beside:
        batch.second = batch_of(method, 6, seed=1, views=VIEWS)
    ramp = (4.5 - 2) / 4  # two epochs of warm-up, a ramp of four, in the middle of epoch 4
    expected = slow_losses(method, batch, bool(weight), ramp)
    found = method(batch)
    assert {name: float(value.detach()) for name, value in found.items()} == pytest.approx(expected, rel=1e-5)


def test_only_the_learner_of_the_pass_gets_a_gradient_also_under_autocast() -> None:
    """Weights that were cast while guessing, without gradient, must not be used again while learning."""
    method = divider().float()
    batch = batch_of(method, 6, learner=1, views=VIEWS)
    batch.views = {name: view.float() for name, view in batch.views.items()}
    for name, parameter in method.named_parameters():
        parameter.requires_grad_(name.startswith(method.passes()[1].trainable))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = method(batch)["loss"]
    loss.backward()
    assert {name.split(".")[1] for name, p in method.named_parameters() if p.grad is not None} == {"1"}
    assert all(p.grad is not None for p in method.network(1).parameters())


def test_the_unlabelled_weight_rises_after_the_warm_up() -> None:
    method = divider(epochs=8, unlabelled=8.0, unlabelled_ramp=0.5)
    weights = []
    for epoch in range(8):
        method.set_epoch(0, epoch)
        weights.append(method.unlabelled_weight)
    assert weights == [0, 0, 1, 3, 5, 7, 8, 8]


def test_each_network_learns_from_the_beliefs_of_the_other() -> None:
    method = divider()
    method.belief[0] = 0
    method.belief[0, :20] = 1
    method.belief[1] = 0
    method.belief[1, 30:] = 1
    first, second = method.passes()
    assert set(first.order) == set(range(30, 45))
    assert set(second.order) == set(range(20))
    for walk in (first, second):
        assert walk.second is not None
        assert len(walk.order) % 16 == 0  # full batches
        assert set(walk.order) | set(walk.second) == set(range(45))
    assert (first.trainable, second.trainable) == (("networks.0.",), ("networks.1.",))
    assert [walk.learner for walk in (first, second)] == [0, 1]
    assert all(np.array_equal(a.order, b.order) for a, b in zip(method.passes(), method.passes()))


def test_small_losses_are_believed() -> None:
    """Network 0 is sure of the given labels of even samples, network 1 of odd ones."""
    method = divider()
    given = torch.from_numpy(method.data.given).long()
    index, said = torch.arange(45), []
    for n in range(2):
        trusted = index % 2 == n
        logits = torch.randn(45, K) * 0.01
        logits[index, torch.where(trusted, given, (given + 1) % K)] += 6
        said.append(logits)
    method.begin_epoch(survey_of(method.votes_and_losses(said, given)))
    assert torch.equal(method.belief[0] > 0.5, index % 2 == 0)
    assert torch.equal(method.belief[1] > 0.5, index % 2 == 1)
    beliefs = method.beliefs
    assert beliefs is not None
    assert beliefs.extra["agreement"] == 0


def surveyed_losses(epoch: int) -> list[np.ndarray]:
    """A loss of every sample by each network: two heaps, and samples that change heaps from epoch to epoch."""
    rng = np.random.default_rng(epoch)
    heaps = np.where(np.arange(45) < 25, 0.2, 2.0)
    return [np.where(rng.random(45) < 0.4, 2.2 - heaps, heaps) + 0.2 * rng.random(45) for _ in range(2)]


def scaled(losses: np.ndarray) -> np.ndarray:
    return (losses - losses.min()) / (losses.max() - losses.min())


@pytest.mark.parametrize("resumed", [False, True])
def test_the_mixture_sees_the_mean_of_the_last_epochs_losses_also_after_a_resume(resumed: bool) -> None:
    """Six epochs with a mean over three: the mean grows to three epochs, then the oldest one leaves."""
    method, history = divider(loss_epochs=3), []
    for epoch in range(6):
        losses = surveyed_losses(epoch)
        history.append([scaled(part) for part in losses])
        outputs = {f"loss{n}": torch.from_numpy(losses[n]) for n in range(2)}
        method.begin_epoch(survey_of({"vote": torch.zeros(45), **outputs}))
        for n in range(2):
            mean = sum(past[n] for past in history[-3:]) / len(history[-3:])
            assert method.belief[n].numpy() == pytest.approx(posterior(mean, "small", FIT), abs=1e-4), (epoch, n)
            assert (
                epoch == 0 or np.abs(posterior(scaled(losses[n]), "small", FIT) - method.belief[n].numpy()).max() > 0.1
            )
        if resumed:
            state, method = method.state_dict(), divider(loss_epochs=3)
            method.load_state_dict(state)


# -- what breaks the original --------------------------------------------------------------------------------


def test_equal_losses_and_losses_that_are_not_finite_leave_something_to_learn_from() -> None:
    for logits in (torch.zeros(45, K), torch.full((45, K), torch.nan)):
        method = divider()
        given = torch.from_numpy(method.data.given).long()
        method.begin_epoch(survey_of(method.votes_and_losses([logits, logits], given)))
        assert (method.belief == 1).all()
        assert all(len(walk.order) and walk.second is None for walk in method.passes())


def test_an_empty_labelled_set_is_read_as_no_division(monkeypatch) -> None:
    method = divider()
    nobody = [np.zeros(45, np.float32), np.ones(45, np.float32)]
    monkeypatch.setattr(method, "divide", lambda survey: nobody)
    given = torch.from_numpy(method.data.given).long()
    method.begin_epoch(survey_of(method.votes_and_losses([torch.zeros(45, K)] * 2, given)))
    assert (method.belief == 1).all()


@pytest.mark.parametrize("words", ["dividemix method.threshold=1", "sfa method.threshold=1", "rrl method.use_above=1"])
def test_a_bound_that_leaves_nothing_to_learn_from_is_refused(words: str) -> None:
    """Nobody's chance is above 1: the training would run to its end without a step, or without a label."""
    with pytest.raises(UserError, match=r"method\.(threshold|use_above).*less than 1"):
        load([f"method.name={words.split()[0]}", words.split()[1]])


@pytest.mark.parametrize("labelled", [1, 44, 45])
def test_tiny_labelled_and_unlabelled_sets_train(labelled) -> None:
    """Also with a class of which nothing is believed."""
    run = Course(small_config({"name": "dividemix", "warmup": 0.0}, train={"epochs": 1}))
    run.method.belief.zero_()
    run.method.belief[:, :labelled] = 1
    run.position.epoch_started = True
    losses = list(run.steps())
    assert losses
    assert all(math.isfinite(found["loss"]) for found in losses)


def test_a_hundred_classes_with_five_pictures_each_train() -> None:
    config = small_config(
        {"name": "dividemix", "warmup": 0.5}, train={"epochs": 2}, data={"batch": 256, "mix_group": 64}
    )
    losses = list(Course(config, Pictures(500, 100, even=True), 100).steps())
    assert all(math.isfinite(found["loss"]) for found in losses)


# -- the penalty ---------------------------------------------------------------------------------------------


def penalty_gradient(world: World, cut: list[int]) -> tuple[float, torch.Tensor]:
    start = sum(cut[: world.rank])
    logits = torch.randn(sum(cut), K, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mine = logits[start : start + cut[world.rank]].clone().requires_grad_()
    loss = uniform_penalty(mine, torch.ones(len(mine)), world)
    loss.backward()
    return float(loss) / world.size, mine.grad / world.size


@pytest.mark.dist
def test_the_penalty_and_its_gradient_do_not_depend_on_ranks() -> None:
    value, gradient = on_ranks(1, penalty_gradient, [7])[0]
    parts = on_ranks(2, penalty_gradient, [5, 2])
    assert sum(v for v, _ in parts) == pytest.approx(value, rel=1e-9)
    assert torch.allclose(torch.cat([g for _, g in parts]), gradient, atol=1e-12)


def test_the_penalty_is_zero_for_uniform_predictions_and_finite_for_certain_ones() -> None:
    assert float(uniform_penalty(torch.zeros(4, K), torch.ones(4), World())) == pytest.approx(0, abs=1e-6)
    certain = torch.zeros(4, K)
    certain[:, 0] = 1e4
    assert math.isfinite(float(uniform_penalty(certain, torch.ones(4), World())))
