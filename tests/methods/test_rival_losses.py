"""Each rival's loss against the formula written out, sample by sample, in double precision."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from rivals import batch_of, make_method, small_config, survey_of
from torch import Tensor

from pipeline.data.batch import Batch, TrainingSet
from pipeline.distributed.world import World
from pipeline.methods import aum, elr, har, ldam, mentornet
from pipeline.methods.base import Method
from pipeline.methods.parts.per_sample import rank_in_batch

GIVEN = np.array([0] * 20 + [1] * 9 + [2] * 4 + [3], np.int32)
CLASSES = 5  # the last one has no samples
ROWS = 9  # of a batch; the last of them stands for nothing


def set_up(name: str, stage: int = 0, epoch: int = 0, **options: Any) -> tuple[Any, Batch]:
    method = make_method(small_config({"name": name, **options}, train={"epochs": 10}), GIVEN, CLASSES).double()
    method.set_epoch(stage, epoch)
    method.train()
    return method, batch_of(method, ROWS)


def real(batch: Batch) -> list[tuple[int, int, int]]:
    """(row, sample, label) of the rows that count."""
    return [(r, int(batch.index[r]), int(batch.label[r])) for r in range(ROWS) if batch.valid[r] > 0]


def log_p(logits: Tensor, k: int) -> float:
    return float(logits[k]) - math.log(sum(math.exp(float(u)) for u in logits))


def softmax(logits: Tensor) -> list[float]:
    return [math.exp(log_p(logits, k)) for k in range(len(logits))]


def loss_of(method: Method, batch: Batch) -> float:
    return float(method(batch)["loss"].detach())


# -- LDAM -----------------------------------------------------------------------------------------------


def slow_ldam(method: ldam.LDAM, batch: Batch, weights: list[float]) -> float:
    features = method.network(batch.views["weak"])[0].detach()
    directions = method.network.head.weight.detach()
    raw = [n**-0.25 if n else 0.0 for n in np.bincount(GIVEN, minlength=CLASSES)]
    total = weight = 0.0
    for r, _, y in real(batch):
        cosines = [float(features[r] @ d) / float(features[r].norm() * d.norm()) for d in directions]
        cosines[y] -= 0.5 * raw[y] / max(raw)
        total -= weights[y] * log_p(30 * torch.tensor(cosines, dtype=torch.float64), y)
        weight += weights[y]
    return total / weight


def test_ldam_scores_are_scaled_cosines_without_margins() -> None:
    method, batch = set_up("ldam")
    method.eval()
    cosine = method.eval_network(batch.views["weak"])[1]
    assert torch.equal(method.scores(batch.views["weak"])["cosine"], 30 * cosine.float())


def test_ldam_takes_its_margin_from_the_label_alone() -> None:
    method, batch = set_up("ldam")
    assert loss_of(method, batch) == pytest.approx(slow_ldam(method, batch, [1] * CLASSES), rel=1e-6)


@pytest.mark.parametrize("epoch", [7, 8])
def test_deferred_weights_come_late_and_balance_the_effective_numbers(epoch: int) -> None:
    method, batch = set_up("ldam_drw", epoch=epoch, reweight_start=0.8, beta=0.9)
    raw = [(1 - 0.9) / (1 - 0.9**n) if n else 0.0 for n in np.bincount(GIVEN, minlength=CLASSES)]
    weights = raw if epoch == 8 else [1.0] * CLASSES
    assert loss_of(method, batch) == pytest.approx(slow_ldam(method, batch, weights), rel=1e-6)
    assert float(method.weights.sum()) == pytest.approx(4 if epoch == 8 else 5)  # one per class that has samples


# -- cRT and NCM ----------------------------------------------------------------------------------------


def test_the_second_classifier_sees_a_representation_that_stands_still() -> None:
    config = small_config({"name": "crt"}, model={"norm": "batch"}, train={"epochs": 10})
    method = make_method(config, GIVEN, CLASSES).double()
    method.set_epoch(1, 0)
    batch = batch_of(method, ROWS)
    before = {k: v.clone() for k, v in method.network.state_dict().items()}
    method.train()
    loss = method(batch)["loss"]
    loss.backward()
    method.eval()
    logits = method.balanced(method.network(batch.views["weak"])[0])
    expected = -sum(log_p(logits[r], y) for r, _, y in real(batch)) / len(real(batch))
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert all(torch.equal(v, before[k]) for k, v in method.network.state_dict().items())
    assert [k for k, p in method.named_parameters() if p.grad is not None] == [
        "balanced.weight",
        "balanced.bias",
    ]


def test_the_second_stage_shows_every_class_equally_often() -> None:
    method, _ = set_up("crt", stage=1)
    (walk,) = method.passes()
    counts = np.bincount(GIVEN[walk.order], minlength=CLASSES)
    assert counts[:4].max() - counts[:4].min() <= 1
    assert counts[4] == 0


def test_nearest_class_mean_is_the_formula() -> None:
    method, batch = set_up("ncm")
    features = torch.from_numpy(np.random.default_rng(1).normal(size=(len(GIVEN), method.network.features)))
    method.end_epoch(survey_of({"features": features}))
    method.eval()
    scores = method.scores(batch.views["weak"])["nearest_mean"]
    centre = sum(features) / len(features)
    rows = [(f - centre) / (f - centre).norm() for f in features]
    test = [(f - centre) / (f - centre).norm() for f in method.network(batch.views["weak"])[0]]
    for k in range(4):
        members = [row for row, y in zip(rows, GIVEN) if y == k]
        mean = sum(members) / len(members)
        assert scores[:, k].tolist() == pytest.approx([-float(((x - mean) ** 2).sum()) for x in test], rel=1e-5)
    assert (scores[:, 4] < scores[:, :4].min()).all()  # nobody is nearest to a class without samples


# -- Co-teaching and MentorNet --------------------------------------------------------------------------


def test_each_network_learns_from_what_its_peer_finds_easy() -> None:
    method, batch = set_up("coteaching", epoch=2, noise_rate=0.4, ramp=0.4)  # half of the ramp: 0.2 of 8 samples go
    logits = [method.network(n)(batch.views["weak"])[1] for n in range(2)]
    losses = [{r: -log_p(rows[r], y) for r, _, y in real(batch)} for rows in logits]
    easy = [sorted(one, key=one.__getitem__)[:6] for one in losses]
    expected = sum(sum(losses[n][r] for r in easy[1 - n]) / 6 for n in range(2))
    assert loss_of(method, batch) == pytest.approx(expected, rel=1e-6)
    beliefs = method.beliefs
    for r, i, _ in real(batch):
        assert bool(beliefs.clean[i]) == (r in easy[0] and r in easy[1])
        assert float(beliefs.score[i]) == pytest.approx((math.exp(-losses[0][r]) + math.exp(-losses[1][r])) / 2)


def test_equal_losses_are_cut_by_the_order_of_the_batch() -> None:
    _, batch = set_up("coteaching")
    batch.valid[2] = 0
    place, count = rank_in_batch(torch.zeros(ROWS), batch, World())
    assert place[batch.valid > 0].tolist() == list(range(ROWS - 2))
    assert int(count) == ROWS - 2


def test_the_noise_rate_is_estimated_class_by_class() -> None:
    """Rare classes have larger losses throughout; a third of each class stands out."""
    rng = np.random.default_rng(0)
    given = np.array([0] * 300 + [1] * 30, np.int32)  # the second class is rare
    config = small_config({"name": "coteaching", "ramp": 0.5}, train={"epochs": 10})
    method = make_method(config, given, 2)
    method.set_epoch(0, 5)
    assert method.surveys_before_epoch()
    wrong = np.arange(330) % 3 == 0
    margin = torch.from_numpy(np.where(wrong, -3, 3) - 2 * given + rng.normal(size=330) * 0.3).float()
    own = torch.from_numpy(given).bool()
    logits = torch.stack([torch.where(own, -margin, margin), torch.zeros(330)], 1)
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(given).long(), reduction="none")
    method.begin_epoch(survey_of({"loss": 2 * loss}))
    assert method.beliefs.extra["noise_rate"] == pytest.approx(1 / 3, abs=0.02)
    method.set_epoch(0, 6)
    assert not method.surveys_before_epoch()  # the estimate of the ramp's end stays


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("coteaching", {"noise_rate": 0.4}, "noise rate 0.400, given by method.noise_rate"),
        ("coteaching", {"ramp": 0.3}, "noise rate: estimated in epochs 1 to 3"),
        ("mentornet", {"percentile": 0.6}, "noise rate 0.400, given by method.percentile=0.6"),
    ],
)
def test_the_log_says_where_the_noise_rate_comes_from(
    name: str, options: dict[str, float], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        method, _ = set_up(name, **options)
        method.begin_epoch(None)
        assert told in caplog.text
        if method.surveys_before_epoch() or "estimated in" in told:
            method.set_epoch(0, 3)
            method.begin_epoch(survey_of({"loss": torch.linspace(0, 1, len(GIVEN))}))
            assert f"noise rate {float(method.noise):.3f}, estimated from the losses" in caplog.text


@pytest.mark.parametrize(("epoch", "phase"), [(1, "all"), (5, "hard"), (9, "soft")])
def test_the_mentor_follows_its_curriculum(epoch: int, phase: str) -> None:
    method, batch = set_up("mentornet", epoch=epoch, dropout=0.0, dropout_late=0.0, soft_width=0.5)
    method.moving.fill_(1.2)
    logits = method.network(batch.views["weak"])[1]
    losses = [-log_p(logits[r], y) for r, _, y in real(batch)]
    moving = 0.5 * 1.2 + 0.5 * float(np.quantile(losses, 0.75))
    beyond = [loss - moving for loss in losses]
    weights = {
        "all": [1.0 for _ in beyond],
        "hard": [float(d <= 0) for d in beyond],
        "soft": [min(max(1 - d / 0.5, 0.0), 1.0) for d in beyond],
    }[phase]
    expected = sum(w * loss for w, loss in zip(weights, losses)) / sum(weights)
    assert loss_of(method, batch) == pytest.approx(expected, rel=1e-6)
    assert [float(method.weight[i]) for _, i, _ in real(batch)] == pytest.approx(weights)


def test_example_dropout_leaves_out_its_share() -> None:
    method, _ = set_up("mentornet", dropout=0.5)
    losses = {tuple(method(batch_of(method, ROWS, seed))["loss"] for _ in range(2)) for seed in range(3)}
    assert all(first == second for first, second in losses)  # the draw belongs to the step and the sample
    big = Batch(torch.arange(10_000), *[torch.zeros(0)] * 2, {}, (), (1, 2, 3), torch.zeros(0))
    assert float((mentornet.mixup.row_uniforms(big, 1) < 0.5).double().mean()) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.75, 1.0])
def test_quantile_of_the_valid_values(part: float) -> None:
    values, valid = torch.tensor([3.0, 9.0, 1.0, 2.0, 7.0]), torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    assert float(mentornet.quantile(values, valid, part)) == pytest.approx(float(np.quantile([3, 1, 2, 7], part)))
    assert float(mentornet.quantile(values, torch.zeros(5), part)) == 0


# -- ELR ------------------------------------------------------------------------------------------------


def test_elr_remembers_and_holds_back() -> None:
    method, batch = set_up("elr", beta=0.7, strength=3.0)
    method.memory.copy_(torch.from_numpy(np.random.default_rng(2).dirichlet(np.ones(CLASSES), len(GIVEN))))
    before = method.memory.clone()
    logits = method.network(batch.views["weak"])[1]
    total, memory = 0.0, before.clone()
    for r, i, y in real(batch):
        p = [min(max(q, 1e-4), 1 - 1e-4) for q in softmax(logits[r])]
        for k in range(CLASSES):
            memory[i, k] = 0.7 * before[i, k] + 0.3 * p[k] / sum(p)
        total -= log_p(logits[r], y)
        total += 3 * math.log(1 - sum(float(memory[i, k]) * p[k] for k in range(CLASSES)))
    assert loss_of(method, batch) == pytest.approx(total / len(real(batch)), rel=1e-6)
    assert torch.allclose(method.memory, memory, atol=1e-9)  # also: the row that stands for nothing wrote nothing


@pytest.mark.parametrize("remembered", [False, True])
def test_elr_plus_learns_mixed_pictures_with_the_peers_memory(remembered: bool) -> None:
    method, batch = set_up("elr_plus", epoch=2, ramp=0.5, remembered_targets=remembered)
    batch.key = (*batch.key[:2], 1)  # step 1 of 3: 7 of 15 steps of the ramp are done
    method.memory.copy_(torch.from_numpy(np.random.default_rng(2).dirichlet(np.ones(CLASSES), (len(GIVEN), 2))))
    images, memory = batch.views["weak"], method.memory.clone()
    total = 0.0
    for n in range(2):
        guess = method.average[1 - n].network(images)[1]
        for r, i, _ in real(batch):
            memory[i, n] = 0.7 * memory[i, n] + 0.3 * torch.tensor(softmax(guess[r]), dtype=torch.float64)
        lam = elr.mixup.mixup_lambda(batch, 1.0, elr.MIXUP_LAMBDA + n, fold=True)
        partner = elr.mixup.mixup_partners(batch, 1, elr.MIXUP_PARTNERS + n)
        mixed = torch.stack([lam * images[r] + (1 - lam) * images[partner[r]] for r in range(ROWS)])
        logits = method.networks[n](mixed)[1]
        for r, i, y in real(batch):
            j, other = int(batch.index[partner[r]]), int(batch.label[partner[r]])
            t = [lam * float(memory[i, n, k]) + (1 - lam) * float(memory[j, n, k]) for k in range(CLASSES)]
            target = [lam * (k == y) + (1 - lam) * (k == other) for k in range(CLASSES)]
            if remembered:
                target = [a * b for a, b in zip(target, t)]
                target = [a / sum(target) for a in target]
            p = [min(max(q, 1e-4), 1 - 1e-4) for q in softmax(logits[r])]
            total -= sum(a * log_p(logits[r], k) for k, a in enumerate(target))
            total += 3 * math.exp(-5 * (1 - 7 / 15) ** 2) * math.log(1 - sum(a * b for a, b in zip(t, p)))
    assert 0.5 <= lam < 1
    assert loss_of(method, batch) == pytest.approx(total / len(real(batch)), rel=1e-6)
    assert torch.allclose(method.memory, memory, atol=1e-9)


def test_beliefs_of_elr_are_the_remembered_classes() -> None:
    method, _ = set_up("elr")
    method.memory[0, 2] = 0.5
    beliefs = method.beliefs
    assert int(beliefs.label[0]) == 2
    assert not beliefs.clean[0]
    assert beliefs.clean[1:].all()  # nothing remembered: the label stands


# -- HAR ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("late", [False, True])
def test_har_smooths_each_sample_by_the_strength_of_its_class(norm: str, late: bool) -> None:
    """The gradients are found by moving one normalised activation after the other."""
    config = small_config({"name": "har", "reweight_start": 0.5, "beta": 0.9}, model={"norm": norm, "width": 2})
    method = make_method(config, GIVEN, CLASSES).double()
    method.set_epoch(1, 2 if late else 0)
    method.train()
    batch = batch_of(method, 4)
    method.strengths.copy_(torch.linspace(0.2, 1.0, CLASSES))
    layers = method._norms()
    assert len(layers) == 16
    counts = np.bincount(GIVEN, minlength=CLASSES)
    weight = {r: (0.1 / (1 - 0.9 ** counts[y]) if late else 1.0) for r, _, y in rows_of(batch)}

    def mean_loss(layer: torch.nn.Module, nudge: Tensor) -> Tensor:
        """L_ce with `nudge` added to what the layer has normalised, before its scale and shift."""
        hook = layer.register_forward_hook(lambda m, _, out: out + m.weight[:, None, None] * nudge)
        logits = method.network(batch.views["weak"], batch.mask)[1]
        hook.remove()
        return sum(-weight[r] * logits[r].log_softmax(0)[y] for r, _, y in rows_of(batch)) / sum(weight.values())

    expected = 0.0
    shapes = shapes_of(method, layers, batch)
    for layer, shape in zip(layers, shapes):
        nudge = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(mean_loss(layer, nudge), nudge)
        for r, _, y in rows_of(batch):
            expected += float(method.strengths[y]) * float(slope[r].norm()) / len(rows_of(batch))
    assert float(method(batch)["har"]) == pytest.approx(expected, rel=1e-5)


def rows_of(batch: Batch) -> list[tuple[int, int, int]]:
    return [(r, int(batch.index[r]), int(batch.label[r])) for r in range(len(batch.index)) if batch.valid[r] > 0]


def shapes_of(method: har.HAR, layers: list[Any], batch: Batch) -> list[torch.Size]:
    with method._record_outputs() as outputs:
        method.network(batch.views["weak"], batch.mask)
    return [out.shape for out in outputs]


def test_the_regulariser_has_the_right_gradient() -> None:
    method, batch = set_up("har", stage=1)
    method.strengths.fill_(1.0)
    weight = method.network.head.weight
    (slope,) = torch.autograd.grad(method(batch)["har"], weight)
    step = torch.zeros_like(weight)
    step[1, 2] = 1e-5
    with torch.no_grad():
        weight += step
    above = float(method(batch)["har"])
    with torch.no_grad():
        weight -= 2 * step
    below = float(method(batch)["har"])
    assert float(slope[1, 2]) == pytest.approx((above - below) / 2e-5, rel=1e-4, abs=1e-9)


def test_class_strengths_come_from_held_out_errors_and_counts() -> None:
    method, _ = set_up("har", stage=1)
    assert method.surveys_before_epoch()
    held = method.held_out
    assert np.bincount(GIVEN[held], minlength=CLASSES).tolist() == [10, 4, 2, 0, 0]
    wrong = torch.zeros(len(GIVEN))
    wrong[np.flatnonzero(held & (GIVEN == 1))[:3]] = 1
    method.begin_epoch(survey_of({"wrong": wrong}))
    raw = [0.0, 0.75**0.6 / 9**0.4, 0.0, 1 / 1**0.4, 0.0]  # of class 3 nobody was held out
    assert method.strengths.tolist() == pytest.approx([r / max(raw) for r in raw], rel=1e-6)


def test_the_probe_never_sees_the_held_out_half() -> None:
    method, _ = set_up("har")
    (walk,) = method.passes()
    assert sorted(walk.order) == np.flatnonzero(~method.held_out).tolist()


# -- AUM ------------------------------------------------------------------------------------------------


def test_margins_are_own_minus_largest_other() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.5], [3.0, -1.0, 0.0]])
    assert aum.margins(logits, torch.tensor([2, 0])).tolist() == [-1.5, 3.0]


def test_runs_learn_a_class_that_does_not_exist_and_add_up_margins() -> None:
    method, batch = set_up("aum", stage=1)
    method.fake[batch.index[0], 1] = True
    logits = method.runs[1](batch.views["weak"])[1]
    assert logits.shape[1] == CLASSES + 1
    labels = {r: CLASSES if bool(method.fake[i, 1]) else y for r, i, y in real(batch)}
    expected = -sum(log_p(logits[r], y) for r, y in labels.items()) / len(labels)
    assert loss_of(method, batch) == pytest.approx(expected, rel=1e-6)
    loss_of(method, batch)
    for r, i, _ in real(batch):
        rest = [float(logits[r, k]) for k in range(CLASSES + 1) if k != labels[r]]
        assert float(method.margin[i, 1]) == pytest.approx(float(logits[r, labels[r]]) - max(rest), rel=1e-5)
        assert method.seen[i].tolist() == [0, 2]
    assert method.seen.sum() == 2 * len(real(batch))


def test_fakes_are_few_and_in_one_run_only() -> None:
    fake = aum.fake_sets(TrainingSet(np.zeros(100, np.int32), 9, 0, 10))
    assert fake.sum(0).tolist() == [10, 10]
    assert fake.sum(1).max() == 1


def test_samples_no_better_than_fakes_go_unless_their_class_would_vanish() -> None:
    rows = [[5.0, 4.0], [0.0, 0.0], [-9.0, 9.0], [-9.0, -9.0], [-9.0, -9.0], [0.0, -9.0], [0.5, 9.0]]
    margin, fake = torch.tensor(rows), torch.zeros(7, 2, dtype=torch.bool)
    fake[1, 0] = fake[6, 1] = True  # thresholds: 0.0 in the first run, 9.0 in the second
    given = torch.tensor([0, 0, 0, 0, 1, 0, 0])
    clean, threshold = aum.select_clean(margin, fake, given, 0.99)
    assert threshold.tolist() == [0.0, 9.0]
    # 2 passes in the second run; 3 fails in both; 4 is all its class has; 1 is judged by the second alone
    assert clean.tolist() == [True, False, True, False, True, True, True]
