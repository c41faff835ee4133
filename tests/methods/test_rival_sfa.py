"""SFA: averaged and drawn centroids, the balanced classifier's loss, and classes without candidates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from rivals import Course, Pictures, batch_of, make_method, small_config, survey_of

from pipeline.methods.sfa import SFA
from pipeline.methods.two_heads import balanced_softmax_logits

K, N, VIEWS = 3, 45, ("weak", "weak2")


def averager(epoch: int = 4, **options: object) -> SFA:
    config = small_config({"name": "sfa", "warmup": 0.25, **options}, train={"epochs": 8})
    method = make_method(config, Pictures().given, K)
    assert isinstance(method, SFA)
    method.set_epoch(0, epoch)
    return method


def outputs(method: SFA, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    widths = {"features": method.network(0).features, "logits": K, "balanced": K}
    return {f"{name}{n}": torch.randn(N, w, generator=generator) for name, w in widths.items() for n in range(2)}


def slow_centroids(features: torch.Tensor, balanced: torch.Tensor, given: np.ndarray, threshold: float) -> np.ndarray:
    """Means of the centred unit features whose label the balanced classifier believes, one by one."""
    x = features.double().numpy()
    mean = x.mean(0)
    rows = [(f - mean) / math.sqrt(((f - mean) ** 2).sum()) for f in x]
    out = []
    for k in range(K):
        members = [i for i in range(N) if given[i] == k]
        sure = [math.exp(balanced[i, k]) / sum(math.exp(v) for v in balanced[i]) > threshold for i in members]
        chosen = [i for i, good in zip(members, sure) if good] or members
        out.append(sum(rows[i] for i in chosen) / len(chosen))
    return np.stack(out)


def test_centroids_and_their_squares_are_averaged_over_epochs() -> None:
    method = averager(averaging=0.9)
    mean, square = [0.0, 0.0], [0.0, 0.0]
    for epoch in (4, 5, 6):
        method.set_epoch(0, epoch)
        found = outputs(method, epoch)
        given = torch.from_numpy(method.data.given).long()
        kept = method.votes_and_losses([found["logits0"], found["logits1"]], given)
        for n in range(2):
            sure = found[f"balanced{n}"].softmax(1).gather(1, given[:, None])[:, 0]
            kept |= {f"features{n}": found[f"features{n}"], f"balanced{n}": sure}
        method.begin_epoch(survey_of(kept))
        threshold = 2.71 ** ((epoch + 1) / 8) / K
        for n in range(2):
            fresh = slow_centroids(found[f"features{n}"], found[f"balanced{n}"], method.data.given, threshold)
            keep = 0.0 if epoch == 4 else 0.9
            mean[n] = keep * mean[n] + (1 - keep) * fresh
            square[n] = keep * square[n] + (1 - keep) * fresh**2
    assert method.mean.numpy() == pytest.approx(np.stack(mean), abs=1e-5)
    assert method.square.numpy() == pytest.approx(np.stack(square), abs=1e-5)


def test_large_classes_draw_their_centroid_from_the_gaussian_of_the_averages() -> None:
    method = averager()
    method.mean.fill_(2.0)
    method.square.fill_(4.25)  # a deviation of one half
    large = torch.tensor([True, False, True])
    draws = []
    for epoch in range(60):
        method.set_epoch(0, epoch)
        draws.append(method._draw_centroids(0, large))
        assert torch.equal(draws[-1], method._draw_centroids(0, large))  # the same on every rank and after a restart
    stacked = torch.stack(draws)
    assert (stacked[:, 1] == 2).all()
    assert float(stacked[:, large].mean()) == pytest.approx(2, abs=0.02)
    assert float(stacked[:, large].std()) == pytest.approx(0.5, abs=0.02)


def test_the_loss_adds_the_balanced_classifier_to_that_of_dividemix() -> None:
    """Written out from the logits on; the counts are those of the peer's trusted labels."""
    method = averager(unlabelled_ramp=0.0).double()
    method.counts.copy_(torch.tensor([[5.0, 1, 2], [9, 0, 4]]))
    batch = batch_of(method, 5, views=VIEWS)
    batch.second = batch_of(method, 5, seed=1, views=VIEWS)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(20, method.network(0).features, generator=generator, dtype=torch.float64)
    logits = torch.randn(20, K, generator=generator, dtype=torch.float64)
    target = torch.rand(20, K, generator=generator, dtype=torch.float64)
    valid = torch.cat([batch.valid, batch.valid, batch.valid, batch.valid])
    with torch.no_grad():
        found = method.mixed_losses(0, batch, features, logits, target, valid)

    def both(scores: torch.Tensor, shift: list[float]) -> tuple[float, float]:
        labelled, without = [], []
        for i in range(20):
            powers = [math.exp(float(v) + s) for v, s in zip(scores[i], shift)]
            p = [v / sum(powers) for v in powers]
            if valid[i] and i < 10:
                labelled.append(-sum(float(t) * math.log(q) for t, q in zip(target[i], p)))
            elif valid[i]:
                without.append(sum((float(t) - q) ** 2 for t, q in zip(target[i], p)) / K)
        return sum(labelled) / len(labelled), sum(without) / len(without)

    plain = both(logits, [0.0] * K)
    balanced = both(method.balanced[0](features).detach(), [math.log(9), 0.0, math.log(4)])
    expected = plain[0] + 25 * plain[1] + balanced[0] + 25 * balanced[1] + float(found["penalty"])
    assert float(found["loss"]) == pytest.approx(expected, rel=1e-6)
    assert float(found["balanced_labelled"]) == pytest.approx(balanced[0], rel=1e-6)


def test_all_four_classifiers_judge() -> None:
    method = averager().eval()
    images = torch.randn(2, 3, 8, 8)
    said = method.scores(images)
    four = [head for n in range(2) for f, head in [method.network(n)(images)]]
    four += [method.balanced[n](method.network(n)(images)[0]) for n in range(2)]
    assert torch.allclose(said["both"], sum(four) / 4, atol=1e-6)


# -- what breaks the original --------------------------------------------------------------------------------


def test_a_class_without_trusted_samples_has_a_finite_shift() -> None:
    assert torch.isfinite(balanced_softmax_logits(torch.zeros(2, K), torch.tensor([0.0, 3, 5]))).all()


def test_nobody_passes_the_confidence_test_and_training_goes_on() -> None:
    """A threshold above 1: every class takes all its samples."""
    config = small_config({"name": "sfa", "warmup": 0.34, "candidate_growth": 100.0}, train={"epochs": 3})
    losses = list(Course(config).steps())
    assert all(math.isfinite(found["loss"]) for found in losses)


def test_a_hundred_classes_with_five_pictures_each_train() -> None:
    config = small_config({"name": "sfa", "warmup": 0.5}, train={"epochs": 2}, data={"batch": 256, "mix_group": 64})
    losses = list(Course(config, Pictures(500, 100, even=True), 100).steps())
    assert all(math.isfinite(found["loss"]) for found in losses)
