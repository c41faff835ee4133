"""DaSC: centres, selection, both contrasts and the queue of keys, written the slow way."""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import pytest
import torch
from rivals import Course, Pictures, batch_of, make_method, small_config, survey_of
from sklearn.mixture import GaussianMixture
from torch.nn.functional import normalize

from pipeline.data.batch import Batch
from pipeline.distributed.world import World
from pipeline.methods.dasc import DaSC, balanced_contrastive, views_apart, weighted_centres
from shards.base.errors import UserError

K, N, P = 3, 45, 6
VIEWS = ("strong", "strong2", "weak")
WARMUP = 3  # epochs of ten


def learner(epoch: int = 4, **options: object) -> DaSC:
    settings = {"name": "dasc", "queue": 40, "projection": P, "unlabelled_ramp": 0.0, "confident_above": 0.6, **options}
    method = make_method(small_config(settings, train={"epochs": 10}), Pictures().given, K)
    assert isinstance(method, DaSC)
    method.set_epoch(0, epoch)
    return method


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def softmax(row: torch.Tensor) -> list[float]:
    powers = [math.exp(float(v)) for v in row]
    return [p / sum(powers) for p in powers]


def divided_batch(method: DaSC, rows: int = 5) -> Batch:
    batch = batch_of(method, rows, views=VIEWS)
    batch.second = batch_of(method, rows, seed=1, views=VIEWS)
    return batch


# -- selection -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("candidates", ["some", "none"])
def test_every_candidate_counts_for_every_centre_by_its_prediction(candidates: str) -> None:
    z, logits = normalize(random(0, N, P), dim=1), random(1, N, K)
    chosen = torch.arange(N) % 3 > 0 if candidates == "some" else torch.zeros(N, dtype=torch.bool)
    found = weighted_centres(z, logits, chosen, 0.1, World())
    for k in range(K):
        total = torch.zeros(P, dtype=torch.float64)
        for i in range(N):
            if chosen[i] or candidates == "none":
                total += softmax(logits[i] / 0.1)[k] * z[i]
        assert found[k].tolist() == pytest.approx((total / total.norm()).tolist(), abs=1e-9)


def test_labels_near_their_centre_are_believed_class_by_class() -> None:
    method = learner(epoch=6)
    given = method.data.given
    found: dict[str, torch.Tensor] = {"vote": torch.zeros(N)}
    for n in range(2):
        found[f"z{n}"], found[f"logits{n}"] = normalize(random(n, N, P), dim=1), 2 * random(n + 5, N, K)
        found[f"sureness{n}"] = torch.from_numpy(np.random.default_rng(n).random(N))
        found[f"loss{n}"] = torch.zeros(N)
    method.begin_epoch(survey_of(found))
    threshold = 1.65**0.6 / K
    for n in range(2):
        z, sure = found[f"z{n}"], found[f"sureness{n}"] > threshold
        assert 0 < sure.sum() < N
        centres = weighted_centres(z, found[f"logits{n}"], sure, 0.1, World())
        score = np.array([softmax(centres @ z[i])[y] for i, y in enumerate(given)])
        expected = np.zeros(N)
        for k in range(K):
            own = given == k
            values = (score[own] - score[own].min()) / np.ptp(score[own])
            mixture = GaussianMixture(2, random_state=0).fit(values[:, None])
            expected[own] = mixture.predict_proba(values[:, None])[:, mixture.means_[:, 0].argmax()]
        assert method.belief[n].tolist() == pytest.approx(expected.tolist(), abs=1e-4)
        trusted = np.bincount(given[expected > 0.5], minlength=K)
        assert method.counts[n].tolist() == trusted.tolist()


def test_a_survey_tells_how_sure_the_less_sure_classifier_is() -> None:
    method, images = learner().eval(), torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        found = method.survey_outputs(images, torch.tensor([0, 1, 2, 0]))
        for n in range(2):
            features, logits = method.network(n)(images)
            both = [max(softmax(row)) for scores in (logits, method.balanced[n](features)) for row in scores]
            assert found[f"sureness{n}"].tolist() == pytest.approx([min(both[i], both[4 + i]) for i in range(4)])
            assert found[f"z{n}"].norm(dim=1).tolist() == pytest.approx([1] * 4, abs=1e-5)


# -- losses --------------------------------------------------------------------------------------------------


def slow_contrast(z: torch.Tensor, target: torch.Tensor, valid: list[float], centres: torch.Tensor) -> list[float]:
    """The loss of every anchor: all other rows that count, and the centres, as positives by their targets' product."""
    rows = [(z[i], target[i]) for i in range(len(z)) if valid[i]] + [(centres[k], torch.eye(K)[k]) for k in range(K)]
    number = [i for i in range(len(z)) if valid[i]] + [-1] * K
    out = []
    for i in range(len(z)):
        denominator, positives, attracted = 0.0, 0.0, []
        for j, (key, said) in zip(number, rows):
            if i == j:
                continue
            share = float(target[i].double() @ said.double())
            likeliest = int(said.argmax())
            members = sum(int(other.argmax()) == likeliest for _, other in rows)
            logit = float(z[i] @ key) / 0.1
            denominator += math.exp(logit) / (members - share)
            positives += share
            attracted.append((share, logit))
        out.append(-sum(share * (logit - math.log(denominator)) for share, logit in attracted) / positives)
    return out


def test_the_balanced_contrast_is_the_formula() -> None:
    z, centres = normalize(random(0, 9, P), dim=1), normalize(random(1, K, P), dim=1)
    target = (3 * random(2, 9, K)).softmax(1)
    valid, confident = torch.tensor([1.0] * 8 + [0.0]), (target.amax(1) > 0.7).float()
    assert 0 < (valid * confident).sum() < 8
    each = slow_contrast(z, target, valid.tolist(), centres)
    expected = sum(v * c * loss for v, c, loss in zip(valid, confident, each)) / sum(valid * confident)
    found = balanced_contrastive(z, target, valid, confident, centres, 0.1, World(), [9])
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


def test_nobody_confident_gives_no_contrast_and_no_nan() -> None:
    method = learner(confident_above=1.0, sharpening=1.0).double()
    losses = method(divided_batch(method))
    assert float(losses["contrast"].detach()) == 0
    losses["loss"].backward()
    assert all(p.grad.isfinite().all() for p in method.parameters() if p.grad is not None)


def test_the_weak_view_gives_the_targets() -> None:
    """All four classifiers refine labels, the two plain ones guess those of the rest."""
    method = learner().double()
    method.belief.copy_(torch.rand(2, N))
    batch = divided_batch(method)
    labelled, rest = method._guess(1, [batch, batch.second])
    with torch.no_grad():
        for stream, targets, heads in ((batch, labelled, 4), (batch.second, rest, 2)):
            for row, image in enumerate(stream.views["weak"]):
                said = []
                for n in range(2):
                    features, logits = method.network(n)(image[None])
                    said.append(softmax(logits[0]))
                    if heads == 4:
                        said.append(softmax(method.balanced[n](features)[0]))
                mean = [sum(p[k] for p in said) / heads for k in range(K)]
                if heads == 4:
                    trust, y = float(method.belief[0, stream.index[row]]), int(stream.label[row])
                    mean = [trust * (k == y) + (1 - trust) * p for k, p in enumerate(mean)]
                powered = [p**2 for p in mean]
                assert targets[row].tolist() == pytest.approx([p / sum(powered) for p in powered], rel=1e-6)


def test_the_loss_is_the_sum_of_its_parts_and_unsure_samples_know_themselves() -> None:
    method = learner(epoch=WARMUP).double()
    method.queue[:, :7] = normalize(random(3, 2, 7, P), dim=2)
    method.written.fill_(7)
    batch = divided_batch(method)
    streams = [batch, batch.second]
    with torch.no_grad():
        found = {name: float(value) for name, value in method(batch).items()}
        method.pending = []
        images, target, valid = method._stacked(streams, method._guess(0, streams))
        z = method.project(0, method.network(0)(images, valid)[0], valid)
        unsure = []
        for stream in range(2):
            for row in range(5):
                first, second = 10 * stream + row, 10 * stream + 5 + row
                assert torch.equal(target[first], target[second])
                if not valid[first] or target[first].max() >= 0.6:
                    continue
                scores = [float(z[first] @ z[second])] + [float(z[first] @ key) for key in method.queue[0, :7]]
                unsure.append(-math.log(softmax(torch.tensor(scores, dtype=torch.float64) / 0.5)[0]))
    assert 0 < len(unsure) < 8
    assert found["discrimination"] == pytest.approx(sum(unsure) / len(unsure), rel=1e-6)
    both = sum(found[f"{kind}labelled"] + 25 * found[f"{kind}unlabelled"] for kind in ("", "balanced_"))
    expected = both + found["penalty"] + 0.5 * found["contrast"] + 0.3 * found["discrimination"]
    assert found["loss"] == pytest.approx(expected, rel=1e-9)


def test_the_warm_up_learns_both_views_and_later_their_contrast() -> None:
    method = learner(epoch=0).double()
    batch = batch_of(method, 5, views=("weak", "weak2"))
    assert set(method(batch)) == {"loss", "ce", "balanced"}
    method.set_epoch(0, 1)
    with torch.no_grad():
        found = {name: float(value) for name, value in method(batch).items()}
        images = torch.cat([batch.views["weak"], batch.views["weak2"]])
        label, valid = batch.label.repeat(2), batch.valid.repeat(2)
        features, logits = method.network(0)(images, batch.mask)
        shift = [math.log(max(c, 1)) for c in method.data.counts]
        shifted = method.balanced[0](features) + torch.tensor(shift)
        ce, balanced = (
            sum(-math.log(softmax(s[i])[label[i]]) for i in range(10) if valid[i]) / 8 for s in (logits, shifted)
        )
        z = method.project(0, features, batch.mask)
        centres = normalize(method.centres[0](method.network(0).head.weight, None), dim=1)
        each = slow_contrast(z, torch.eye(K, dtype=torch.float64)[label], valid.tolist(), centres)
        contrast = sum(loss for loss, v in zip(each, valid) if v) / 8
    expected = {"ce": ce, "balanced": balanced, "contrast": contrast, "loss": ce + balanced + 0.5 * contrast}
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("epoch", [0, 1, WARMUP])
def test_every_part_that_is_said_to_learn_gets_a_gradient(epoch: int) -> None:
    method = learner(epoch=epoch).double()
    batch = divided_batch(method) if epoch == WARMUP else batch_of(method, 5, views=("weak", "weak2"))
    method(batch)["loss"].backward()
    learns = {name for name, _ in method.named_parameters() if name.startswith(method.trained_parameters(0))}
    assert {name for name, p in method.named_parameters() if p.grad is not None} == learns


# -- the queue -----------------------------------------------------------------------------------------------


def test_keys_are_kept_after_the_step_and_networks_change_queues() -> None:
    method = learner().double()
    for epoch, slots in ((WARMUP, (0, 1)), (WARMUP + 1, (1, 0)), (WARMUP + 2, (0, 1))):
        method.set_epoch(0, epoch)
        assert tuple(method._slot(n) for n in range(2)) == slots
    method.set_epoch(0, WARMUP + 1)
    method(divided_batch(method))
    assert int(method.written.sum()) == 0
    method.after_step()
    assert method.written.tolist() == [0, 8]  # four rows of each stream count
    assert (method.queue[1, :8].norm(dim=1) - 1).abs().max() < 1e-6
    assert not method.queue[0].any()


def test_the_second_views_of_mixed_pictures_become_keys() -> None:
    method = learner(epoch=WARMUP).double()
    batch = divided_batch(method)
    kept: list[torch.Tensor] = []
    project = method.project
    method.project = lambda n, features, mask: kept.append(project(n, features, mask)) or kept[-1]  # type: ignore[method-assign]
    with torch.no_grad():
        method(batch)
    mixed = kept[0]  # the first that are projected
    assert [len(keys) for _, keys, _ in method.pending] == [5, 5]
    assert torch.equal(method.pending[0][1], mixed[5:10])
    assert torch.equal(method.pending[1][1], mixed[15:20])


def test_a_step_that_broke_leaves_no_keys() -> None:
    run = Course(small_config({"name": "dasc", "warmup": 0.67, "contrast_start": 0.0, "queue": 40}))
    list(islice(run.steps(), 2))
    method, key = run.method, torch.ones(2, 128)
    key[0, 3] = math.nan
    written = int(method.written[0])
    method.pending = [(0, key, torch.ones(2))]
    method.after_step()
    assert method.queue.isfinite().all()
    assert int(method.written[0]) == written + 1


def test_a_queue_too_small_for_a_step_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"method\.queue=31 cannot hold the keys of one step; set it to .* = 32 or more"
    ):
        learner(queue=31)


def test_rows_of_the_first_and_second_view_are_told_apart() -> None:
    method = learner()
    streams = [batch_of(method, 3), batch_of(method, 2)]
    first, second = views_apart(streams)
    assert first.tolist() == [0, 1, 2, 6, 7]
    assert second.tolist() == [3, 4, 5, 8, 9]


def test_a_hundred_classes_with_five_pictures_each_train() -> None:
    config = small_config(
        {"name": "dasc", "warmup": 0.5, "contrast_start": 0.0},
        train={"epochs": 2},
        data={"batch": 256, "mix_group": 64},
    )
    losses = list(Course(config, Pictures(500, 100, even=True), 100).steps())
    assert all(math.isfinite(found["loss"]) for found in losses)
