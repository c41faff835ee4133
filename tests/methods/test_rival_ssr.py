"""SSR+: relabelling, votes and losses written the slow way, and selections that leave nobody."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from peak_memory import peak_growth
from rivals import Course, Pictures, batch_of, make_method, small_config, survey_of
from torch.nn.functional import normalize

from pipeline.methods.parts.mixup import mixup_lambda, mixup_partners
from pipeline.methods.parts.neighbour_votes import balanced_votes
from pipeline.methods.selection_method import MIXUP_LAMBDA, MIXUP_PARTNERS
from pipeline.methods.ssr import SSR

K, N, D = 3, 45, 6
VIEWS = ("weak", "strong", "strong2")


def learner(given: np.ndarray | None = None, norm: str = "group", classes: int = K, **options: object) -> SSR:
    settings = {"name": "ssr", "neighbours": 6, "relabel_above": 0.7, **options}
    given = Pictures().given if given is None else given
    method = make_method(small_config(settings, model={"norm": norm}), given, classes)
    assert isinstance(method, SSR)
    return method


def surveyed(seed: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    z = normalize(torch.from_numpy(rng.normal(size=(N, D))), dim=1)
    sureness, likeliest = torch.from_numpy(3 * rng.normal(size=(N, K))).softmax(1).max(1)
    return {"z": z, "sureness": sureness, "likeliest": likeliest}


def slow_votes(z: torch.Tensor, label: list[int], k: int) -> list[list[float]]:
    """For each sample the shares of the classes among its k nearest, itself included, over the sizes of the classes."""
    size, out = Counter(label), []
    for i in range(len(z)):
        near = sorted(range(len(z)), key=lambda j, i=i: -float(z[i] @ z[j]))[:k]
        assert i in near
        votes = [sum(label[j] == c for j in near) / size[c] if size[c] else 0.0 for c in range(K)]
        out.append([vote / sum(votes) for vote in votes])
    return out


@pytest.mark.parametrize("select_from", [1.0, 0.4])
def test_labels_and_selection_are_those_of_the_slow_way(select_from: float) -> None:
    method = learner(select_from=select_from)
    for epoch in range(2):  # every epoch starts from the given labels again
        found = surveyed(epoch)
        method.begin_epoch(survey_of(found))
        label = [
            int(c) if p > 0.7 else int(y) for p, c, y in zip(found["sureness"], found["likeliest"], method.data.given)
        ]
        votes = slow_votes(found["z"], label, 6)
        assert method.label.tolist() == label
        assert method.selected.tolist() == [v[y] >= select_from * max(v) - 1e-12 for v, y in zip(votes, label)]
        support = [v[y] / max(v) for v, y in zip(votes, method.data.given)]
        assert method.support.tolist() == pytest.approx(support, abs=1e-6)
        assert 0 < method.selected.sum() < N
        beliefs = method.beliefs
        assert beliefs.clean.tolist() == [
            bool(s) and y == g for s, y, g in zip(method.selected, label, method.data.given)
        ]
    assert label != method.data.given.tolist()


def test_votes_in_blocks_are_those_of_one_block() -> None:
    z, label = surveyed(0)["z"], torch.from_numpy(Pictures().given).long()
    whole = balanced_votes(z, z, label, K, 6, 1000, label)[0]
    assert torch.equal(balanced_votes(z, z, label, K, 6, 7, label)[0], whole)


def test_a_pass_has_all_samples_and_beside_them_every_class_equally_often() -> None:
    method = learner()
    method.begin_epoch(survey_of(surveyed(0)))
    (pass_,) = method.passes()
    assert sorted(pass_.order.tolist()) == list(range(N))
    assert pass_.views_by_stream == (("weak", "strong"), ("strong", "strong2"))
    selected = set(method.selected.nonzero()[:, 0].tolist())
    assert set(pass_.second.tolist()) <= selected
    label = method.label.long()
    sizes = Counter(label[list(selected)].tolist())
    assert len(pass_.second) == min(48, len(sizes) * max(sizes.values()))
    often = Counter(label[pass_.second].tolist())
    assert max(often.values()) - min(often.values()) <= 1
    for k in sizes:  # inside a class all samples, before any is repeated
        times = Counter(pass_.second[label[pass_.second].numpy() == k].tolist())
        assert max(times.values()) - min(times[i] for i in selected if label[i] == k) <= 1


def test_the_loss_is_the_formula() -> None:
    """One picture at a time: mixing of selected samples, and the angle between the views of all."""
    method = learner(consistency=0.5).double()
    rng = np.random.default_rng(0)
    method.label.copy_(torch.from_numpy(rng.integers(0, K, N)))
    batch = batch_of(method, 6, views=VIEWS)
    batch.second = chosen = batch_of(method, 8, seed=1, views=VIEWS)
    with torch.no_grad():
        found = {name: float(value) for name, value in method(batch).items()}
        lam = mixup_lambda(chosen, 4.0, MIXUP_LAMBDA, fold=True)
        assert lam >= 0.5
        partner = mixup_partners(chosen, 2, MIXUP_PARTNERS).tolist()
        images, ce, rows = torch.cat([chosen.views["strong"], chosen.views["strong2"]]), 0.0, 0
        for i, j in enumerate(partner):
            if not chosen.valid[i % 8]:
                continue
            p = method.network((lam * images[i] + (1 - lam) * images[j])[None])[1][0].softmax(0)
            first, second = (int(method.label[chosen.index[r % 8]]) for r in (i, j))
            ce -= lam * math.log(p[first]) + (1 - lam) * math.log(p[second])
            rows += 1
        ce /= rows
        real = int(batch.valid.sum())
        weak, strong = (
            torch.cat([method.network(image[None])[0] for image in batch.views[view][:real]])
            for view in ("weak", "strong")
        )

        def perceptron(layers: torch.nn.Sequential, x: torch.Tensor) -> torch.Tensor:
            x = layers[0](x)
            x = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt() * layers[1].weight + layers[1].bias
            return layers[3](x.clamp_min(0))

        wanted = perceptron(method.projector.layers, weak)
        predicted = perceptron(method.predictor.layers, perceptron(method.projector.layers, strong))
        fc = -sum(float(a @ b / a.norm() / b.norm()) for a, b in zip(predicted, wanted)) / real
    assert found == pytest.approx({"ce": ce, "fc": fc, "loss": ce + 0.5 * fc}, rel=1e-5)


def test_no_gradient_reaches_the_weak_view() -> None:
    method = learner().double()
    batch = batch_of(method, 6, views=VIEWS)
    for image in batch.views.values():
        image.requires_grad_()
    method.consistency_loss(batch).backward()
    assert batch.views["weak"].grad is None
    assert batch.views["strong"].grad.abs().sum() > 0


def test_without_consistency_only_selected_samples_pass_the_network() -> None:
    method = learner(consistency=0.0)
    assert not hasattr(method, "projector")
    method.begin_epoch(survey_of(surveyed(0)))
    (pass_,) = method.passes()
    assert pass_.second is None
    assert len(pass_.order) == 48  # as many steps as with all samples
    assert method.selected[pass_.order].all()
    with torch.no_grad():
        found = method.double()(batch_of(method, 6, views=VIEWS))
    assert found.keys() == {"loss", "ce"}
    assert float(found["loss"]) == float(found["ce"])


# -- what breaks the original --------------------------------------------------------------------------------


def test_when_the_neighbours_confirm_nobody_all_are_taken() -> None:
    """Two samples of every place, with different labels of classes of different size: the smaller class has the vote."""
    given = np.array([0, 1] * 4 + [1] * 4, np.int32)
    method = learner(given, neighbours=2)
    method.selected.zero_()
    (pass_,) = method.passes()
    assert set(pass_.second.tolist()) == set(range(12))


def test_one_sample_votes_for_itself() -> None:
    z, label = torch.ones(1, D), torch.tensor([2])
    assert balanced_votes(z, z, label, K, 200, 8, label, torch.tensor([0]))[0].tolist() == [1.0]
    assert balanced_votes(z, z, label, K, 200, 8, torch.tensor([0]))[0].tolist() == [0.0]


def test_a_hundred_classes_with_five_pictures_each_train() -> None:
    config = small_config({"name": "ssr"}, train={"epochs": 2}, data={"batch": 256, "mix_group": 64})
    losses = list(Course(config, Pictures(500, 100, even=True), 100).steps())
    assert all(math.isfinite(found["loss"]) for found in losses)


# -- memory ------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_square_of_the_samples() -> None:
    samples, classes = 12_000, 400  # all similarities: 576 MB, all votes: 19 MB
    label = torch.arange(samples) % classes
    z = normalize(torch.randn(samples, D), dim=1)
    votes, growth = peak_growth(lambda: balanced_votes(z, z, label, classes, 50, 256, label))
    assert len(votes[0]) == samples
    assert growth < 100
