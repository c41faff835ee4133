"""RRL: neighbours, labels and losses written the slow way, and samples that end up without a label."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from peak_memory import peak_growth
from rivals import Course, Pictures, batch_of, make_method, small_config, survey_of
from torch.nn.functional import normalize

from pipeline.distributed.world import World
from pipeline.methods.parts.losses import instance_contrastive
from pipeline.methods.parts.mixup import mixup_lambda, mixup_partners, pair_within
from pipeline.methods.prototype_method import MIXUP_LAMBDA, MIXUP_PARTNERS
from pipeline.methods.rrl import MAIN, RRL, WARMUP, knn_label_distribution

K, D, N, T = 3, 6, 45, 0.3
Row = list[float]


def learner(epoch: int = 2, **options: object) -> RRL:
    settings = {"name": "rrl", "cleaning_start": 0.25, "neighbours": 4, "use_above": 0.6, **options}
    method = make_method(small_config(settings, train={"epochs": 8}), Pictures().given, K)
    assert isinstance(method, RRL)
    method.set_epoch(MAIN, epoch)
    return method


def embedded(seed: int, rows: int = N) -> torch.Tensor:
    return normalize(torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, D))), dim=1)


def softmax(row: torch.Tensor | Row) -> Row:
    powers = [math.exp(float(v)) for v in row]
    return [p / sum(powers) for p in powers]


def slow_neighbours(z: torch.Tensor, soft: list[Row], k: int) -> list[Row]:
    out = []
    for i in range(N):
        cosine = {j: float(z[i] @ z[j]) for j in range(N) if j != i}
        near = sorted(cosine, key=cosine.__getitem__, reverse=True)[:k]
        score = [sum(math.exp(cosine[j] / T) * soft[j][c] for j in near) for c in range(K)]
        out.append([v / sum(score) for v in score])
    return out


def slow_cleaning(z: torch.Tensor, linear: torch.Tensor, given: np.ndarray, soft: list[Row] | None) -> dict[str, list]:
    """Half neighbours, half classifier; the given label is kept above 0.1, any label used above 0.6."""

    def keep(rows: list[Row]) -> tuple[list[Row], list[bool]]:
        kept = [row[y] > 0.1 for row, y in zip(rows, given)]
        return [[float(c == y) for c in range(K)] if k else r for r, k, y in zip(rows, kept, given)], kept

    said = [softmax(row) for row in linear]
    soft = keep(said)[0] if soft is None else soft
    near = slow_neighbours(z, soft, 4)
    mixed = [[(a + b) / 2 for a, b in zip(n, s)] for n, s in zip(near, said)]
    new, kept = keep(mixed)
    hard = [row.index(max(row)) for row in new]
    return {"soft": new, "kept": kept, "hard": hard, "used": [float(max(row) > 0.6) for row in new],
            "score": [row[y] for row, y in zip(mixed, given)]}  # fmt: skip


def test_labels_are_cleaned_as_published_over_two_epochs() -> None:
    method = learner(epoch=2)  # a quarter of eight epochs: the first with cleaning
    given, soft = method.data.given, None
    for epoch in (2, 3):
        method.set_epoch(MAIN, epoch)
        z, linear = embedded(epoch), 3 * torch.randn(N, K, generator=torch.Generator().manual_seed(epoch))
        method.begin_epoch(survey_of({"z": z.float(), "linear": linear}))
        expected = slow_cleaning(z, linear, given, soft)
        soft = expected["soft"]
        assert method.kept.tolist() == expected["kept"]
        assert method.hard.tolist() == expected["hard"]
        assert method.used.tolist() == expected["used"]
        assert method.soft[torch.arange(N)].numpy() == pytest.approx(np.array(soft), abs=1e-5)
        beliefs = method.beliefs
        assert beliefs is not None
        assert beliefs.score.tolist() == pytest.approx(expected["score"], abs=1e-5)
        for k in range(K):
            rows = [i for i in range(N) if method.hard[i] == k and method.used[i]]
            mean = sum(z[i] for i in rows) / len(rows)
            assert method.prototypes[k].numpy() == pytest.approx((mean / mean.norm()).numpy(), abs=1e-5)
    assert not all(expected["used"])
    assert not all(expected["kept"])


def test_neighbours_in_blocks_are_those_of_one_block() -> None:
    z, soft = embedded(0).float(), torch.rand(N, K)
    whole = knn_label_distribution(z, z, soft, 4, T, 1000, torch.arange(N))
    assert torch.allclose(knn_label_distribution(z, z, soft, 4, T, 7, torch.arange(N)), whole, atol=1e-6)


def test_the_loss_is_the_formula() -> None:
    """One picture at a time; only samples with a label count in the supervised losses, and only they mix."""
    method = learner(epoch=4, prototype_ramp=1.0).double()
    rng = np.random.default_rng(0)
    method.hard.copy_(torch.from_numpy(rng.integers(0, K, N)))
    method.used.copy_(torch.from_numpy((rng.random(N) < 0.7).astype(float)))
    method.prototypes.copy_(embedded(5, K))
    batch = batch_of(method, 8, views=("weak", "strong"))
    weight = [float(v * method.used[i]) for v, i in zip(batch.valid, batch.index)]
    assert 2 < sum(weight) < 7
    with torch.no_grad():
        found = {name: float(value) for name, value in method(batch).items()}
        target = [int(method.hard[i]) for i in batch.index]
        network = method.network

        def look(image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
            feature, logits = network(image[None])
            code = network.projector(feature)
            error = ((method.decoder(code).clamp_min(0) - feature) ** 2).mean()
            return logits[0], code[0] / code[0].norm(), float(error)

        weak = [look(image) for image in batch.views["weak"]]
        strong = [look(image) for image in batch.views["strong"]]
        ce = sum(-w * math.log(softmax(row[0])[y]) for w, row, y in zip(weight, weak, target)) / sum(weight)
        valid = [float(v) for v in batch.valid]
        rec = sum(v * (a[2] + b[2]) for v, a, b in zip(valid, weak, strong)) / sum(valid)
        z, z_strong = (torch.stack([row[1] for row in rows]) for rows in (weak, strong))
        cc = float(instance_contrastive(z, z_strong, batch.valid, T, World(), batch.rows))
        lam = mixup_lambda(batch, 8.0, MIXUP_LAMBDA)
        batch.valid = torch.tensor(weight)
        partner = mixup_partners(batch, 2, MIXUP_PARTNERS).tolist()
        images, pc = torch.cat([batch.views["weak"], batch.views["strong"]]), 0.0
        for i, j in enumerate(partner):
            if not weight[i % 8]:
                continue
            assert weight[j % 8]
            p = softmax(method.prototypes @ look(lam * images[i] + (1 - lam) * images[j])[1] / T)
            pc -= lam * math.log(p[target[i % 8]]) + (1 - lam) * math.log(p[target[j % 8]])
        pc /= 2 * sum(weight)
    expected = {"ce": ce, "rec": rec, "cc": cc, "pc": pc, "loss": ce + rec + cc + 3 * pc}  # 1 + 4/8 * (5 - 1)
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_warm_up_knows_no_prototypes() -> None:
    method = learner()
    method.set_epoch(WARMUP, 0)
    batch = batch_of(method.double(), 5)
    assert set(method(batch)) == {"loss", "ce", "rec"}


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_every_part_that_is_said_to_learn_gets_a_gradient(weight) -> None:
    method = learner(reconstruction=weight).double()
    for number, stage in enumerate(method.stages()):
        method.set_epoch(number, 0)
        method.zero_grad(set_to_none=True)
        method(batch_of(method, 5, views=("weak", "strong")))["loss"].backward()
        learns = {name for name, _ in method.named_parameters() if name.startswith(stage.trainable)}
        assert {name for name, p in method.named_parameters() if p.grad is not None} == learns


def test_neighbours_judge_from_the_newest_look_at_the_samples() -> None:
    method = learner().eval()
    z = embedded(1).float()
    method.end_epoch(survey_of({"z": z, "linear": torch.zeros(N, K)}))
    images = torch.randn(2, 3, 8, 8)
    said = method.scores(images)["neighbours"].softmax(1)
    near = (method.embeddings(images) @ z.T).topk(4, 1)
    expected = (near.values / T).softmax(1)[:, :, None] * method.soft[near.indices]
    assert torch.allclose(said, expected.sum(1), atol=1e-4)


# -- what breaks the original --------------------------------------------------------------------------------


def test_a_class_without_labelled_samples_keeps_its_prototype() -> None:
    method = learner()
    old = embedded(3, K).float()
    method.prototypes.copy_(old)
    linear = torch.zeros(N, K)
    linear[:, 0] = 50  # everybody is of class 0, and no other label is kept
    method.hard.zero_()
    method.set_epoch(MAIN, 3)
    method.begin_epoch(survey_of({"z": embedded(0).float(), "linear": linear}))
    assert torch.equal(method.prototypes[1:], old[1:])
    assert not torch.equal(method.prototypes[0], old[0])


def test_nobody_with_a_label_gives_no_gradient_but_no_nan() -> None:
    method = learner().double()
    method.used.zero_()
    loss = method(batch_of(method, 5, views=("weak", "strong")))["loss"]
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in method.parameters() if p.grad is not None)


@pytest.mark.parametrize("samples", [1, 2])
def test_fewer_samples_than_neighbours(samples) -> None:
    z, soft = embedded(0, samples).float(), torch.eye(K)[:samples]
    said = knn_label_distribution(z, z, soft, 200, T, 8, torch.arange(samples))
    assert torch.equal(said, torch.zeros(1, K) if samples == 1 else soft.flip(0))


def test_a_hundred_classes_with_five_pictures_each_train() -> None:
    settings = {"name": "rrl", "cleaning_start": 0.5, "warmup_steps": 1}
    config = small_config(settings, train={"epochs": 2}, data={"batch": 256, "mix_group": 64})
    losses = list(Course(config, Pictures(500, 100, even=True), 100).steps())
    assert all(math.isfinite(found["loss"]) for found in losses)


def test_rows_without_a_label_never_mix_with_those_that_have_one() -> None:
    group = torch.tensor([0, 0, -1, 0, -1, 0])
    partner = pair_within(group, torch.arange(6), torch.arange(6)[None], 3)
    assert torch.equal(group[partner], group)


# -- memory ------------------------------------------------------------------------------------------------------


def test_memory_is_that_of_the_corrected_samples_not_of_all_soft_labels() -> None:
    samples, classes = 4000, 6000  # one float32 for each pair: 92 MB
    settings = {"name": "rrl", "cleaning_start": 0.25, "neighbours": 4, "neighbour_block": 16}
    config = small_config(settings, train={"epochs": 8})
    labels = np.arange(samples, dtype=np.int32)
    method, growth = peak_growth(lambda: make_method(config, labels, classes))
    assert growth < 20
    linear = torch.full((samples, classes), -1.0)
    linear[torch.arange(samples), torch.from_numpy(labels).long()] = 20
    linear[::20] = torch.randn(samples // 20, classes)  # every twentieth label will not be kept
    survey = survey_of({"z": embedded(0, samples).float(), "linear": linear})
    for epoch in (2, 3):
        method.set_epoch(MAIN, epoch)
        _, growth = peak_growth(lambda: method.begin_epoch(survey))
        assert growth < 92  # less than one whole table
        assert method.soft_rows.shape == (samples // 20, classes)
        assert not method.kept[::20].any()
        assert method.kept.sum() == samples - samples // 20


def test_soft_labels_of_version_0_1_are_read() -> None:
    method, whole = learner(), torch.eye(K)[torch.arange(N) % K]
    whole[::4] = torch.rand(len(whole[::4]), K) / K
    state = {name: value for name, value in method.state_dict().items() if not name.startswith("soft_")}
    again = learner()
    again.load_state_dict({**state, "soft": whole, "hard": whole.argmax(1)})
    assert torch.equal(again.soft[torch.arange(N)], whole)
    assert len(again.soft_rows) == len(whole[::4])
