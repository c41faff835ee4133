"""MoPro: queue, prototypes, corrections and losses written the slow way, and the classifier's last stage."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from rivals import Course, Pictures, batch_of, make_method, small_config, survey_of
from torch.nn.functional import normalize

from pipeline.distributed.world import World
from pipeline.methods.mopro import MAIN, RETRAIN, MoPro, ema_update
from pipeline.methods.parts.key_queue import enqueue, queue_contrastive
from shards.base.errors import UserError

K, D, N, T = 3, 6, 45, 0.1
VIEWS = ("weak", "strong")


def mover(epoch: int = 4, **options: object) -> MoPro:
    settings = {"name": "mopro", "queue": 20, "cleaning_start": 0.25, "relabel_above": 0.5, **options}
    method = make_method(small_config(settings, train={"epochs": 8}), Pictures().given, K)
    assert isinstance(method, MoPro)
    method.set_epoch(MAIN, epoch)
    return method


def rows(seed: int, n: int) -> torch.Tensor:
    return normalize(torch.from_numpy(np.random.default_rng(seed).normal(size=(n, D))), dim=1)


def softmax(row: torch.Tensor) -> list[float]:
    powers = [math.exp(float(v)) for v in row]
    return [p / sum(powers) for p in powers]


def test_prototypes_move_by_one_sample_after_the_other() -> None:
    prototypes, z = rows(0, K), rows(1, 12)
    prototypes[2] = 0  # a class not seen yet
    label = torch.from_numpy(np.random.default_rng(2).integers(0, K, 12))
    weight = torch.tensor([1.0, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1])
    slow = prototypes.clone()
    for vector, k, w in zip(z, label, weight):
        if w:
            slow[k] = 0.9 * slow[k] + 0.1 * vector
    slow = slow / slow.norm(dim=1, keepdim=True)
    assert torch.allclose(ema_update(prototypes, z, label, weight, 0.9).double(), slow, atol=1e-6)
    assert torch.allclose(ema_update(slow, z, label, torch.zeros(12), 0.9).double(), slow, atol=1e-6)


def test_the_queue_holds_the_newest_keys_that_count() -> None:
    queue, written = torch.zeros(5 + 1, D, dtype=torch.float64), torch.zeros((), dtype=torch.long)
    kept: list[torch.Tensor] = []
    for step in range(4):
        keys, valid = rows(step, 4), torch.tensor([1.0, 0, 1, 1])
        enqueue(queue, written, keys, valid)
        kept += [key for key, good in zip(keys, valid) if good]
        expected = {tuple(key.tolist()) for key in kept[-5:]}
        assert {tuple(row.tolist()) for row in queue[:5] if row.any()} == expected
        assert int(written) == len(kept)
        assert not queue[5].any()


def test_the_contrast_is_the_formula_over_the_filled_part_of_the_queue() -> None:
    z, key, queue = rows(0, 4), rows(1, 4), rows(2, 9)
    valid = torch.tensor([1.0, 1, 0, 1])
    for filled in (0, 4, 9, 30):
        slow = []
        for i in (0, 1, 3):
            own = math.exp(float(z[i] @ key[i]) / T)
            others = sum(math.exp(float(z[i] @ queue[j]) / T) for j in range(min(filled, 9)))
            slow.append(-math.log(own / (own + others)))
        found = queue_contrastive(z, key, queue, torch.tensor(filled), valid, T, World())
        assert float(found) == pytest.approx(sum(slow) / 3, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("share", [0.5, 0.2])
def test_the_loss_is_the_formula(share: float) -> None:
    """Labels corrected row by row: relabelled when sure, kept above chance, else only the contrast counts."""
    method = mover(relabel_above=0.45, classifier_weight=share).double()
    method.prototypes.copy_(rows(0, K))
    method.queue[:20] = rows(1, 20)
    method.written.fill_(20)
    batch = batch_of(method, 12, views=VIEWS)
    seen = {"kept": 0, "changed": 0, "dropped": 0}
    with torch.no_grad():
        method.network.head.weight.mul_(20)
        found = {name: float(value) for name, value in method(batch).items()}
        ce, pc, cc, used = 0.0, 0.0, 0.0, 0
        for i in range(11):  # the twelfth row stands for nothing
            feature, logits = method.network(batch.views["weak"][i][None])
            z = normalize(method.network.projector(feature), dim=1)[0]
            averaged = method.key_average.network
            key = normalize(averaged.projector(averaged(batch.views["strong"][i][None])[0]), dim=1)[0]
            said, near = softmax(logits[0]), softmax(method.prototypes @ z / T)
            soft = [share * a + (1 - share) * b for a, b in zip(said, near)]
            label = int(batch.label[i])
            good = soft[label] > 1 / K
            if max(soft) > 0.45:
                seen["changed"] += label != soft.index(max(soft))
                label, good = soft.index(max(soft)), True
            elif good:
                seen["kept"] += 1
            if good:
                ce, pc, used = ce - math.log(said[label]), pc - math.log(near[label]), used + 1
            else:
                seen["dropped"] += 1
            own = math.exp(float(z @ key) / T)
            cc -= math.log(own / (own + sum(math.exp(float(z @ q) / T) for q in method.queue[:20]))) / 11
    assert seen["changed"]
    expected = {"ce": ce / used, "cc": cc, "pc": pc / used, "loss": ce / used + cc + pc / used}
    assert found == pytest.approx(expected, rel=1e-5)


def test_corrections_are_remembered_by_sample_and_reported_in_the_next_epoch() -> None:
    method = mover(epoch=2)
    logits = torch.tensor([[9.0, 0, 0], [0, 9, 0], [0.5, 0, 0.5]])
    near = torch.tensor([[9.0, 0, 0], [0, 9, 0], [0.5, 0, 0.5]])
    label, kept, used, score = method._correct(logits, near, torch.tensor([0, 0, 1]))
    assert label.tolist() == [0, 1, 1]
    assert kept.tolist() == [1, 0, 0]
    assert used.tolist() == [1, 1, 0]  # sure and right, sure and changed, out of distribution
    assert score[2] < 1 / 3
    assert method.beliefs is None  # the first epoch with corrections has none to tell of
    run = Course(small_config({"name": "mopro", "queue": 20, "cleaning_start": 0.34, "retrain_part": 0.0}))
    for _ in run.steps():
        pass
    run.method.set_epoch(MAIN, 2)
    beliefs = run.method.beliefs
    assert beliefs is not None
    given = torch.from_numpy(run.pictures.given).long()
    assert (beliefs.score < 1).all()  # every sample was judged
    assert torch.equal(beliefs.label[beliefs.clean], given[beliefs.clean])


def test_beliefs_are_the_corrections_and_a_changed_label_is_not_clean() -> None:
    method = mover(epoch=4)
    given = torch.from_numpy(method.data.given).int()
    method.label.copy_(given)
    method.label[0] = (given[0] + 1) % K  # sample 0 was relabelled, 1 doubted, 2 dropped; the others stand
    method.kept[1:3] = 0
    method.used[2] = 0
    method.score.copy_(torch.linspace(0, 1, N))
    beliefs = method.beliefs
    assert beliefs is not None
    assert beliefs.clean.tolist() == [False] * 3 + [True] * (N - 3)
    assert beliefs.label.tolist() == method.label.tolist()
    assert beliefs.weight.tolist() == [1, 1, 0] + [1] * (N - 3)
    assert torch.equal(beliefs.score, method.score)
    assert [part.tolist() for part in beliefs.basis] == [beliefs.label.tolist(), beliefs.weight.tolist()]


def test_the_last_stage_trains_the_classifier_alone_on_balanced_corrected_labels(monkeypatch) -> None:
    method = mover(retrain_part=0.5)
    stages = method.stages()
    assert (stages[1].epochs, stages[1].trainable) == (4, ("network.head",))
    method.set_epoch(RETRAIN, 0)
    assert method.surveys_before_epoch()
    method.prototypes.copy_(torch.eye(K, D))
    z = torch.zeros(N, D)
    z[torch.arange(N), torch.arange(N) % K] = 1  # sample i belongs to class i mod 3, whatever its label
    monkeypatch.setattr(method, "eval_forward", lambda images: (z, 9 * z[:, :K]))
    outputs = method.survey_outputs(torch.empty(N), torch.from_numpy(method.data.given).long())
    assert {value.shape for value in outputs.values()} == {(N,)}  # not K numbers of every sample
    method.begin_epoch(survey_of(outputs))
    assert method.label.tolist() == [i % K for i in range(N)]
    method.used[::2] = 0
    (walk,) = method.passes()
    assert set(walk.order) <= set(range(1, N, 2))
    assert len(walk.order) == N // 2
    assert np.bincount(method.label[walk.order]).tolist() == pytest.approx([len(walk.order) / K] * K, abs=1)
    method.train()
    assert not method.network.backbone.training
    batch = batch_of(method.double(), 5)
    method(batch)["loss"].backward()
    assert {name for name, p in method.named_parameters() if p.grad is not None} == {
        "network.head.weight",
        "network.head.bias",
    }


# -- what breaks the original --------------------------------------------------------------------------------


def test_a_queue_smaller_than_a_batch_is_refused() -> None:
    with pytest.raises(UserError, match=r"method.queue=8 .* data.batch=16"):
        mover(queue=8)


def test_nobody_with_a_label_still_trains() -> None:
    method = mover().double()
    method.used.zero_()
    method.set_epoch(RETRAIN, 1)
    assert len(method.passes()[0].order) == N
    method.set_epoch(MAIN, 4)
    method.prototypes.zero_()  # no prototype, uniform scores: nobody is above chance
    with torch.no_grad():
        for p in method.network.head.parameters():
            p.zero_()
    losses = method(batch_of(method, 5, views=VIEWS))
    assert float(losses["ce"].detach()) == 0
    losses["loss"].backward()
    assert all(torch.isfinite(p.grad).all() for p in method.parameters() if p.grad is not None)


def test_a_hundred_classes_with_five_pictures_each_train() -> None:
    settings = {"name": "mopro", "queue": 256, "cleaning_start": 0.5, "retrain_part": 0.5}
    config = small_config(settings, train={"epochs": 2}, data={"batch": 256, "mix_group": 64})
    losses = list(Course(config, Pictures(500, 100, even=True), 100).steps())
    assert all(math.isfinite(found["loss"]) for found in losses)
