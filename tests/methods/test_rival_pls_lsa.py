"""PLS-LSA: both detectors, the trust in pseudo-labels and the losses written the slow way."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from ranks import on_ranks
from rivals import Course, Pictures, batch_of, make_method, small_config, survey_of
from sklearn.linear_model import LogisticRegression
from sklearn.mixture import GaussianMixture
from sklearn.preprocessing import StandardScaler
from torch.nn.functional import normalize

from pipeline.distributed.world import World
from pipeline.methods.parts.mixup import mixup_lambda, mixup_partners
from pipeline.methods.parts.separation import linear_separation
from pipeline.methods.pls_lsa import MIXUP_LAMBDA, MIXUP_PARTNERS, PLSLSA, mixed_contrastive, pseudo_label_trust
from shards.base.errors import UserError

K, N, C, D = 3, 45, 5, 6
VIEWS = ("weak", "weak2", "strong", "strong2")


def learner(epoch: int = 1, model: dict[str, object] | None = None, **options: object) -> PLSLSA:
    settings = {"name": "pls_lsa", "projection": D, "wrong_above": 0.5, **options}
    method = make_method(small_config(settings, model=model or {}, train={"epochs": 10}), Pictures().given, K)
    assert isinstance(method, PLSLSA)
    method.set_epoch(0, epoch)
    return method


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def softmax(row: torch.Tensor) -> list[float]:
    powers = [math.exp(float(v)) for v in row]
    return [p / sum(powers) for p in powers]


def slow_mixture(losses: np.ndarray) -> np.ndarray:
    """The chance to be of small loss, by the authors' settings of the fit."""
    values = ((losses - losses.min()) / np.ptp(losses))[:, None]
    mixture = GaussianMixture(2, max_iter=10, tol=1e-2, reg_covar=5e-4, random_state=0).fit(values)
    return mixture.predict_proba(values)[:, mixture.means_[:, 0].argmin()]


# -- detection -----------------------------------------------------------------------------------------------


def surveyed(method: PLSLSA) -> dict[str, torch.Tensor]:
    """Losses of two groups, which the early layer tells apart nearly as the losses do."""
    rng = np.random.default_rng(0)
    hard = rng.random(N) < 0.4
    logits = 2 * random(1, N, K)
    return {
        "middle": torch.from_numpy(rng.normal(size=(N, C)) + 0.8 * hard[:, None]),
        "logits": logits,
        "loss": torch.from_numpy(np.where(hard, 3, 0.5) + 0.9 * rng.random(N)),
    }


@pytest.mark.parametrize(("epoch", "detector"), [(1, "linear"), (2, "loss"), (3, "linear")])
def test_detectors_take_turns_and_wrong_labels_weigh_by_their_pseudo_loss(epoch: int, detector: str) -> None:
    method = learner(epoch)
    assert method.detector == detector
    method.guess.copy_(random(2, N, K).softmax(1))
    found = surveyed(method)
    method.begin_epoch(survey_of(found))
    right = slow_mixture(found["loss"].numpy())
    wrong = right < 0.5
    if detector == "linear":
        x = StandardScaler().fit_transform(found["middle"].numpy())
        separation = LogisticRegression(C=1e4 / N, class_weight="balanced", max_iter=1000, tol=1e-8).fit(x, wrong)
        right = separation.predict_proba(x)[:, 0]
        assert (wrong != (right < 0.5)).any()  # it does not only repeat what the losses say
        wrong = right < 0.5
    assert method.wrong.tolist() == wrong.tolist()
    assert method.score.tolist() == pytest.approx(right.tolist(), abs=2e-3)
    pseudo = np.array([
        -sum(float(g) * math.log(p) for g, p in zip(guess, softmax(row)))
        for guess, row in zip(method.guess, found["logits"])
    ])  # fmt: skip
    expected = np.ones(N)
    expected[wrong] = slow_mixture(pseudo[wrong])
    assert method.weight.tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    beliefs = method.beliefs
    label = [int(row.argmax()) if w else int(y) for row, w, y in zip(found["logits"], wrong, method.data.given)]
    assert beliefs.label.tolist() == label
    assert beliefs.clean.tolist() == (~wrong).tolist()


@pytest.mark.parametrize("only", ["loss", "linear"])
def test_one_detector_alone_can_be_asked_for(only: str) -> None:
    assert {learner(epoch, detector=only).detector for epoch in range(1, 5)} == {only}


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_the_trust_in_one_or_two_pseudo_labels_is_whole(wrong: int) -> None:
    assert pseudo_label_trust(np.arange(5.0), np.arange(5) < wrong).tolist() == [1.0] * 5


def test_the_early_layer_is_the_mean_of_the_second_stage() -> None:
    method, images = learner().eval(), torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        found = method.survey_outputs(images, torch.zeros(4, dtype=torch.long))
        backbone = method.network.backbone
        maps = backbone.stages[1](backbone.stages[0](backbone.stem(images)))
    assert torch.allclose(found["middle"], normalize(maps.mean((2, 3)), dim=1), atol=1e-6)
    assert not list(backbone.stages[1]._forward_hooks)


def test_the_layer_can_be_named_and_a_wrong_name_is_answered_with_those_there_are() -> None:
    with torch.no_grad():
        method, images = learner(layer="stem").eval(), torch.randn(4, 3, 8, 8)
        found = method.survey_outputs(images, torch.zeros(4, dtype=torch.long))
        assert torch.allclose(
            found["middle"], normalize(method.network.backbone.stem(images).mean((2, 3)), dim=1), atol=1e-6
        )
    with pytest.raises(
        UserError, match=r"method\.layer=stum is no layer of model\.backbone=preact_resnet18\. It has stem"
    ):
        learner(layer="stum")
    with pytest.raises(UserError, match=r"Set model\.compile=false"):
        learner(model={"compile": True})


def separated(world: World, x: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    rows = world.rank_slice(len(x))
    return linear_separation(x[rows], inside[rows], world)


@pytest.mark.dist
def test_the_separation_is_the_same_on_two_ranks() -> None:
    x, inside = random(0, N, C), torch.arange(N) % 3 == 0
    alone = linear_separation(x, inside, World())
    both = torch.cat(on_ranks(2, separated, x, inside))
    assert torch.allclose(both, alone, atol=1e-8)


def test_sets_that_can_be_separated_are_and_constant_features_do_no_harm() -> None:
    x = torch.cat([random(0, N, C), torch.ones(N, 1)], 1)
    inside = x[:, 0] > 0.8
    found = linear_separation(x, inside, World())
    assert ((found > 0.5) == inside).all()
    for none in (torch.zeros(N, dtype=torch.bool), torch.ones(N, dtype=torch.bool)):
        assert not linear_separation(x, none, World()).any()


# -- losses --------------------------------------------------------------------------------------------------


def test_the_loss_is_the_formula() -> None:
    """One picture at a time: targets and views by what is wrong, weights on both sides of the mixing, contrast by labels."""
    method = learner(penalty=0.7, contrastive=0.5).double()
    method.wrong.copy_(torch.arange(N) % 2 == 0)
    method.weight.copy_(torch.where(method.wrong, torch.from_numpy(np.random.default_rng(0).random(N)), 1.0))
    batch = batch_of(method, 8, views=VIEWS)
    valid, network = batch.valid.tolist(), method.network
    with torch.no_grad():
        found = {name: float(value) for name, value in method(batch).items()}
        lam = mixup_lambda(batch, 1.0, MIXUP_LAMBDA, fold=True)
        partner = mixup_partners(batch, 1, MIXUP_PARTNERS).tolist()
        images, targets, weights, keys = [], [], [], []
        for row, i in enumerate(batch.index.tolist()):
            wrong = bool(method.wrong[i])
            squares = [p**2 for p in softmax(network(batch.views["weak2"][row][None])[1][0])]
            guess = [q / sum(squares) for q in squares]
            if valid[row]:
                assert method.guess[i].tolist() == pytest.approx(guess, rel=1e-6)
            images.append(batch.views["strong" if wrong else "weak"][row])
            targets.append(guess if wrong else [float(k == batch.label[row]) for k in range(K)])
            weights.append(float(method.weight[i]) * valid[row])
            keys.append(normalize(method.projector(network(batch.views["strong2"][row][None])[0])[0], dim=0))
        label = [target.index(max(target)) for target in targets]
        sides, mean, cont = [0.0, 0.0], [0.0] * K, 0.0
        for i, j in enumerate(partner):
            features, logits = network((lam * images[i] + (1 - lam) * images[j])[None])
            p = softmax(logits[0])
            for side, row in enumerate((i, j)):
                sides[side] -= weights[row] * sum(t * math.log(q) for t, q in zip(targets[row], p))
            if not valid[i]:
                continue
            mean = [m + q / sum(valid) for m, q in zip(mean, p)]
            anchor = normalize(method.projector(features)[0], dim=0)
            scores = [math.exp(float(anchor @ key) / 0.2) * v for key, v in zip(keys, valid)]
            for share, wanted in ((lam, label[i]), (1 - lam, label[j])):
                same = [r for r in range(8) if valid[r] and label[r] == wanted]
                cont -= share * sum(math.log(scores[r] / sum(scores)) for r in same) / len(same) / sum(valid)
        ce = (lam * sides[0] + (1 - lam) * sides[1]) / sum(weights)
        penalty = sum(math.log(1 / K / m) for m in mean) / K
    expected = {"ce": ce, "penalty": penalty, "cont": cont, "loss": ce + 0.7 * penalty + 0.5 * cont}
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_warm_up_learns_given_labels_and_ends_with_pseudo_labels() -> None:
    method = learner(epoch=0, warmup=0.2)
    assert (method.passes()[0].views, method.surveys_before_epoch()) == (("weak",), False)
    batch = batch_of(method.double(), 5)
    assert set(method(batch)) == {"loss", "ce"}
    assert not method.guess.any()
    method.set_epoch(0, 1)
    assert (method.passes()[0].views, method.surveys_before_epoch()) == (("weak", "weak2"), False)
    method(batch_of(method, 5, views=("weak", "weak2")))
    assert int((method.guess.sum(1) > 0).sum()) == 4
    method.set_epoch(0, 2)
    assert (method.passes()[0].views, method.surveys_before_epoch()) == (VIEWS, True)


@pytest.mark.parametrize(("epoch", "contrastive"), [(0, 1.0), (1, 1.0), (1, 0.0)])
def test_every_part_that_is_said_to_learn_gets_a_gradient(epoch: int, contrastive: float) -> None:
    method = learner(epoch=epoch, contrastive=contrastive).double()
    method(batch_of(method, 5, views=VIEWS))["loss"].backward()
    learns = {name for name, _ in method.named_parameters() if name.startswith(method.passes()[0].trainable)}
    assert {name for name, p in method.named_parameters() if p.grad is not None} == learns


# -- what breaks the original --------------------------------------------------------------------------------


def test_a_sample_that_never_had_a_step_is_judged_by_its_given_label() -> None:
    method = learner()
    method.guess[1:] = random(0, N - 1, K).softmax(1)
    found = surveyed(method)
    given, row = int(method.data.given[0]), softmax(found["logits"][0])
    assert float(method.pseudo_losses(survey_of(found))[0]) == pytest.approx(-math.log(row[given]), rel=1e-5)


def test_nobody_trusted_gives_no_gradient_but_no_nan() -> None:
    method = learner().double()
    method.weight.zero_()
    loss = method(batch_of(method, 5, views=VIEWS))["loss"]
    loss.backward()
    assert all(p.grad.isfinite().all() for p in method.parameters() if p.grad is not None)


def test_rows_that_do_not_count_are_no_keys() -> None:
    z, other = normalize(random(0, 4, D), dim=1), normalize(random(1, 4, D), dim=1)
    label, partner, valid = torch.tensor([0, 0, 1, 0]), torch.tensor([1, 2, 0, 3]), torch.tensor([1.0, 1, 1, 0])
    whole = mixed_contrastive(z, other, label, partner, 0.6, valid, 0.2, World(), [4])
    part = mixed_contrastive(z[:3], other[:3], label[:3], partner[:3], 0.6, valid[:3], 0.2, World(), [3])
    assert float(whole) == pytest.approx(float(part), rel=1e-9)


def test_a_hundred_classes_with_five_pictures_each_train() -> None:
    config = small_config({"name": "pls_lsa"}, train={"epochs": 3}, data={"batch": 256, "mix_group": 64})
    losses = list(Course(config, Pictures(500, 100, even=True), 100).steps())
    assert all(math.isfinite(found["loss"]) for found in losses)
